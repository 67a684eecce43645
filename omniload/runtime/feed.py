"""One source as a planner reads it: loaders that share its windows by leases, read one chunk ahead."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Protocol, Self

from omniload.errors import LoaderTimeout
from omniload.mixture import SourceSpec
from omniload.pieces import Cursor, SampleChunk
from omniload.runtime.chaos import SourceChaos
from omniload.runtime.leases import Lease, LeaseTable

CHUNK_SAMPLES = 8192
"""Most samples per read. A loader hands out what it has prepared at once, which of text is less; of pre-tokenised data
it may be a whole window, so that the next one is decoded while the planner uses this one."""


_RETRY_S = 0.05
_LAST_WORD_S = 1.0
"""A read that gives up says more than who waits for it could, so it is given time to."""
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


@dataclass(frozen=True, slots=True)
class _Sharing:
    """How loaders share a source, until they are others."""

    loaders: Sequence[ChunkReader]
    leases: LeaseTable
    avoided_until: list[float]
    """By loader: until when it is not asked while there is another, on the clock of `time.monotonic`."""

    @classmethod
    def of(cls, loaders: Sequence[ChunkReader], num_standbys: int) -> Self:
        return cls(loaders, LeaseTable(len(loaders) - num_standbys, num_standbys), [0.0] * len(loaders))

    def holder(self, cursor: Cursor) -> Lease:
        """The lease on a window; moved before, if its holder was lost a moment ago and another was not."""
        now = time.monotonic()
        for _ in self.loaders:
            lease = self.leases.holder(cursor.epoch, cursor.window)
            if self.avoided_until[lease.loader] <= now:
                break
            self.leases.move(cursor.epoch, cursor.window)
        return self.leases.holder(cursor.epoch, cursor.window)

    def pass_over(self, loader: int) -> None:
        """Do not ask a loader for a while; where all were lost, wait a little, and ask them again."""
        now = time.monotonic()
        self.avoided_until[loader] = now + AVOID_S
        if min(self.avoided_until) > now:
            self.avoided_until[:] = [0.0] * len(self.loaders)
            time.sleep(_RETRY_S)


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
        lost: told of a loader that does not answer, and why.
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
        lost: Callable[[ChunkReader, LoaderLost], None] | None = None,
        chaos: SourceChaos | None = None,
    ) -> None:
        self._name = name
        self._spec = spec
        self._pool = pool
        self._timeout_s = timeout_s
        self._chaos = chaos
        self._sharing = _Sharing.of(loaders, num_standbys)
        self._lost = lost
        self._ahead: tuple[Cursor, Future[SampleChunk]] | None = None
        self.stale_answers = 0
        """Answers refused because their lease had moved."""
        self.waited_s = 0.0
        """Time that `read` waited."""

    def read(self, cursor: Cursor) -> SampleChunk:
        """The chunk that starts at ``cursor``.

        Raises:
            LoaderTimeout: it did not come in time.
            SourceError: the source cannot be read.
        """
        ahead, self._ahead = self._ahead, None
        future = ahead[1] if ahead and ahead[0] == cursor else self._pool.submit(self._read, cursor)
        began_s = time.perf_counter()
        try:
            chunk = future.result(self._timeout_s + _LAST_WORD_S)
        except TimeoutError:
            if not future.done():
                raise LoaderTimeout(
                    f"source '{self._name}': no samples within {self._timeout_s:g} s (epoch {cursor.epoch},"
                    f" window {cursor.window}, row {cursor.position}); raise timeout_s if its storage is that slow"
                ) from None
            chunk = future.result()  # done just now, or it raised a time-out of its own
        self.waited_s += time.perf_counter() - began_s
        if self._spec.on_exhausted == "repeat" or chunk.end.epoch < self._spec.repeat:
            self._ahead = (chunk.end, self._pool.submit(self._read, chunk.end))
        return chunk

    def share(self, loaders: Sequence[ChunkReader], num_standbys: int) -> None:
        """Share the source among other loaders from now on. What is being read is refused, and read again."""
        self._sharing = _Sharing.of(loaders, num_standbys)

    def _read(self, cursor: Cursor) -> SampleChunk:
        deadline = time.monotonic() + self._timeout_s
        while True:
            sharing = self._sharing
            leases, lease = sharing.leases, sharing.holder(cursor)
            loader = sharing.loaders[lease.loader]
            try:
                if self._chaos is None:
                    chunk = loader.read(cursor, CHUNK_SAMPLES)
                else:
                    chunk = self._chaos.read(loader, cursor)
                    if self._chaos.revokes():
                        leases.move(cursor.epoch, cursor.window)
            except LoaderLost as lost:
                if self._lost is not None and sharing is self._sharing:
                    self._lost(loader, lost)
                if time.monotonic() > deadline:
                    raise LoaderTimeout(
                        f"source '{self._name}': no loader answered within {self._timeout_s:g} s ({lost}); look at its"
                        " node, or raise timeout_s"
                    ) from None
                sharing.pass_over(lease.loader)
                leases.move(cursor.epoch, cursor.window)
                continue
            if sharing is self._sharing and leases.accepts(cursor.epoch, cursor.window, lease):
                leases.forget_before(chunk.end.epoch, chunk.end.window)
                return chunk
            self.stale_answers += 1
