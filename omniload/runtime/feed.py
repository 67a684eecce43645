"""One source as a planner reads it: loaders that share its windows by leases, read one chunk ahead."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np

from omniload.errors import LoaderStopped, LoaderTimeout
from omniload.mixture import SourceSpec
from omniload.pieces import Cursor, SampleChunk
from omniload.runtime.chaos import SourceChaos
from omniload.runtime.leases import Lease, LeaseTable

CHUNK_SAMPLES = 8192
"""Most samples per read. A loader hands out what it has prepared at once, which of text is less; of pre-tokenised data
it may be a whole window, so that the next one is decoded while the planner uses this one."""


_LOOK_S = 0.1
"""How often who waits for a read looks whether it is to end."""
_RETRY_S = 0.05
_LAST_WORD_S = 1.0
"""A read that gives up says more than who waits for it could, so it is given time to."""
_BLOCKS_NOTED = 1024
"""Of a source: more than its loaders keep."""
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


class FeedObserver(Protocol):
    """Hears what befalls the loaders of sources, in any thread; who runs them in processes of their own does."""

    def lost(self, source: str, loader: ChunkReader, why: LoaderLost) -> None:
        """A loader does not answer."""

    def lease_moved(self, source: str, cursor: Cursor, lease: Lease, why: str) -> None:
        """The window of a cursor goes to another loader, under this lease."""

    def answer_refused(self, source: str, cursor: Cursor, loader: ChunkReader, lease: Lease) -> None:
        """A loader answered under a lease that is in force no more."""


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
        observer: hears of loaders that do not answer, or None.
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
        observer: FeedObserver | None = None,
        chaos: SourceChaos | None = None,
    ) -> None:
        self._name = name
        self._spec = spec
        self._pool = pool
        self._timeout_s = timeout_s
        self._chaos = chaos
        self._sharing = _Sharing.of(loaders, num_standbys)
        self._observer = observer
        self._stopped = False
        self._ahead: tuple[Cursor, Future[SampleChunk]] | None = None
        self._read_by: OrderedDict[int, int] = OrderedDict()  # which loader, by block
        self.stale_answers = 0
        """Answers refused because their lease had moved."""
        self.waited_s = 0.0
        """Time that `read` waited."""

    def read(self, cursor: Cursor) -> SampleChunk:
        """The chunk that starts at ``cursor``.

        Raises:
            LoaderTimeout: it did not come in time.
            LoaderStopped: the feed was stopped.
            SourceError: the source cannot be read.
        """
        ahead, self._ahead = self._ahead, None
        future = ahead[1] if ahead and ahead[0] == cursor else self._pool.submit(self._read, cursor)
        began_s, limit_s = time.perf_counter(), self._timeout_s + _LAST_WORD_S
        while not _is_done(future, min(_LOOK_S, began_s + limit_s - time.perf_counter())):
            if self._stopped:
                raise LoaderStopped("the loader was closed")
            if time.perf_counter() - began_s >= limit_s:
                raise LoaderTimeout(
                    f"source '{self._name}': no samples within {self._timeout_s:g} s (epoch {cursor.epoch},"
                    f" window {cursor.window}, row {cursor.position}); raise timeout_s if its storage is that slow"
                )
        chunk = future.result()
        self.waited_s += time.perf_counter() - began_s
        if self._spec.on_exhausted == "repeat" or chunk.end.epoch < self._spec.repeat:
            self._ahead = (chunk.end, self._pool.submit(self._read, chunk.end))
        return chunk

    def stop(self) -> None:
        """Let who waits for a read go; the read itself ends by itself."""
        self._stopped = True

    @property
    def is_shared(self) -> bool:
        """Whether there is more than one loader."""
        return len(self._sharing.loaders) > 1

    def holders(self, pieces: np.ndarray) -> np.ndarray:
        """``int64[n]``: the loader that read each of ``PIECE[n]``, and so has it at hand; of old ones, any."""
        blocks, which = np.unique(_blocks(pieces), return_inverse=True)
        return np.array([self._read_by.get(block, 0) for block in blocks.tolist()], np.int64)[which]

    def share(self, loaders: Sequence[ChunkReader], num_standbys: int) -> None:
        """Share the source among other loaders from now on. What is being read is refused, and read again."""
        self._sharing = _Sharing.of(loaders, num_standbys)

    def _read(self, cursor: Cursor) -> SampleChunk:
        deadline = time.monotonic() + self._timeout_s
        while True:
            sharing = self._sharing
            leases, lease = sharing.leases, self._holder(sharing, cursor)
            loader = sharing.loaders[lease.loader]
            try:
                if self._chaos is None:
                    chunk = loader.read(cursor, CHUNK_SAMPLES)
                else:
                    chunk = self._chaos.read(loader, cursor)
                    if self._chaos.revokes():
                        self._move(sharing, cursor, "chaos")
            except LoaderLost as lost:
                if self._observer is not None and sharing is self._sharing:
                    self._observer.lost(self._name, loader, lost)
                if time.monotonic() > deadline:
                    raise LoaderTimeout(
                        f"source '{self._name}': no loader answered within {self._timeout_s:g} s ({lost}); look at its"
                        " node, or raise timeout_s"
                    ) from None
                sharing.pass_over(lease.loader)
                self._move(sharing, cursor, str(lost))
                continue
            if sharing is self._sharing and leases.accepts(cursor.epoch, cursor.window, lease):
                leases.forget_before(chunk.end.epoch, chunk.end.window)
                if self.is_shared:
                    self._note(chunk, lease.loader)
                return chunk
            self.stale_answers += 1
            if self._observer is not None:
                self._observer.answer_refused(self._name, cursor, loader, lease)

    def _note(self, chunk: SampleChunk, loader: int) -> None:
        for block in np.unique(_blocks(chunk.pieces)).tolist():
            self._read_by[block] = loader
            self._read_by.move_to_end(block)
        while len(self._read_by) > _BLOCKS_NOTED:
            self._read_by.popitem(last=False)

    def _holder(self, sharing: _Sharing, cursor: Cursor) -> Lease:
        """The lease on a window; moved before, if its holder was lost a moment ago and another was not."""
        now = time.monotonic()
        for _ in sharing.loaders:
            lease = sharing.leases.holder(cursor.epoch, cursor.window)
            if sharing.avoided_until[lease.loader] <= now:
                break
            self._move(sharing, cursor, "its loader was lost a moment ago")
        return sharing.leases.holder(cursor.epoch, cursor.window)

    def _move(self, sharing: _Sharing, cursor: Cursor, why: str) -> None:
        lease = sharing.leases.move(cursor.epoch, cursor.window)
        if self._observer is not None:
            self._observer.lease_moved(self._name, cursor, lease, why)


def _is_done(future: Future[SampleChunk], timeout_s: float) -> bool:
    wait([future], max(0.0, timeout_s))
    return future.done()  # which is also true of one that was cancelled, and that `wait` waits for


def _blocks(pieces: np.ndarray) -> np.ndarray:
    """``uint64[n]``: the block that each piece is of, whatever the epoch."""
    return np.asarray(pieces["file"].astype(np.uint64) << np.uint64(32) | pieces["block"])
