"""One source as the planner draws from it: chunks of metadata become single samples and an account of them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from omniload.errors import LoaderTimeout, SourceError, SourceNotFound
from omniload.mixture import SourceSpec
from omniload.pieces import Cursor, Failure, SampleChunk
from omniload.planner.budget import Budget
from omniload.planner.state import SourceState
from storage.errors import Corrupt, StorageError


class Metadata(Protocol):
    """Where the planner gets the metadata of samples from: the runtime, in front of the source loaders."""

    def read(self, source: int, cursor: Cursor) -> SampleChunk:
        """The chunk of ``source`` that starts at ``cursor``; waits for it."""


class Unreachable(Exception):
    """A source cannot be read any more, and its policy is to go on without it.

    Args:
        source: its number.
        error: what reading it came to.
    """

    def __init__(self, source: int, error: Exception) -> None:
        super().__init__(source, error)
        self.source = source
        self.error = error


def is_unreachable(error: Exception) -> bool:
    """Whether an error says that a source cannot be read, and nothing about what is in it."""
    if isinstance(error, StorageError):
        return not isinstance(error, Corrupt)
    # Arrow says with an OSError that has no number that it does not understand a file.
    by_system = isinstance(error, OSError) and error.errno is not None
    return by_system or isinstance(error, SourceNotFound | LoaderTimeout)


@dataclass(kw_only=True, slots=True)
class Taken:
    """What was drawn from one source; lists, because joining what all sources gave once is cheaper."""

    pieces: list[np.ndarray] = field(default_factory=list)
    """``PIECE[p]`` each, in the order drawn; views of the chunks, without ``source`` and ``born``."""
    pieces_of: list[np.ndarray] = field(default_factory=list)
    """``int64[n]`` each: pieces of the samples."""
    orders: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """``int64[n]``: draw numbers of the samples."""
    failed: list[Failure] = field(default_factory=list)
    """Rows that were quarantined on the way."""


class SourceReader:
    """Draws the samples of one source one by one from its chunks, and keeps the account of what was drawn.

    Args:
        name: the source.
        index: its number.
        spec: its part of the mixture.
        state: its account so far.
        metadata: where its chunks come from.
        quarantine: file that its bad rows are written to; without one they are only counted.
    """

    def __init__(
        self,
        name: str,
        index: int,
        spec: SourceSpec,
        state: SourceState,
        metadata: Metadata,
        quarantine: str | None,
    ) -> None:
        self._name = name
        self._index = index
        self._spec = spec
        self._metadata = metadata
        self._account = state
        self._chunk: SampleChunk | None = None
        self._next_cursor = state.cursor
        # Rows after the last sample of chunks already left; they are booked with the next sample drawn, so that
        # the state does not depend on where the chunks were cut.
        self._pending_rows = 0
        self._pending_failures = 0
        self._pending_failed: list[Failure] = []
        self._keeps_failed = quarantine is not None
        self._budget = Budget(name, spec, quarantine)
        self._failed_at = 0  # first failure of the chunk that is not booked
        self._sample_tokens = np.empty(0, np.int64)
        self._pieces_of = np.empty(0, np.int64)
        self._sums: np.ndarray = np.empty((0, 0), np.int64)
        self._first = 0  # first sample of the chunk that is drawn but not yet booked
        self._at = 0  # next sample of the chunk
        self._taken = Taken()  # booked since the last `take`
        self._orders: list[np.ndarray] = []  # draw numbers of all draws since then

    @property
    def exhausted(self) -> bool:
        """Whether it gave its last sample."""
        return self._account.exhausted

    @property
    def says_stop(self) -> bool:
        """Whether it gave its last sample and ends the stream with it."""
        return self.exhausted and self._spec.on_exhausted == "stop"

    def draw(self, order: int) -> int | None:
        """Draw the next sample as draw number ``order``; its emitted tokens, or None if the source is spent."""
        while self._at == len(self._sample_tokens):
            if not self.read_on():
                return None
        tokens = int(self._sample_tokens[self._at])
        self._at += 1
        self._orders.append(np.array([order]))
        return tokens

    @property
    def ready(self) -> np.ndarray:
        """``int64[n]``: emitted tokens of the samples at hand that `draw` gives next."""
        return self._sample_tokens[self._at :]

    def draw_ready(self, count: int) -> None:
        """Draw the first ``count`` of the samples at hand."""
        self._at += count

    def read_on(self) -> bool:
        """Move on to the next chunk, which may have no sample, once all at hand are drawn; False if spent."""
        return not self.exhausted and self._next_chunk()

    def number(self, orders: np.ndarray) -> None:
        """Give what `draw_ready` drew since the last call its draw numbers: ``int64[n]``, ascending."""
        self._orders.append(orders)

    @property
    def state(self) -> SourceState:
        """The account after the last `take`."""
        return self._account

    def take(self) -> Taken:
        """What was drawn since the last call.

        Raises:
            TooManyFailures: the budget is exceeded.
        """
        self._book()
        taken, self._taken = self._taken, Taken()
        if self._orders:
            taken.orders = np.concatenate(self._orders)
            self._orders = []
        return taken

    def _next_chunk(self) -> bool:
        """Move to the next chunk; False if the source is spent."""
        self._book()
        account = self._account
        if self._chunk is not None:
            self._leave(self._chunk)
        if self._spec.on_exhausted != "repeat" and self._next_cursor.epoch >= self._spec.repeat:
            self._account = replace(
                account,
                exhausted=True,
                rows=account.rows + self._pending_rows,
                failures=account.failures + self._pending_failures,
            )
            self._taken.failed += self._pending_failed
            return False
        try:
            chunk = self._metadata.read(self._index, self._next_cursor)
        except Exception as error:
            if self._spec.on_unreachable == "drop_source" and is_unreachable(error):
                raise Unreachable(self._index, error) from error
            raise
        assert chunk.end != chunk.begin, "a chunk moves the cursor, or reading would never end"
        lengths = np.concatenate([[0], np.cumsum(chunk.pieces["length"], dtype=np.int64)])
        self._sample_tokens = np.diff(lengths[chunk.first_piece])
        self._pieces_of = np.diff(chunk.first_piece)
        # Totals before each sample, so that a draw is booked by two look-ups.
        counts = (
            chunk.rows[:-1],
            chunk.failures[:-1],
            chunk.tokens,
            chunk.truncated,
            chunk.dropped,
            self._pieces_of > 0,
        )
        self._sums = np.zeros((len(counts), len(chunk.tokens) + 1), np.int64)
        for sums, count in zip(self._sums, counts, strict=True):
            np.cumsum(count, out=sums[1:])
        self._chunk, self._next_cursor = chunk, chunk.end
        self._first = self._at = self._failed_at = 0
        self._budget.begin(
            chunk.begin,
            rows=account.rows + self._pending_rows,
            failures=account.failures + self._pending_failures,
        )
        if chunk.ends_epoch and not account.emitted_tokens and not len(chunk.pieces):
            # Judged by the account, which is part of the state, so that a resume judges alike.
            self._leave(chunk)
            raise SourceError(
                f"source '{self._name}' gave no token in a whole pass over its data"
                f" ({account.failures + self._pending_failures} rows quarantined{self._budget.last_reasons}):"
                " check its column, transforms, overflow policy and split"
            )
        return True

    def _leave(self, chunk: SampleChunk) -> None:
        """Set aside the rows after the last sample of a chunk."""
        rest = chunk.failed[self._failed_at :]
        self._budget.spend(rest, (self._taken.failed, self._pending_failed))
        self._pending_rows += int(chunk.rows[-1])
        self._pending_failures += len(rest)
        if self._keeps_failed:
            self._pending_failed += rest

    def _book(self) -> None:
        """Account for the samples drawn from the current chunk."""
        first, at, chunk = self._first, self._at, self._chunk
        if chunk is None or first == at:
            return
        rows, failures, read, truncated, dropped, emitted = (
            self._sums[:, at] - self._sums[:, first]
        ).tolist()
        failed = chunk.failed[self._failed_at : self._failed_at + failures]
        taken, account = self._taken, self._account
        self._budget.spend(failed, (taken.failed, self._pending_failed))
        if self._keeps_failed:
            taken.failed += (*self._pending_failed, *failed)
        taken.pieces.append(chunk.pieces[chunk.first_piece[first] : chunk.first_piece[at]])
        taken.pieces_of.append(self._pieces_of[first:at])
        begin = chunk.begin
        self._account = SourceState(
            cursor=Cursor(
                epoch=begin.epoch,
                window=begin.window,
                file=begin.file,
                block=begin.block,
                position=int(chunk.position[at - 1]),
                sub=int(chunk.sub[at - 1]) + 1,
            ),
            rows=account.rows + self._pending_rows + rows,
            failures=account.failures + self._pending_failures + failures,
            read_tokens=account.read_tokens + read,
            truncated_tokens=account.truncated_tokens + truncated,
            dropped_tokens=account.dropped_tokens + dropped,
            emitted_samples=account.emitted_samples + emitted,
        )
        self._pending_rows, self._pending_failures, self._pending_failed = 0, 0, []
        self._first, self._failed_at = at, self._failed_at + failures
