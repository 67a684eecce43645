"""What wanted boxes and stored boxes have in common, and which stored pieces that takes; all of it by columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from checkpoint.boxes import Box
from checkpoint.format.box_table import BoxTable
from checkpoint.format.codec import RAW_PIECE_BYTES
from checkpoint.format.digest import PIECE_BYTES
from checkpoint.format.dtypes import DTYPES
from checkpoint.format.index import Tables

Ints = npt.NDArray[np.int64]

# Tensors of more boxes are searched by index; below, comparing with each box costs less than an index.
_COMPARE_ALL: Final = 64

_PAIRS_AT_ONCE: Final = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Wants:
    """Wanted boxes as columns, k of them.

    Attributes:
        tensor_id: Stored tensor; int64 ``[k]``.
        offsets: First index of each box, 0 where a tensor has fewer dimensions; int64 ``[k, max_dims]``.
        lengths: Extent of each box, 1 where a tensor has fewer dimensions; int64 ``[k, max_dims]``.
    """

    tensor_id: Ints
    offsets: Ints
    lengths: Ints

    @classmethod
    def of(cls, boxes: Sequence[tuple[int, Box]], max_dims: int) -> Wants:
        """Columns of (tensor id, box) pairs."""
        offsets = np.zeros((len(boxes), max_dims), dtype=np.int64)
        lengths = np.ones((len(boxes), max_dims), dtype=np.int64)
        for index, (_, box) in enumerate(boxes):
            num_dims = len(box.offsets)
            offsets[index, :num_dims] = box.offsets
            lengths[index, :num_dims] = box.lengths
        ids = np.fromiter((tensor_id for tensor_id, _ in boxes), dtype=np.int64, count=len(boxes))
        return cls(tensor_id=ids, offsets=offsets, lengths=lengths)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Overlaps:
    """Common parts of wanted and stored boxes, n of them, sorted by stored box, then by wanted box.

    Attributes:
        wanted: Index of the wanted box; int64 ``[n]``.
        row: Stored box; int64 ``[n]``.
        offsets: First index of the part in the global tensor; int64 ``[n, max_dims]``.
        lengths: Its extent; int64 ``[n, max_dims]``.
        itemsize: Bytes of an element; int64 ``[n]``.
        begin: First byte of the part in the row-major image of the stored box; int64 ``[n]``.
        end: One past its last byte there; int64 ``[n]``.
        gap: Longest stretch of bytes in between that is not of the part, 0 if the part is one run; int64 ``[n]``.
    """

    wanted: Ints
    row: Ints
    offsets: Ints
    lengths: Ints
    itemsize: Ints
    begin: Ints
    end: Ints
    gap: Ints


def max_dims(tables: Tables) -> int:
    """Columns that offsets and lengths need: as many as the tensor of most dimensions has, at least one."""
    return max((len(tensor.shape) for tensor in tables.tensors), default=1) or 1


def itemsizes(tables: Tables) -> Ints:
    """Bytes of an element of each tensor; int64 ``[num_tensors]``."""
    return np.asarray([DTYPES[tensor.dtype].itemsize for tensor in tables.tensors], dtype=np.int64)


def find_overlaps(tables: Tables, wants: Wants) -> Overlaps:
    """Intersect wanted boxes with the stored boxes of their tensors, in O((k + n) log n) for boxes that form a grid."""
    boxes = tables.boxes
    wanted, row = _candidates(boxes, wants)
    stored_offsets, stored_lengths = boxes.padded_corners(row, wants.offsets.shape[1])
    offsets = np.maximum(wants.offsets[wanted], stored_offsets)
    ends = np.minimum(wants.offsets[wanted] + wants.lengths[wanted], stored_offsets + stored_lengths)
    kept = np.flatnonzero((offsets < ends).all(axis=1))
    kept = kept[np.lexsort((wanted[kept], row[kept]))]
    wanted, row, offsets, ends = wanted[kept], row[kept], offsets[kept], ends[kept]
    itemsize = itemsizes(tables)[wants.tensor_id[wanted]]
    begin, span, gap = image(offsets, ends - offsets, stored_offsets[kept], stored_lengths[kept])
    return Overlaps(
        wanted=wanted,
        row=row,
        offsets=offsets,
        lengths=ends - offsets,
        itemsize=itemsize,
        begin=begin * itemsize,
        end=(begin + span) * itemsize,
        gap=gap * itemsize,
    )


def image(offsets: Ints, lengths: Ints, outer_offsets: Ints, outer_lengths: Ints) -> tuple[Ints, Ints, Ints]:
    """Where boxes lie in the row-major images of boxes that contain them; all arguments int64 ``[n, num_dims]``.

    Returns:
        First element, number of elements from it to the last one, and the longest gap between the runs of elements
        in between (0: the box is one run); int64 ``[n]`` each.
    """
    start = np.zeros(len(offsets), dtype=np.int64)
    span, stride, gap = np.ones_like(start), np.ones_like(start), np.zeros_like(start)
    for dim in reversed(range(offsets.shape[1])):
        start += (offsets[:, dim] - outer_offsets[:, dim]) * stride
        gap = np.where(lengths[:, dim] > 1, np.maximum(gap, stride - span), gap)
        span += (lengths[:, dim] - 1) * stride
        stride = stride * outer_lengths[:, dim]
    return start, span, gap


def needed_pieces(boxes: BoxTable, overlaps: Overlaps) -> tuple[Ints, Ints, Ints]:
    """Which pieces the overlaps take.

    Returns:
        Index of the overlap, first piece, and one past the last; int64 ``[m]`` each. An overlap with gaps of whole
        pieces has several such ranges.
    """
    size = np.where(boxes.compressed[overlaps.row], RAW_PIECE_BYTES, PIECE_BYTES)
    of_row = boxes.piece_first[overlaps.row]
    first, end = of_row + overlaps.begin // size, of_row + -(-overlaps.end // size)
    # A gap shorter than a piece holds no whole piece.
    scattered = np.flatnonzero(overlaps.gap >= size)
    if not len(scattered):
        return np.arange(len(first)), first, end
    dense = np.flatnonzero(overlaps.gap < size)
    ranges = [(dense, first[dense], end[dense])]
    for index in scattered.tolist():
        row = int(overlaps.row[index])
        begins, length = _runs(boxes, overlaps, index, int(size[index]))
        firsts = int(of_row[index]) + begins // size[index]
        ends = int(of_row[index]) + -(-(begins + length) // size[index])
        assert ends[-1] <= boxes.piece_first[row + 1]
        ranges.append((np.full(len(firsts), index), firsts, ends))
    which, firsts, ends = (np.concatenate(columns) for columns in zip(*ranges, strict=True))
    return which, firsts, ends


def _runs(boxes: BoxTable, overlaps: Overlaps, index: int, gap: int) -> tuple[Ints, int]:
    """Begins of the runs of bytes of one overlap in its stored box, ascending, and the length of each.

    Runs that are less than ``gap`` bytes apart count as one.
    """
    row = int(overlaps.row[index])
    _, outer = boxes.padded_corners(np.asarray([row]), overlaps.offsets.shape[1])
    length = stride = int(overlaps.itemsize[index])
    begins = overlaps.begin[index : index + 1]
    outermost = False
    steps_outside: list[Ints] = []
    for dim in reversed(range(overlaps.offsets.shape[1])):
        steps = int(overlaps.lengths[index, dim])
        if steps > 1:
            outermost = outermost or stride - length >= gap
            if outermost:
                steps_outside.append(np.arange(steps, dtype=np.int64) * stride)
            else:
                length += (steps - 1) * stride
        stride *= int(outer[0, dim])
    for steps_of_dim in reversed(steps_outside):
        begins = (begins[:, None] + steps_of_dim[None, :]).reshape(-1)
    return begins, length


def _candidates(boxes: BoxTable, wants: Wants) -> tuple[Ints, Ints]:
    """Pairs of wanted boxes and rows among which all overlaps are."""
    first = boxes.first[wants.tensor_id]
    num_rows = boxes.first[wants.tensor_id + 1] - first
    few = np.flatnonzero(num_rows <= _COMPARE_ALL)
    pairs = [(np.repeat(few, num_rows[few]), spread(first[few], num_rows[few]))]
    many = np.flatnonzero(num_rows > _COMPARE_ALL)
    by_tensor = many[np.argsort(wants.tensor_id[many], kind="stable")]
    cuts = np.flatnonzero(np.diff(wants.tensor_id[by_tensor])) + 1
    pairs += [_indexed(boxes, wants, wanted) for wanted in np.split(by_tensor, cuts) if len(wanted)]
    wanted, row = (np.concatenate(columns) for columns in zip(*pairs, strict=True))
    return wanted, row


def _indexed(boxes: BoxTable, wants: Wants, wanted: Ints) -> tuple[Ints, Ints]:
    """As :func:`_candidates`, for wanted boxes of one tensor, by an index of the dimension that is cut most often."""
    rows = boxes.rows_of(int(wants.tensor_id[wanted[0]]))
    offsets, lengths = boxes.padded_corners(np.arange(rows.start, rows.stop), wants.offsets.shape[1])
    dim = int(np.argmax([len(np.unique(offsets[:, dim])) for dim in range(offsets.shape[1])]))
    order = np.argsort(offsets[:, dim], kind="stable")
    begins = offsets[order, dim]
    # The furthest that this box or any before it reaches: ascending, so that it can be searched.
    reach = np.maximum.accumulate(begins + lengths[order, dim])
    low = wants.offsets[wanted, dim]
    first = np.searchsorted(reach, low, side="right")
    count = np.maximum(np.searchsorted(begins, low + wants.lengths[wanted, dim], side="left") - first, 0)
    ends = offsets + lengths
    pairs = []
    # A few wanted boxes at a time: where boxes are cut along other dimensions too, most pairs have nothing in common.
    for part in np.split(
        np.arange(len(wanted)), np.flatnonzero(np.diff(np.cumsum(count) // _PAIRS_AT_ONCE)) + 1
    ):
        ours, row = np.repeat(wanted[part], count[part]), order[spread(first[part], count[part])]
        low_corner = np.maximum(wants.offsets[ours], offsets[row])
        high_corner = np.minimum(wants.offsets[ours] + wants.lengths[ours], ends[row])
        common = (low_corner < high_corner).all(axis=1)
        pairs.append((ours[common], rows.start + row[common]))
    found, row = (np.concatenate(columns) for columns in zip(*pairs, strict=True))
    return found, row


def spread(first: Ints, count: Ints) -> Ints:
    """``first[i], first[i] + 1, ...``, ``count[i]`` numbers each, one after the other."""
    begins = np.cumsum(count) - count
    numbers: Ints = np.arange(int(count.sum()), dtype=np.int64) + np.repeat(first - begins, count)
    return numbers
