"""Metadata of the samples of consecutive positions of a window, cut to pieces once and handed out in parts."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from omniload.pieces import PIECE, UNITS, Cursor, Encoder, Failure, SampleChunk
from omniload.samples.cut import Labels, Overflow, cut
from omniload.samples.prepare import PreparedSample


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Rows of a window's consecutive positions, as addresses in the source; arrays of one length."""

    position: np.ndarray
    """``int64``: permuted row in the window."""
    slot: np.ndarray
    """``int64``: which block of the window."""
    row: np.ndarray
    """``int64``: row of that block."""

    def take(self, indices: np.ndarray) -> Rows:
        """Some of the rows."""
        return Rows(position=self.position[indices], slot=self.slot[indices], row=self.row[indices])


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """The samples that a reader found in `Rows`."""

    source_row: np.ndarray
    """``int64[n]``: index of each sample's row in the `Rows`; ascending."""
    sub: np.ndarray
    """``int64[n]``: which sample of the row."""
    tokens: np.ndarray
    """``int64[n]``: tokens, at least 1."""
    trained: np.ndarray | None
    """``bool[sum(tokens)]``: tokens that count in the loss; None if all do."""
    bad: np.ndarray
    """``int64[k]``: rows that were quarantined, as indices in the `Rows`; ascending."""
    reasons: list[str]
    """``[k]``: why."""
    payload: list[PreparedSample] | None
    """``[n]``: the samples, if they had to be made; None if they lie in the blocks."""
    units: Mapping[Encoder, np.ndarray] = field(default_factory=dict)
    """``int64[n]`` by encoder: rows of it that each sample brings; none of an encoder that is not there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """The samples of positions ``begin:end`` of a window."""

    begin: int
    """First position."""
    end: int
    """Position after the last."""
    position: np.ndarray
    """``int64[n]``: position of each sample's row."""
    sub: np.ndarray
    """``int64[n]``: which sample of the row."""
    tokens: np.ndarray
    """``int64[n]``: tokens before the overflow policy."""
    truncated: np.ndarray
    """``int64[n]``: tokens cut off."""
    dropped: np.ndarray
    """``int64[n]``: tokens dropped."""
    first_piece: np.ndarray
    """``int64[n + 1]``: bounds of each sample's pieces."""
    pieces: np.ndarray
    """``PIECE[p]``."""
    bad: np.ndarray
    """``int64[k]``: positions of the quarantined rows, ascending."""
    failed: tuple[Failure, ...]
    """``[k]``: those rows."""

    def first_sample(self, position: int, sub: int) -> int:
        """Index of the first sample at or after a place, the samples ``< sub`` of that row being consumed."""
        left, right = np.searchsorted(self.position, [position, position + 1])
        return int(left) + min(sub, int(right - left))


def make_run(
    begin: int,
    end: int,
    rows: Rows,
    found: Found,
    *,
    epoch: int,
    blocks: Sequence[tuple[int, int]],
    seq_len: int,
    overflow: Overflow,
    labels: Labels,
    failed: tuple[Failure, ...],
) -> Run:
    """Cut the samples found in positions ``begin:end`` to pieces.

    Args:
        begin: first position.
        end: position after the last.
        rows: the positions that belong to the split.
        found: their samples.
        epoch: pass over the source.
        blocks: (file, block) by slot.
        seq_len: longest piece.
        overflow: what becomes of longer samples.
        labels: convention of the labels.
        failed: the rows of ``found.bad``.
    """
    parts = cut(found.tokens, seq_len=seq_len, overflow=overflow, labels=labels, trained=found.trained)
    sample = np.repeat(np.arange(len(found.tokens)), np.diff(parts.first_piece))
    row = found.source_row[sample]
    pieces = np.zeros(len(sample), dtype=PIECE)
    address = np.array(blocks, dtype=np.int64).reshape(-1, 2)[rows.slot[row]]  # [p, (file, block)]
    pieces["epoch"] = epoch
    pieces["file"], pieces["block"] = address[:, 0], address[:, 1]
    pieces["row"] = rows.row[row]
    pieces["sub"] = found.sub[sample]
    pieces["start"], pieces["length"], pieces["targets"] = parts.start, parts.length, parts.targets
    for encoder, units in found.units.items():
        pieces[UNITS[encoder]] = units[sample]  # whole: a sample that has any is never cut
    return Run(
        begin=begin,
        end=end,
        position=rows.position[found.source_row],
        sub=found.sub,
        tokens=found.tokens,
        truncated=parts.truncated,
        dropped=parts.dropped,
        first_piece=parts.first_piece,
        pieces=pieces,
        bad=rows.position[found.bad],
        failed=failed,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPart:
    """Samples ``first:last`` of a run."""

    run: Run
    """The run."""
    first: int
    """Index of the first sample."""
    last: int
    """Index after the last."""


def make_chunk(
    parts: Sequence[RunPart], begin: Cursor, end: Cursor, end_position: int, *, ends_epoch: bool
) -> SampleChunk:
    """Join parts of consecutive runs of a window to one chunk.

    Args:
        parts: in order.
        begin: where the first starts.
        end: where the next chunk starts.
        end_position: positions below it are consumed.
        ends_epoch: whether no sample of the epoch follows.
    """

    def joined(name: str) -> np.ndarray:
        arrays = [getattr(part.run, name)[part.first : part.last] for part in parts]
        return np.concatenate(arrays) if len(arrays) != 1 else arrays[0]

    position = joined("position") if parts else np.zeros(0, dtype=np.int64)
    pieces = [
        part.run.pieces[part.run.first_piece[part.first] : part.run.first_piece[part.last]] for part in parts
    ]
    pieces_of = [np.diff(part.run.first_piece[part.first : part.last + 1]) for part in parts]
    # Rows consumed with each sample: those after the previous sample's row, up to and with its own.
    consumed_before = begin.position + (1 if begin.sub else 0)
    up_to = np.concatenate([[consumed_before], position + 1, [max(end_position, consumed_before)]])
    up_to = np.maximum.accumulate(up_to)
    bad = np.concatenate([part.run.bad for part in parts]) if parts else np.zeros(0, dtype=np.int64)
    failed = tuple(itertools.chain.from_iterable(part.run.failed for part in parts))
    first_bad, last_bad = np.searchsorted(bad, [up_to[0], up_to[-1]])
    empty = np.zeros(0, dtype=np.int64)
    return SampleChunk(
        begin=begin,
        end=end,
        ends_epoch=ends_epoch,
        pieces=np.concatenate(pieces) if pieces else np.zeros(0, dtype=PIECE),
        first_piece=np.concatenate([[0], np.cumsum(np.concatenate([*pieces_of, empty]))]).astype(np.int64),
        position=position,
        sub=joined("sub") if parts else empty,
        rows=np.diff(up_to),
        failures=np.diff(np.searchsorted(bad, up_to)),
        failed=failed[first_bad:last_bad],
        tokens=joined("tokens") if parts else empty,
        truncated=joined("truncated") if parts else empty,
        dropped=joined("dropped") if parts else empty,
    )
