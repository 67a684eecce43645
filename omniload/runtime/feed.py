"""One source as a planner reads it: loaders that share its windows by leases, read one chunk ahead."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Protocol

from omniload.errors import LoaderTimeout
from omniload.mixture import SourceSpec
from omniload.pieces import Cursor, SampleChunk
from omniload.runtime.chaos import SourceChaos
from omniload.runtime.leases import Lease, LeaseTable

CHUNK_SAMPLES = 8192
"""Most samples per read. A loader hands out what it has prepared at once, which of text is less; of pre-tokenised data
it may be a whole window, so that the next one is decoded while the planner uses this one."""


_RETRY_S = 0.05
AVOID_S = 5.0
"""How long a loader that was lost is not asked while there is another."""


class LoaderLost(Exception):
    """A loader does not answer: it died, or is slower than one that shares its source would be."""


class ChunkReader(Protocol):
    """Reads samples of a source: a loader, or what stands for one in another process."""

    def read(self, cursor: Cursor, max_samples: int) -> SampleChunk:
        """The chunk from a cursor on.

        Raises:
            LoaderLost: it does not answer.
        """

    def evict(self, fraction: float) -> None:
        """Let go of this fraction of the payload kept."""


class SourceFeed:
    """Chunks of one source. `read` is called by one thread, the planner's.

    The reading itself happens in ``pool``, so that the chunk after the one returned is being prepared while the
    planner uses it.

    Args:
        name: the source.
        spec: its part of the mixture.
        loaders: the loaders that share it.
        pool: where reads run.
        timeout_s: limit of every wait.
        num_standbys: how many of the loaders, the last ones, read only what another has lost.
        lost: told of a loader that does not answer, by its index, and why.
        chaos: disturbance, or None.
    """

    def __init__(
        self,
        name: str,
        spec: SourceSpec,
        loaders: Sequence[ChunkReader],
        pool: Executor,
        *,
        timeout_s: float,
        num_standbys: int = 0,
        lost: Callable[[int, LoaderLost], None] | None = None,
        chaos: SourceChaos | None = None,
    ) -> None:
        self._name = name
        self._spec = spec
        self._loaders = loaders
        self._pool = pool
        self._timeout_s = timeout_s
        self._chaos = chaos
        self._leases = LeaseTable(len(loaders) - num_standbys, num_standbys)
        self._lost = lost
        self._avoided_until = [0.0] * len(loaders)
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

    def _read(self, cursor: Cursor) -> SampleChunk:
        deadline = time.monotonic() + self._timeout_s
        while True:
            lease = self._holder(cursor)
            loader = self._loaders[lease.loader]
            try:
                if self._chaos is None:
                    chunk = loader.read(cursor, CHUNK_SAMPLES)
                else:
                    chunk = self._chaos.read(loader, cursor)
                    if self._chaos.revokes():
                        self._leases.move(cursor.epoch, cursor.window)
            except LoaderLost as lost:
                self._move_on(cursor, lease.loader, lost, deadline)
                continue
            if self._leases.accepts(cursor.epoch, cursor.window, lease):
                self._leases.forget_before(chunk.end.epoch, chunk.end.window)
                return chunk
            self.stale_answers += 1

    def _holder(self, cursor: Cursor) -> Lease:
        """The lease on a window; moved before, if its holder was lost a moment ago and another was not."""
        now = time.monotonic()
        for _ in self._loaders:
            lease = self._leases.holder(cursor.epoch, cursor.window)
            if self._avoided_until[lease.loader] <= now:
                break
            self._leases.move(cursor.epoch, cursor.window)
        return self._leases.holder(cursor.epoch, cursor.window)

    def _move_on(self, cursor: Cursor, loader: int, lost: LoaderLost, deadline: float) -> None:
        """Lease a window to another loader; where there is none, wait for the one to come back."""
        if self._lost is not None:
            self._lost(loader, lost)
        now = time.monotonic()
        if now > deadline:
            raise LoaderTimeout(
                f"source '{self._name}': no loader answered within {self._timeout_s:g} s ({lost}); look at its node,"
                " or raise timeout_s"
            ) from None
        self._avoided_until[loader] = now + AVOID_S
        if min(self._avoided_until) > now:  # all of them were lost; ask again until one is back
            self._avoided_until = [0.0] * len(self._loaders)
            time.sleep(_RETRY_S)
        self._leases.move(cursor.epoch, cursor.window)
