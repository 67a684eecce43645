"""An iterable dataset, read in blocks of rows: in sequence, and again from a block that has passed.

There is no way into the middle of it but to iterate from the start, or from a state that the dataset gave when it was
there. What has been read leaves a digest, so that a dataset that gives other rows the second time is found out.
"""

from __future__ import annotations

import itertools
import threading
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from omniload.errors import SourceError, kind_and_message
from omniload.sources.protocol import BadRow, Row
from omniload.sources.recent import Recent
from omniload.sources.torch_rows import digest_of, row_of
from omniload.torch_loader.reading import Reading

BLOCK_ROWS = 256
"""Rows of a block; part of their order."""
MAX_STATES = 64
"""States of the dataset kept in each of the two epochs read last: of blocks as far apart as it takes."""
KEPT_BYTES = 32 << 20
"""Of the rows passed last, about: after a resume, those of the pieces carried over lie right before the place."""
_EPOCHS = 2

_Rows: TypeAlias = tuple[list[Row | BadRow], int]
"""The rows of a block, and about how many bytes they take."""


class _OtherRowsFromState(Exception):
    """A state of the dataset led nowhere, or to other rows than iterating had."""


@dataclass(kw_only=True, slots=True)
class _Passed:
    """What is kept of an epoch."""

    digests: array[int] = field(default_factory=partial(array, "Q"))
    """Of each block read, without gaps."""
    states: list[tuple[int, Mapping[str, Any]]] = field(default_factory=list)
    """Of dataset and iterator before a block, by that block, ascending."""
    every: int = 1
    """Blocks from one state to the next."""
    num_blocks: int | None = None
    """Blocks that have rows, once the end was read."""

    def keep(self, block: int, states: Mapping[str, Any]) -> None:
        """Note the states before a block; if they become too many, every other goes."""
        self.states.append((block, states))
        if len(self.states) > MAX_STATES:
            self.states = self.states[1::2]
            self.every *= 2

    def nearest(self, block: int) -> tuple[int, Mapping[str, Any]] | None:
        """The last states at or before a block, and before one that is known, by which they are proven."""
        last = min(block, len(self.digests) - 1)
        return next((known for known in reversed(self.states) if known[0] <= last), None)


class Stream:
    """One dataset; sources and threads that share it take turns.

    Args:
        dataset: gives the same rows in the same order every time it is iterated; with ``set_epoch``, those of the epoch
            last set. A state (``state_dict`` and ``load_state_dict``) of it or of its iterator shortens the way back.
        kept_bytes: about how much of the rows passed last is kept.
    """

    def __init__(self, dataset: Any, kept_bytes: int = KEPT_BYTES) -> None:
        self._reading = Reading(dataset)
        self._lock = threading.Lock()
        self.has_epochs = callable(getattr(dataset, "set_epoch", None))
        """Whether the rows may be others in every epoch."""
        self._passed: Recent[_Passed] = Recent(_EPOCHS, lambda _: _Passed())
        self._kept_bytes = kept_bytes
        self._kept: dict[tuple[int, int], _Rows] = {}  # by epoch and block, the first passed first
        self._has_states = True  # as long as they are of use
        self._samples: Iterator[Any] | None = None  # of a pass over the dataset
        self._epoch = 0
        self._at = 0  # block that the pass gives next
        self._from_state = False
        self._ended = False
        self._fresh = True  # nothing was read yet, so that what is read first was there before
        self._head: list[Any] | None = None  # the first sample, once asked for

    def first(self, source: str) -> Row | BadRow | None:
        """The first row of the first epoch, None if it has none; raises as `read`."""
        with self._turn():
            if self._head is None:
                self._begin(source, 0)
                self._head = self._next(source, 1)
                assert self._samples is not None, "just begun"
                self._samples, self._ended = itertools.chain(self._head, self._samples), False
            return row_of(self._head[0]) if self._head else None

    def read(self, source: str, epoch: int, block: int) -> _Rows:
        """The rows of a block, none if it lies behind the end, and about how many bytes they take.

        Args:
            source: name of the source, for errors.
            epoch: pass over the dataset, from 0.
            block: number of the block in it.

        Raises:
            SourceError: the dataset raises an error, ends long before the block, or gives other rows than it did.
        """
        epoch = epoch if self.has_epochs else 0
        with self._turn():
            if (epoch, block) in self._kept:
                return self._kept[epoch, block]
            try:
                return self._read(source, epoch, block)
            except _OtherRowsFromState:
                self._has_states = False  # as with a shuffle buffer that is no part of the state
                self._samples = None
                return self._read(source, epoch, block)

    def close(self) -> None:
        """Let go of the pass that is under way, and of rows."""
        with self._lock:
            self._samples = None
            self._kept.clear()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """One thread's use. An error ends the pass: an iterator that raised may next say that it ended."""
        with self._lock:
            try:
                yield
            except BaseException:
                self._samples = None
                raise

    def _read(self, source: str, epoch: int, block: int) -> _Rows:
        passed = self._passed.get(epoch)
        if passed.num_blocks is not None and block >= passed.num_blocks:
            return [], 0
        self._go_to(source, passed, epoch, block)
        while True:
            at = self._at
            rows = [row_of(sample) for sample in self._next(source, BLOCK_ROWS)]
            self._at += 1
            num_bytes = self._check(source, passed, at, rows)
            self._keep(epoch, at, (rows, num_bytes))
            if at == block or not rows:
                break
        if at < block and self._fresh:  # later it may be that blocks behind the end are asked for
            raise SourceError(
                f"source '{source}': the dataset ends before row {at * BLOCK_ROWS}, and the run had come to row"
                f" {block * BLOCK_ROWS} of it; resume with the dataset it was"
            )
        self._fresh = False
        return rows, num_bytes

    def _go_to(self, source: str, passed: _Passed, epoch: int, block: int) -> None:
        """Stand at a block, or at one before it."""
        ahead = self._samples is not None and self._epoch == epoch and self._at <= block
        known = passed.nearest(block) if self._has_states else None
        if known is not None and not (ahead and known[0] <= self._at):
            self._begin(source, epoch, *known)
        elif not ahead:
            self._begin(source, epoch)

    def _begin(
        self, source: str, epoch: int, block: int = 0, states: Mapping[str, Any] | None = None
    ) -> None:
        """Start a pass, from a block on if there are states of it."""
        self._samples, self._ended = None, False
        self._epoch, self._at, self._from_state = epoch, block, states is not None
        try:
            if self.has_epochs:
                self._reading.dataset.set_epoch(epoch)
            if states is None:
                self._samples = self._reading.begin()
            else:
                self._samples = self._reading.restore({**states, "samples": 0, "at": "inside"})
        except Exception as error:
            if states is not None:
                raise _OtherRowsFromState from error
            raise _failed(source, "cannot be iterated", error) from error

    def _next(self, source: str, most: int) -> list[Any]:
        """The samples that come next; fewer than asked for at the end."""
        samples: list[Any] = []
        if self._ended:
            return samples
        assert self._samples is not None, "a pass has begun"
        try:
            for sample in itertools.islice(self._samples, most):
                samples.append(sample)  # noqa: PERF402 - if the next fails, their number tells which it is
        except Exception as error:
            row = self._at * BLOCK_ROWS + len(samples)
            raise _failed(source, f"cannot be read at row {row}", error) from error
        self._ended = len(samples) < most
        return samples

    def _check(self, source: str, passed: _Passed, block: int, rows: list[Row | BadRow]) -> int:
        """Compare a block with what it was, or note what it is; about its bytes."""
        digest, num_bytes = digest_of(rows)
        if block < len(passed.digests):
            if passed.digests[block] != digest:
                if self._from_state:
                    raise _OtherRowsFromState
                remedy = "" if self.has_epochs else ", or have set_epoch(epoch) and depend on nothing else"
                raise SourceError(
                    f"source '{source}': from row {block * BLOCK_ROWS} on the dataset gave other rows than before;"
                    f" it must give the same in every iteration{remedy}"
                )
            return num_bytes
        assert block == len(passed.digests), "a pass starts where one has been"
        if rows:
            passed.digests.append(digest)
        if self._ended:
            passed.num_blocks = len(passed.digests)
        elif self._has_states and (block + 1) % passed.every == 0:
            self._keep_states(passed, block + 1)
        return num_bytes

    def _keep(self, epoch: int, block: int, rows: _Rows) -> None:
        """Keep a block, and let go of those passed before it that are too much with it."""
        self._kept.pop((epoch, block), None)
        self._kept[epoch, block] = rows
        total = sum(num_bytes for _, num_bytes in self._kept.values())
        while total > self._kept_bytes:
            total -= self._kept.pop(next(iter(self._kept)))[1]

    def _keep_states(self, passed: _Passed, block: int) -> None:
        try:
            states = self._reading.states()
        except Exception:  # a method that is there and does nothing else
            states = {}
        self._has_states = any(state is not None for state in states.values())
        if self._has_states:
            passed.keep(block, states)


def _failed(source: str, what: str, error: Exception) -> SourceError:
    return SourceError(f"source '{source}': the dataset {what}: {kind_and_message(error)}")
