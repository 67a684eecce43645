"""Boxes: axis-aligned parts of a global tensor, the only description of a layout that is ever stored.

A box is a corner (``offsets``) and a size (``lengths``), one number per dimension, in elements. A 0-d tensor
has the single box ``Box((), ())``. A tensor without elements has no boxes, and an empty box is never stored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from checkpoint.errors import TilingError

_Ints: TypeAlias = npt.NDArray[np.int64]

# Bounds on uncancelled corners. An irregular layout has up to 2^ndim of them per box: six dimensions always fit.
_MAX_CORNERS_PER_BOX = 64
_MIN_CORNER_LIMIT = 1 << 20


@dataclass(frozen=True, slots=True)
class Box:
    """An axis-aligned part of a global tensor.

    Attributes:
        offsets: First index in each dimension, elements.
        lengths: Extent in each dimension, elements.
    """

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """The box that covers a tensor of ``shape``."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def num_elements(self) -> int:
        """Elements in the box; 1 for the box of a 0-d tensor."""
        return math.prod(self.lengths)

    @property
    def ends(self) -> tuple[int, ...]:
        """One past the last index in each dimension."""
        return tuple(offset + length for offset, length in zip(self.offsets, self.lengths, strict=True))


def intersect(a: Box, b: Box) -> Box | None:
    """The common part of two boxes of one tensor, or None when they share no element."""
    offsets = tuple(map(max, a.offsets, b.offsets))
    lengths = tuple(min(ends) - offset for *ends, offset in zip(a.ends, b.ends, offsets, strict=True))
    return Box(offsets, lengths) if all(length > 0 for length in lengths) else None


def slices_within(inner: Box, outer: Box) -> tuple[slice, ...]:
    """Index of ``inner`` in an array that holds exactly ``outer``.

    ``inner`` must lie inside ``outer``.
    """
    return tuple(
        slice(start - base, stop - base)
        for start, stop, base in zip(inner.offsets, inner.ends, outer.offsets, strict=True)
    )


def runs_within(inner: Box, outer: Box) -> tuple[_Ints, int]:
    """Where ``inner`` lies in the row-major image of ``outer``.

    ``inner`` must lie inside ``outer`` and have at least one element.

    Returns:
        The first element of each contiguous run, ascending, shape ``[num_runs]``, and the length that all
        runs share; both in elements. Adjacent rows are one run, so an ``inner`` that differs from ``outer``
        in its first dimension only is a single run.
    """
    ndim = len(outer.lengths)
    strides = [math.prod(outer.lengths[dim + 1 :]) for dim in range(ndim)]
    # The dimensions after `split` are whole, so the run spans them and the extent of `split` itself.
    split = max((dim for dim in range(ndim) if inner.lengths[dim] != outer.lengths[dim]), default=0)
    starts = np.zeros(1, dtype=np.int64)
    for dim in range(ndim):
        first = (inner.offsets[dim] - outer.offsets[dim]) * strides[dim]
        steps = np.arange(inner.lengths[dim] if dim < split else 1, dtype=np.int64) * strides[dim]
        starts = (starts[:, None] + (first + steps)[None, :]).reshape(-1)
    return starts, math.prod(inner.lengths[split:])


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Cut a range of the row-major elements of a tensor into the fewest boxes that keep the order.

    From ``start`` upwards, each box fills up the innermost block that is begun, until the next block up is too
    large; from there downwards, each box takes the whole blocks of its dimension that are left. That is one box
    for each dimension but the first on the way up, and one for each dimension on the way down.

    Args:
        shape: Shape of the tensor.
        start: First element of the range.
        stop: One past the last element, at most the number of elements of the tensor.

    Returns:
        At most ``2 * ndim - 1`` boxes (one for a 0-d tensor), none if the range is empty. The row-major elements
        of one after the other are those of the range, in order.
    """
    assert 0 <= start <= stop <= math.prod(shape), (shape, start, stop)
    if start == stop:
        return []
    if not shape:
        return [Box((), ())]
    blocks = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]  # elements under one index
    boxes = []
    dim = len(shape) - 1
    while dim > 0 and (full := -(-start // blocks[dim - 1]) * blocks[dim - 1]) <= stop:
        if start < full:
            boxes.append(_rows(shape, blocks, dim, start, full))
        start = full
        dim -= 1
    for inner in range(dim, len(shape)):
        full = stop // blocks[inner] * blocks[inner]
        if start < full:
            boxes.append(_rows(shape, blocks, inner, start, full))
            start = full
    return boxes


def _rows(shape: Sequence[int], blocks: Sequence[int], dim: int, start: int, stop: int) -> Box:
    """The box of whole blocks of ``dim`` that begins at element ``start`` and ends before ``stop``."""
    offsets = tuple(start // block % extent for block, extent in zip(blocks, shape, strict=True))
    return Box(offsets, (*(1,) * dim, (stop - start) // blocks[dim], *shape[dim + 1 :]))


def check_tiling(shape: Sequence[int], offsets: npt.NDArray[Any], lengths: npt.NDArray[Any]) -> None:
    """Check that boxes cover each element of a tensor exactly once, in O(n log n) for n boxes.

    The number of boxes over an element is the running sum, along every dimension, of the boxes' signed
    corners (an inclusion-exclusion of each box: + at its lower corner, alternating towards the upper one). So
    the boxes tile the tensor exactly when their signed corners are, as a multiset, those of the tensor
    itself. Corners are expanded one dimension at a time and cancelled in between, which keeps a regular grid
    near its number of boxes rather than 2^ndim times that.

    Args:
        shape: Global shape of the tensor.
        offsets: First index of each box, integers, shape ``[num_boxes, ndim]``.
        lengths: Extent of each box, integers, shape ``[num_boxes, ndim]``.

    Raises:
        TilingError: Naming the first box out of bounds or empty, else the first element in row-major order
            that no box, or more than one, covers.
    """
    ndim = len(shape)
    if offsets.shape != lengths.shape or offsets.ndim != 2 or offsets.shape[1] != ndim:
        raise TilingError(
            f"boxes of a {ndim}-d tensor need offsets and lengths of shape [n, {ndim}], "
            f"got {list(offsets.shape)} and {list(lengths.shape)}"
        )
    if len(offsets) == 1 and lengths[0].tolist() == list(shape) and not offsets.any() and 0 not in shape:
        return  # one box that is the tensor: the usual case, and thousands of them in one checkpoint
    extent = np.asarray(shape, dtype=np.int64)
    low, high = _checked_bounds(extent, offsets.astype(np.int64), lengths.astype(np.int64))
    if (extent == 0).any():
        return  # a box inside would have failed the bounds: there is none
    # A dimension that every box spans adds nothing but a doubling of the corners.
    split = [dim for dim in range(ndim) if (high - low)[:, dim].min(initial=extent[dim]) != extent[dim]]
    # The tensor itself, counted -1: everything must cancel.
    low = np.concatenate([low[:, split], np.zeros((1, len(split)), dtype=np.int64)])
    high = np.concatenate([high[:, split], extent[None, split]])
    weights = np.ones(len(low), dtype=np.int64)
    weights[-1] = -1
    corners, weights = _uncancelled_corners(low, high, weights)
    if len(weights):
        # No other corner is componentwise below the row-major first one: its weight is the error there.
        where = [0] * ndim
        for dim, index in zip(split, corners[0].tolist(), strict=True):
            where[dim] = index
        covered = 1 + int(weights[0])
        kind = "gap" if covered == 0 else "overlap"
        raise TilingError(
            f"{kind}: element {where} of shape {list(shape)} lies in {covered} boxes, not in one"
        )


def _checked_bounds(extent: _Ints, offsets: _Ints, lengths: _Ints) -> tuple[_Ints, _Ints]:
    """Lower and upper corners of boxes that are not empty and lie inside the tensor."""
    # Compared by subtraction: offset + length of a hostile box may overflow.
    inside = (offsets >= 0) & (offsets <= extent)
    bad = ~(inside & (lengths > 0) & (lengths <= extent - np.where(inside, offsets, 0))).all(axis=1)
    if bad.any():
        box = int(bad.argmax())
        empty = (lengths[box] <= 0).any()
        raise TilingError(
            f"box {box} at {offsets[box].tolist()} with lengths {lengths[box].tolist()} "
            f"{'is empty' if empty else 'is out of bounds'} in shape {extent.tolist()}"
        )
    return offsets, offsets + lengths


def _uncancelled_corners(low: _Ints, high: _Ints, weights: _Ints) -> tuple[_Ints, _Ints]:
    """Sum the signed corners of weighted boxes; those with a sum other than 0, in row-major order.

    Returns:
        Corners, shape ``[m, ndim]``, and their weights, shape ``[m]``.
    """
    # `rest` numbers the distinct tails of the boxes (their extent in the dimensions still to be expanded);
    # `tails[dim]` gives, for each such number, the extent in `dim` and the number of the tail after it.
    rest = np.zeros(len(low), dtype=np.int64)
    tails = []
    for dim in reversed(range(low.shape[1])):
        first, inverse = _distinct(_rank(low[:, dim]), _rank(high[:, dim]), rest)
        tails.append((low[first, dim], high[first, dim], rest[first]))
        rest = inverse

    limit = max(_MIN_CORNER_LIMIT, _MAX_CORNERS_PER_BOX * len(low))
    points = np.zeros((1, 0), dtype=np.int64)  # distinct corners in the expanded dimensions, row-major
    point, rest, weights = _summed(np.zeros(len(low), dtype=np.int64), rest, weights)
    for tail_low, tail_high, tail_rest in reversed(tails):
        if 2 * len(weights) > limit:
            raise TilingError(
                f"layout too irregular to check: {len(low)} boxes have over {limit} distinct corners"
            )
        value = np.concatenate([tail_low[rest], tail_high[rest]])
        point = np.tile(point, 2)
        first, inverse = _distinct(point, _rank(value))
        points = np.column_stack([points[point[first]], value[first]])
        point, rest, weights = _summed(
            inverse, np.tile(tail_rest[rest], 2), np.concatenate([weights, -weights])
        )
    return points[point], weights


def _rank(values: _Ints) -> _Ints:
    """Number the distinct values in ascending order; the number of each entry."""
    return np.unique(values, return_inverse=True)[1].astype(np.int64).reshape(-1)


def _distinct(*columns: _Ints) -> tuple[_Ints, _Ints]:
    """Number the distinct rows of non-negative columns in lexicographic order.

    Returns:
        The index of a row for each number, and the number of each row.
    """
    code = columns[0]
    for column in columns[1:]:
        # Both factors are at most the number of rows, so the product is far from overflowing.
        code = _rank(code) * (int(column.max()) + 1) + column
    _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
    return first.astype(np.int64), inverse.astype(np.int64).reshape(-1)


def _summed(point: _Ints, rest: _Ints, weights: _Ints) -> tuple[_Ints, _Ints, _Ints]:
    """Add up the weights of equal (point, rest), drop sums of 0, and sort by (point, rest)."""
    first, inverse = _distinct(point, rest)
    totals = np.zeros(len(first), dtype=np.int64)
    np.add.at(totals, inverse, weights)
    kept = totals != 0
    return point[first][kept], rest[first][kept], totals[kept]
