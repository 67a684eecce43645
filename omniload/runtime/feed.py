"""One source as the inline runtime serves it: loaders that share its windows, read one chunk ahead."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor, Future

import numpy as np

from omniload.errors import LoaderTimeout
from omniload.loader import SourceLoader
from omniload.mixture import SourceSpec
from omniload.payload import Payload
from omniload.pieces import Cursor, SampleChunk
from omniload.runtime.chaos import SourceChaos
from omniload.runtime.leases import LeaseTable

CHUNK_SAMPLES = 8192
"""Most samples per read. A loader hands out what it has prepared at once, which of text is less; of pre-tokenised data
it may be a whole window, so that the next one is decoded while the planner uses this one."""


class SourceFeed:
    """Chunks and payload of one source.

    `read` is called by one thread, the planner's; the reading itself happens in ``pool``, so that the chunk after
    the one returned is being prepared while the planner uses it. `payload` may be called by another thread.

    Args:
        name: the source.
        spec: its part of the mixture.
        loaders: the loaders that share it.
        pool: where reads run.
        timeout_s: limit of every wait.
        chaos: disturbance, or None.
    """

    def __init__(
        self,
        name: str,
        spec: SourceSpec,
        loaders: Sequence[SourceLoader],
        pool: Executor,
        *,
        timeout_s: float,
        chaos: SourceChaos | None = None,
    ) -> None:
        self._name = name
        self._spec = spec
        self._loaders = loaders
        self._pool = pool
        self._timeout_s = timeout_s
        self._chaos = chaos
        self._leases = LeaseTable(len(loaders))
        self._ahead: tuple[Cursor, Future[SampleChunk]] | None = None
        self.stale_answers = 0
        """Answers refused because their lease had moved."""

    def read(self, cursor: Cursor) -> SampleChunk:
        """The chunk that starts at ``cursor``.

        Raises:
            LoaderTimeout: it did not come in time.
            SourceError: the source cannot be read.
        """
        ahead, self._ahead = self._ahead, None
        future = ahead[1] if ahead and ahead[0] == cursor else self._pool.submit(self._read, cursor)
        try:
            chunk = future.result(self._timeout_s)
        except TimeoutError:
            if not future.done():
                raise LoaderTimeout(
                    f"source '{self._name}': no samples within {self._timeout_s:g} s (epoch {cursor.epoch},"
                    f" window {cursor.window}, row {cursor.position}); raise timeout_s if its storage is that slow"
                ) from None
            chunk = future.result()  # done just now, or it raised a time-out of its own
        if self._spec.on_exhausted == "repeat" or chunk.end.epoch < self._spec.repeat:
            self._ahead = (chunk.end, self._pool.submit(self._read, chunk.end))
        return chunk

    def payload(self, pieces: np.ndarray) -> Payload:
        """The tokens of ``pieces``, in order; from the loader that prepared them where it is known."""
        if len(self._loaders) == 1:
            return self._loaders[0].payload(pieces)
        # Any loader can derive any piece again; asking a fixed one per block merely keeps its caches useful.
        owner = (pieces["file"] + pieces["block"]) % len(self._loaders)
        places = [np.flatnonzero(owner == i) for i in range(len(self._loaders))]
        return Payload.gathered(
            len(pieces),
            (
                (where.tolist(), loader.payload(pieces[where]))
                for loader, where in zip(self._loaders, places, strict=True)
            ),
        )

    def release(self, pieces: np.ndarray) -> None:
        """Tell the loaders that these pieces are delivered."""
        for loader in self._loaders:
            loader.release(pieces)

    def row_ids(self, file: int, block: int) -> np.ndarray:
        """``int64[n]``: ids of the rows of a block, as provenance names them."""
        return self._loaders[0].row_ids(file, block)

    def _read(self, cursor: Cursor) -> SampleChunk:
        while True:
            lease = self._leases.holder(cursor.epoch, cursor.window)
            loader = self._loaders[lease.loader]
            if self._chaos is None:
                chunk = loader.read(cursor, CHUNK_SAMPLES)
            else:
                self._chaos.delay()
                chunk = loader.read(cursor, self._chaos.chunk_samples())
                if fraction := self._chaos.evicted_fraction():
                    loader.evict(fraction)
                if self._chaos.revokes():
                    self._leases.move(cursor.epoch, cursor.window)
            if self._leases.accepts(cursor.epoch, cursor.window, lease):
                self._leases.forget_before(chunk.end.epoch, chunk.end.window)
                return chunk
            self.stale_answers += 1
