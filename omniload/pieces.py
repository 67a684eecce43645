"""The tables that travel between the roles: cursors, pieces and chunks of samples.

A *raw row* is a row of a file. A transform turns it into zero or more *samples*. The overflow policy cuts a
sample into *pieces* of at most ``seq_len`` tokens. The planner sees pieces only: rows of one table.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Self, TypeAlias

import numpy as np

PIECE = np.dtype(
    [
        ("source", "<u2"),  # index into the mixture's sources, sorted by name
        ("epoch", "<u4"),  # pass over the source, from 0
        ("file", "<u4"),  # index into the source's sorted listing
        ("block", "<u4"),  # block of the file (row group, byte range), in file order
        ("row", "<u4"),  # row of the block
        ("sub", "<u2"),  # which sample of the row
        ("start", "<u4"),  # first token of the piece in the sample
        ("length", "<u4"),  # tokens
        ("targets", "<u4"),  # tokens of the piece's target that count in the loss
        ("born", "<u4"),  # step that drew the piece
        ("patches", "<u4"),  # rows that it gives the image encoder
        ("frames", "<u4"),  # rows that it gives the audio encoder
    ]
)
"""One piece: where it comes from and what the planner needs to know. Packed, little-endian, 44 bytes."""

Encoder: TypeAlias = Literal["image", "audio"]
"""What stands before the backbone of a model of several modalities."""
UNITS: dict[Encoder, str] = {"image": "patches", "audio": "frames"}
"""The field of `PIECE` that says how long a piece is for an encoder."""

# numpy copies such tables field by field where they are indexed, copied or joined as they are, which takes twenty times
# as long as `numpy.ndarray.take` and `join_pieces`.
_BYTES = np.dtype((np.void, PIECE.itemsize))


def join_pieces(parts: Sequence[np.ndarray]) -> np.ndarray:
    """``PIECE[n]`` tables one after the other."""
    if not parts:
        return np.empty(0, PIECE)
    return np.concatenate([part.view(_BYTES) for part in parts]).view(PIECE)


def by_source(pieces: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """The sources that ``PIECE[n]`` come from, ascending, each with ``int64[k]`` which of the pieces are its."""
    order = np.argsort(pieces["source"], kind="stable")
    ordered = pieces["source"][order]
    bounds = [0, *(np.flatnonzero(ordered[1:] != ordered[:-1]) + 1).tolist(), len(order)]
    for begin, end in itertools.pairwise(bounds):
        if end > begin:
            yield int(ordered[begin]), order[begin:end]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cursor:
    """The place of the next unread sample in a source's order; everything before it is consumed.

    Counts raw rows, never emitted samples, so that a filter cannot move it.
    """

    epoch: int = 0
    """Pass over the source, from 0."""
    window: int = 0
    """Index of the shuffle window in the epoch."""
    file: int = 0
    """Position in the epoch's permuted file order at which the window starts."""
    block: int = 0
    """Position in that file's permuted block order at which the window starts."""
    position: int = 0
    """Permuted row in the window."""
    sub: int = 0
    """Samples of that row already consumed."""

    def to_list(self) -> list[int]:
        """The fields in order, as JSON-serialisable integers."""
        return [self.epoch, self.window, self.file, self.block, self.position, self.sub]

    @classmethod
    def from_list(cls, values: list[int]) -> Self:
        """Inverse of `to_list`."""
        epoch, window, file, block, position, sub = values
        return cls(epoch=epoch, window=window, file=file, block=block, position=position, sub=sub)


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A row that was quarantined."""

    source: str
    """Name of the source."""
    path: str
    """Path or URL of the file."""
    row_id: int
    """Row number, or byte offset of the line."""
    epoch: int
    """Pass over the source, from 0."""
    window: int
    """Index of the shuffle window in the epoch."""
    position: int
    """Permuted row in the window."""
    reason: str
    """What is wrong with it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleChunk:
    """Metadata of consecutive samples of one source, in its order, from one window.

    The chunk boundaries carry no meaning: any cut of the same order gives the same plans.
    """

    begin: Cursor
    """Where the chunk starts."""
    end: Cursor
    """Where the next chunk starts: later in the window, at the next window, or at the next epoch."""
    ends_epoch: bool
    """Whether the epoch has no sample after this chunk."""
    pieces: np.ndarray
    """``PIECE[p]``; the pieces of a sample are adjacent, by ``start``; ``source`` and ``born`` are 0."""
    first_piece: np.ndarray
    """``int64[n + 1]``: sample i owns ``pieces[first_piece[i]:first_piece[i + 1]]``, none if dropped."""
    position: np.ndarray
    """``int64[n]``: permuted row of each sample in the window."""
    sub: np.ndarray
    """``int64[n]``: which sample of its row each sample is."""
    rows: np.ndarray
    """``int64[n + 1]``: raw rows consumed with sample i and not with the one before; the last entry counts
    the rows after the last sample. A chunk that begins inside a row (``begin.sub > 0``) does not count it again."""
    failures: np.ndarray
    """``int64[n + 1]``: as ``rows``, the quarantined ones among them."""
    failed: tuple[Failure, ...] = ()
    """``[sum(failures)]``: those, in order."""
    tokens: np.ndarray
    """``int64[n]``: tokens of the sample before the overflow policy: emitted + truncated + dropped."""
    truncated: np.ndarray
    """``int64[n]``: tokens cut off by ``overflow: truncate``."""
    dropped: np.ndarray
    """``int64[n]``: tokens of samples dropped by ``overflow: drop``."""
