"""A shuffle window in memory: its blocks, the order of its rows, and the samples of the positions read last."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from omniload.pieces import Cursor, Failure
from omniload.samples.cut import Labels, Overflow
from omniload.samples.reader import SampleReader
from omniload.samples.run import Found, Rows, Run, make_run
from omniload.sources.order import Order
from omniload.sources.protocol import FileEntry, Source
from omniload.sources.split import Split, in_split

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """What of a source's rows becomes pieces, and how."""

    source: str
    """Name of the source in the mixture."""
    seed: int
    """Seed of the mixture."""
    split: Split
    """Which rows to read; the others count as rows that give nothing."""
    held_out: float
    """Fraction of the rows that are held out of training."""
    seq_len: int
    """Tokens of the longest piece."""
    overflow: Overflow
    """What becomes of longer samples."""
    labels: Labels
    """Convention of the labels."""


class LoadedWindow:
    """The window that starts where a cursor's does.

    Args:
        cursor: any in the window.
        source: the rows.
        order: their order.
        reader: finds samples in blocks.
        policy: what becomes of the rows.
        origins: files and ids of rows of a block, by (file, block) and ``int64[n]`` rows.
        failures: where quarantined rows are noted.
    """

    def __init__(
        self,
        cursor: Cursor,
        source: Source,
        order: Order,
        reader: SampleReader[Any],
        policy: Policy,
        origins: Callable[[int, int, np.ndarray], tuple[list[FileEntry], np.ndarray]],
        failures: deque[Failure],
    ) -> None:
        self._start = (cursor.epoch, cursor.file, cursor.block)
        self._number = cursor.window
        self._source = source
        self._reader = reader
        self._policy = policy
        self._origins = origins
        self._failures = failures
        window = order.window(*self._start, len(source.files), source.num_blocks)
        self.next_start = window.next_start
        """Where the next window starts, as positions (file, block) in the permuted orders; None: the epoch ends."""
        self._addresses = window.blocks
        self._blocks = [reader.load(file, block) for file, block in window.blocks]
        sizes = np.array([block.num_rows for block in self._blocks], dtype=np.int64)
        self._ends = np.cumsum(sizes)
        self._starts = self._ends - sizes
        if window.open_ended and not sizes[-1]:
            self.next_start = None
        self.num_rows = int(sizes.sum())
        """Raw rows, those outside the split included."""
        self._permutation = order.rows(*self._start, self.num_rows)
        self._run_rows = reader.run_rows(self.num_rows, self.num_bytes)
        self._run: Run | None = None

    @property
    def num_bytes(self) -> int:
        """Host memory held by the blocks."""
        return sum(block.num_bytes for block in self._blocks)

    def starts_at(self, cursor: Cursor) -> bool:
        """Whether a cursor lies in this window."""
        return self._start == (cursor.epoch, cursor.file, cursor.block)

    def block(self, file: int, block: int) -> Any | None:
        """The block of that address, if it is of this window."""
        address = (file, block)
        return self._blocks[self._addresses.index(address)] if address in self._addresses else None

    def run_at(self, position: int) -> Run:
        """The samples of a run of positions from this one on, or that includes it and was read last.

        Their payload is in the reader's buffer when it is read first.
        """
        if self._run is None or not self._run.begin <= position < self._run.end:
            self._run = None  # before the next one takes its place in memory
            self._run = self._make_run(position, min(position + self._run_rows, self.num_rows))
        return self._run

    def _make_run(self, begin: int, end: int) -> Run:
        epoch, policy = self._start[0], self._policy
        rows = self._of_split(self._rows(begin, end))
        found = self._reader.find(epoch, self._addresses, self._blocks, rows)
        run = make_run(
            begin,
            end,
            rows,
            found,
            epoch=epoch,
            blocks=self._addresses,
            seq_len=policy.seq_len,
            overflow=policy.overflow,
            labels=policy.labels,
            failed=self._failed(rows, found),
        )
        self._note(run.failed)
        self._reader.hold(epoch, self._addresses, self._blocks, rows, found, np.diff(run.first_piece))
        return run

    def _rows(self, begin: int, end: int) -> Rows:
        position = np.arange(begin, end, dtype=np.int64)
        stored = position if self._permutation is None else self._permutation[begin:end]
        slot = np.searchsorted(self._ends, stored, side="right")
        return Rows(position=position, slot=slot, row=stored - self._starts[slot])

    def _of_split(self, rows: Rows) -> Rows:
        if self._policy.split == "train" and not self._policy.held_out:
            return rows  # and no digest is asked for, which may have to be read
        keep = np.ones(len(rows.row), dtype=bool)
        for slot, ((file, _), block) in enumerate(zip(self._addresses, self._blocks, strict=True)):
            here = rows.slot == slot
            chosen = in_split(
                self._policy.split,
                self._policy.held_out,
                seed=self._policy.seed,
                content=self._source.files[file].content,
                row_ids=block.row_ids[rows.row[here]],
            )
            if chosen is None:
                return rows
            keep[here] = chosen
        return rows.take(np.flatnonzero(keep))

    def _failed(self, rows: Rows, found: Found) -> tuple[Failure, ...]:
        bad = rows.take(found.bad)
        paths = [""] * len(bad.row)
        row_ids = np.zeros(len(bad.row), dtype=np.int64)
        for slot in np.unique(bad.slot).tolist():
            here = np.flatnonzero(bad.slot == slot)
            file, block = self._addresses[slot]
            entries, row_ids[here] = self._origins(file, block, bad.row[here])
            for i, entry in zip(here.tolist(), entries, strict=True):
                paths[i] = entry.url
        columns = zip(paths, row_ids.tolist(), bad.position.tolist(), found.reasons, strict=True)
        return tuple(
            Failure(
                source=self._policy.source,
                path=path,
                row_id=row_id,
                epoch=self._start[0],
                window=self._number,
                position=position,
                reason=reason,
            )
            for path, row_id, position, reason in columns
        )

    def _note(self, failed: tuple[Failure, ...]) -> None:
        for failure in failed:
            if not self._failures:
                logger.warning(
                    "source '%s': %s, row %d is left out: %s; DataLoader.failures() lists the rest",
                    failure.source,
                    failure.path,
                    failure.row_id,
                    failure.reason,
                )
            self._failures.append(failure)
