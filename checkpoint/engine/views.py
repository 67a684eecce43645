"""Where the elements of stored pieces go: the boxes that somebody wants filled."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch

from checkpoint.boxes import Box, flat_boxes, intersect, slices_within
from checkpoint.engine.memory import Bytes, flat_bytes, is_flat
from checkpoint.engine.overlap import (
    Ints,
    Wants,
    find_overlaps,
    image,
    itemsizes,
    max_dims,
    needed_pieces,
    spread,
)
from checkpoint.format.index import Tables

# Without verification, gaps up to this size are read over rather than read around.
_GAP_BYTES: Final = 64 << 10


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Wanted:
    """A box that this rank wants filled.

    Attributes:
        tensor_id: Stored tensor.
        box: Which part of it.
        view: Where it goes; of the box's lengths, on any device, any strides.
        stored: Element type to convert from; None: the view takes the stored bits as they are.
    """

    tensor_id: int
    box: Box
    view: torch.Tensor
    stored: torch.dtype | None = None

    @property
    def bits(self) -> torch.dtype:
        """Element type that the stored bytes are taken for."""
        return self.view.dtype if self.stored is None else self.stored


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Part:
    """A wanted part of a stored box.

    Attributes:
        box: Which part of the global tensor.
        wanted: Who wants it.
    """

    box: Box
    wanted: Wanted


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Cut:
    """A range of the elements of a stored box.

    Attributes:
        row: The stored box.
        box: The same, as a box of the global tensor.
        begin: First byte in the row-major image of the box.
        end: One past the last byte.
        parts: All parts of the stored box that are wanted.
    """

    row: int
    box: Box
    begin: int
    end: int
    parts: Sequence[Part]

    def narrowed(self, begin: int, end: int) -> Cut:
        """Another range of the same box."""
        return replace(self, begin=begin, end=end)


class Views:
    """All boxes that this rank wants filled, and what they have in common with the stored boxes.

    Args:
        tables: Of the checkpoint.
        wanted: Boxes with elements; their views must not overlap each other.
    """

    def __init__(self, tables: Tables, wanted: Sequence[Wanted]) -> None:
        self._tables = tables
        self._wanted = wanted
        self.wants = Wants.of([(one.tensor_id, one.box) for one in wanted], max_dims(tables))
        self._overlaps = find_overlaps(tables, self.wants)
        self._memory: dict[int, Bytes] = {}
        self._itemsizes = itemsizes(tables)

        # Overlaps that are a run of bytes both as stored and where they go, and where they begin there.
        mine = self._overlaps
        whole = self.wants.offsets[mine.wanted], self.wants.lengths[mine.wanted]
        begin, _, gap = image(mine.offsets, mine.lengths, *whole)
        flat = np.asarray([one.stored is None and is_flat(one.view) for one in wanted], dtype=np.bool_)
        self._is_run = flat[mine.wanted] & (gap == 0) & (mine.gap == 0)
        self._begin = begin * mine.itemsize

    def split(self, others: Ints) -> tuple[tuple[Ints, Ints, Ints], Ints]:
        """Which pieces are needed.

        Args:
            others: Pieces to leave out, ascending.

        Returns:
            Pieces whose bytes are wanted as they are, in one place: the piece, who wants it, and where it begins in
            the memory of that. And all others, ascending.
        """
        boxes, mine = self._tables.boxes, self._overlaps
        which, first, end = needed_pieces(boxes, mine)
        piece, which = spread(first, end - first), np.repeat(which, end - first)
        left = np.isin(piece, others, invert=True)
        piece, which = piece[left], which[left]
        distinct, at, uses = np.unique(piece, return_inverse=True, return_counts=True)
        row = mine.row[which]
        begin, stop = boxes.raw_ranges(row, piece)
        direct = self._is_run[which] & (uses[at] == 1) & ~boxes.compressed[row]
        direct &= (mine.begin[which] <= begin) & (stop <= mine.end[which])
        scattered = np.ones(len(distinct), dtype=np.bool_)
        scattered[at[direct]] = False
        which, begin = which[direct], begin[direct]
        place = self._begin[which] + begin - mine.begin[which]
        return (piece[direct], mine.wanted[which], place), distinct[scattered]

    def memory(self, wanted: int) -> Bytes:
        """The memory of a view that is flat."""
        found = self._memory.get(wanted)
        if found is None:
            found = self._memory[wanted] = flat_bytes(self._wanted[wanted].view)
        return found

    def destination(self, row: int, first: int, end: int) -> Bytes | None:
        """Memory that wants exactly the elements of a run of pieces, if there is one such place and no other."""
        boxes, mine = self._tables.boxes, self._overlaps
        low, high = (int(np.searchsorted(mine.row, row, side=side)) for side in ("left", "right"))
        if high - low != 1 or not self._is_run[low]:
            return None
        begin, stop = (
            boxes.raw_begin(row, first),
            boxes.raw_begin(row, first) + boxes.raw_bytes_of(row, first, end),
        )
        if begin < mine.begin[low] or stop > mine.end[low]:
            return None
        at = int(self._begin[low] - mine.begin[low]) + begin
        return self.memory(int(mine.wanted[low]))[at : at + stop - begin]

    def cut(self, row: int, first: int, end: int) -> Cut:
        """A run of pieces with the parts of its stored box that are wanted, in order of the wanted boxes."""
        boxes, mine = self._tables.boxes, self._overlaps
        low, high = (int(np.searchsorted(mine.row, row, side=side)) for side in ("left", "right"))
        num_dims = int(boxes.corner_first[row + 1] - boxes.corner_first[row])
        parts = [
            Part(box=Box(tuple(offsets[:num_dims]), tuple(lengths[:num_dims])), wanted=self._wanted[wanted])
            for wanted, offsets, lengths in zip(
                mine.wanted[low:high].tolist(),
                mine.offsets[low:high].tolist(),
                mine.lengths[low:high].tolist(),
                strict=True,
            )
        ]
        begin = boxes.raw_begin(row, first)
        return Cut(
            row=row,
            box=boxes.box(row),
            begin=begin,
            end=begin + boxes.raw_bytes_of(row, first, end),
            parts=parts,
        )

    def exact_ranges(self, cut: Cut) -> list[tuple[int, int]]:
        """Bytes of a cut that are wanted, ascending and apart; short gaps are read over."""
        itemsize = self.itemsize(cut.row)
        ranges: list[tuple[int, int]] = []
        for box in {part.box for part in cut.parts}:
            ranges += _runs(box, cut.box, itemsize)
        merged: list[tuple[int, int]] = []
        for begin, end in sorted(ranges):
            begin, end = max(begin, cut.begin), min(end, cut.end)
            if begin >= end:
                continue
            if merged and begin <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(merged[-1][1], end))
            else:
                merged.append((begin, end))
        return merged

    def fill(self, cut: Cut, raw: Bytes) -> None:
        """Copy what is wanted of a cut.

        Args:
            cut: The cut.
            raw: Its elements, as bytes.
        """
        pieces = boxes_of(cut, self.itemsize(cut.row))
        for part in cut.parts:
            for piece in pieces:
                common = intersect(piece, part.box)
                if common is not None:
                    view = part.wanted.view[slices_within(common, part.wanted.box)]
                    view.copy_(elements(cut, raw, common, part.wanted.bits))

    def num_bytes_wanted(self) -> int:
        """Stored bytes that are wanted at all: each counts once, of compressed pieces all."""
        boxes, mine = self._tables.boxes, self._overlaps
        if not len(mine.row):
            return 0
        parts = np.column_stack([mine.row, mine.offsets, mine.lengths])
        several = np.bincount(mine.row)[mine.row] > 1
        distinct = np.concatenate([parts[~several], np.unique(parts[several], axis=0)])
        lengths = distinct[:, 1 + mine.lengths.shape[1] :]
        itemsize = np.zeros(int(mine.row.max()) + 1, dtype=np.int64)
        itemsize[mine.row] = mine.itemsize
        by_row = np.zeros_like(itemsize)
        np.add.at(by_row, distinct[:, 0], lengths.prod(axis=1) * itemsize[distinct[:, 0]])
        compressed = boxes.compressed[: len(by_row)]
        plain = np.minimum(by_row, boxes.raw_bytes[: len(by_row)])[~compressed].sum()
        _, first, end = needed_pieces(boxes, mine)
        piece = np.unique(spread(first, end - first))
        row = np.searchsorted(boxes.piece_first, piece, side="right") - 1
        return int(plain + boxes.piece_bytes[piece[boxes.compressed[row]]].sum())

    def num_bytes(self, row: int, first: int, end: int) -> int:
        """Size of the elements of a run of pieces."""
        return self._tables.boxes.raw_bytes_of(row, first, end)

    def itemsize(self, row: int) -> int:
        """Bytes of a stored element of a box."""
        return int(self._itemsizes[self._tables.boxes.tensor_id(row)])


def boxes_of(cut: Cut, itemsize: int) -> list[Box]:
    """The elements of a cut as boxes of the global tensor, in order."""
    return flat_range_boxes(cut.box, cut.begin // itemsize, cut.end // itemsize)


def flat_range_boxes(box: Box, begin: int, end: int) -> list[Box]:
    """Cut a range of the row-major image of a box into boxes, at most ``2 * ndim - 1`` of them.

    Args:
        box: The box.
        begin: First element of the range.
        end: One past the last element, at most the box's number of elements.
    """
    return [
        Box(tuple(map(operator.add, box.offsets, piece.offsets)), piece.lengths)
        for piece in flat_boxes(box.lengths, begin, end)
    ]


def elements(cut: Cut, raw: Bytes, part: Box, dtype: torch.dtype) -> torch.Tensor:
    """A part of a cut as a tensor over its memory.

    Args:
        cut: The cut.
        raw: Its elements, as bytes.
        part: Which part of the global tensor; all of it lies in the cut.
        dtype: What to take the bytes for.
    """
    strides = [math.prod(cut.box.lengths[dim + 1 :]) for dim in range(len(cut.box.lengths))]
    offset = sum(
        (at - base) * stride for at, base, stride in zip(part.offsets, cut.box.offsets, strides, strict=True)
    )
    flat = torch.from_numpy(raw).view(dtype)
    return flat.as_strided(part.lengths, strides, offset - cut.begin // dtype.itemsize)


def _runs(part: Box, stored: Box, itemsize: int) -> Iterator[tuple[int, int]]:
    """Runs of bytes of ``part`` in the row-major image of ``stored``; those with short gaps between them as one."""
    start, length, stride = 0, itemsize, itemsize
    outer: list[Ints] = []
    for dim in reversed(range(len(stored.lengths))):
        start += (part.offsets[dim] - stored.offsets[dim]) * stride
        steps = part.lengths[dim]
        if steps > 1:
            if not outer and stride - length <= _GAP_BYTES:
                length += (steps - 1) * stride
            else:
                outer.append(np.arange(steps, dtype=np.int64) * stride)
        stride *= stored.lengths[dim]
    starts = np.full(1, start, dtype=np.int64)
    for steps_of_dim in reversed(outer):
        starts = (starts[:, None] + steps_of_dim[None, :]).reshape(-1)
    for begin in starts.tolist():
        yield begin, begin + length
