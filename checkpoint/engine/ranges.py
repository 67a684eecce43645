"""Which ranges of payload files to read, and where their bytes go: pieces that follow each other are read together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from checkpoint.engine.memory import Bytes
from checkpoint.engine.overlap import Ints
from checkpoint.engine.views import Cut, Views
from checkpoint.format.box_table import BoxTable

_MAX_BYTES: Final = 8 << 20
"""Pieces that follow each other are read together up to this size, or one alone if it is larger."""

# What goes through scratch memory is copied while the processor still has it in its cache.
_MAX_SCRATCH_BYTES: Final = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Range:
    """A range of a file to be read.

    Attributes:
        file_id: Which file.
        begin: First byte.
        end: One past the last byte.
        pieces: The whole pieces that it consists of, in order, int64; none if only parts of pieces are read.
        into: Where its bytes are wanted as they are, one part after the other, each of whole pieces; empty: read into
            scratch memory.
        cuts: From scratch memory: bytes from, to, and the elements that they are, of which parts are wanted.
    """

    file_id: int
    begin: int
    end: int
    pieces: Ints
    into: Sequence[Bytes] = ()
    cuts: Sequence[tuple[int, int, Cut]] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes to read."""
        return self.end - self.begin


def direct_ranges(boxes: BoxTable, views: Views, direct: tuple[Ints, Ints, Ints]) -> list[Range]:
    """Ranges of pieces that are wanted as they are.

    Args:
        boxes: The stored boxes.
        views: Who wants them.
        direct: Pieces, by whom each is wanted, and where it begins in the memory of that; int64 ``[n]`` each.
    """
    piece, wanted, begin = direct
    file_id = boxes.file_id[np.searchsorted(boxes.piece_first, piece, side="right") - 1]
    order = np.lexsort((boxes.piece_offset[piece], file_id))
    piece, wanted, begin, file_id = piece[order], wanted[order], begin[order], file_id[order]
    at, num_bytes = boxes.piece_offset[piece], boxes.piece_bytes[piece]
    is_first = _cut(_breaks(file_id) | _breaks(at, num_bytes), num_bytes, _MAX_BYTES)
    firsts, ends = _stretches(is_first)
    # Parts of ranges that lie without a gap in memory too.
    heads, _ = _stretches(is_first | _breaks(wanted) | _breaks(begin, num_bytes))
    part_bytes = np.add.reduceat(num_bytes, heads) if len(heads) else heads
    into = [
        views.memory(one)[start : start + length]
        for one, start, length in zip(
            wanted[heads].tolist(), begin[heads].tolist(), part_bytes.tolist(), strict=True
        )
    ]
    first_part = np.searchsorted(heads, np.append(firsts, len(piece))).tolist()
    return [
        Range(
            file_id=int(file_id[first]),
            begin=int(at[first]),
            end=int(at[end - 1] + num_bytes[end - 1]),
            pieces=piece[first:end],
            into=into[first_part[index] : first_part[index + 1]],
        )
        for index, (first, end) in enumerate(zip(firsts.tolist(), ends.tolist(), strict=True))
    ]


def scattered_ranges(boxes: BoxTable, views: Views, piece: Ints, *, verify: bool) -> Iterator[Range]:
    """Ranges of pieces of which several parts are wanted, or parts that lie otherwise in memory.

    Args:
        boxes: The stored boxes.
        views: Who wants them.
        piece: The pieces.
        verify: Read whole pieces. Otherwise, of pieces that are not compressed, what is wanted.
    """
    row = np.searchsorted(boxes.piece_first, piece, side="right") - 1
    order = np.lexsort((boxes.piece_offset[piece], boxes.file_id[row]))
    piece, row = piece[order], row[order]
    file_id, at, num_bytes = boxes.file_id[row], boxes.piece_offset[piece], boxes.piece_bytes[piece]
    is_first = _cut(_breaks(row) | (np.diff(piece, prepend=-2) != 1), num_bytes, _MAX_SCRATCH_BYTES)
    firsts, ends = _stretches(is_first)
    cuts: list[tuple[int, int, Cut]] = []
    joined: list[Ints] = []
    begin = end = 0
    where = -1

    def close() -> Iterator[Range]:
        nonlocal cuts, joined
        if cuts:
            pieces = np.concatenate(joined) if verify else np.zeros(0, dtype=np.int64)
            yield Range(file_id=where, begin=begin, end=end, pieces=pieces, cuts=cuts)
        cuts, joined = [], []

    for first, last in zip(firsts.tolist(), ends.tolist(), strict=True):
        base = int(at[first])
        for cut, low, high in _cuts(boxes, views, int(row[first]), piece[first:last], verify=verify):
            if (where, end) != (int(file_id[first]), base + low) or base + high - begin > _MAX_SCRATCH_BYTES:
                yield from close()
                where, begin = int(file_id[first]), base + low
            cuts.append((base + low - begin, base + high - begin, cut))
            joined.append(piece[first:last])
            end = base + high
    yield from close()


def _cuts(
    boxes: BoxTable, views: Views, row: int, pieces: Ints, *, verify: bool
) -> Iterator[tuple[Cut, int, int]]:
    """What to read of a run of pieces: elements, and the stored bytes from the first piece's on."""
    cut = views.cut(row, int(pieces[0]), int(pieces[-1]) + 1)
    if verify or boxes.compressed[row]:
        yield cut, 0, int(boxes.piece_bytes[pieces].sum())
        return
    for begin, end in views.exact_ranges(cut):
        yield cut.narrowed(begin, end), begin - cut.begin, end - cut.begin


def batches(ranges: Iterable[Range], max_bytes: int) -> Iterator[list[Range]]:
    """Put ranges that follow each other together, up to ``max_bytes`` or one alone if it is larger."""
    batch: list[Range] = []
    num_bytes = 0
    for one in ranges:
        if batch and num_bytes + one.num_bytes > max_bytes:
            yield batch
            batch, num_bytes = [], 0
        batch.append(one)
        num_bytes += one.num_bytes
    if batch:
        yield batch


def _breaks(values: Ints, steps: Ints | None = None) -> npt.NDArray[np.bool_]:
    """Whether each value is not the one before it plus its step (no step: is another one); so is the first."""
    breaks = np.ones(len(values), dtype=np.bool_)
    breaks[1:] = values[1:] != (values[:-1] if steps is None else values[:-1] + steps[:-1])
    return breaks


def _stretches(breaks: npt.NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """Where each stretch without a break begins, and one past where it ends."""
    heads = np.flatnonzero(breaks)
    return heads, np.append(heads, len(breaks))[1:]


def _cut(breaks: npt.NDArray[np.bool_], num_bytes: Ints, max_bytes: int) -> npt.NDArray[np.bool_]:
    """Break stretches of sizes further, into parts of about ``max_bytes``."""
    heads, ends = _stretches(breaks)
    before = np.cumsum(num_bytes) - num_bytes
    return breaks | _breaks((before - np.repeat(before[heads], ends - heads)) // max_bytes)
