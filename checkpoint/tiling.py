"""Whether the boxes of many tensors tile each of them, all at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from checkpoint.boxes import check_tiling
from checkpoint.errors import TilingError

Ints = npt.NDArray[np.int64]


def padded_shapes(shapes: Sequence[Sequence[int]]) -> Ints:
    """Shapes as columns, with missing dimensions one element long; int64 ``[max_dims, num_tensors]``."""
    padded = np.ones((max(map(len, shapes), default=0), len(shapes)), dtype=np.int64)
    for index, shape in enumerate(shapes):
        padded[: len(shape), index] = shape
    return padded


def find_untiled(
    shapes: Sequence[Sequence[int]], first: Ints, offsets: Ints, lengths: Ints
) -> tuple[int, TilingError] | None:
    """Find a tensor that its boxes do not tile exactly, in O(n log n) for n boxes.

    Neighbours that touch, and so are one box together, are merged along each dimension in turn, from the last to the
    first. What covers an element once before does so after. Regular grids and ranges of row-major elements, which
    is what sharding makes, end as the tensor itself; only what does not is left to :func:`check_tiling`.

    Args:
        shapes: Global shapes.
        first: Boxes of tensor ``i`` are the columns ``first[i]`` to ``first[i + 1]``; int64 ``[num_tensors + 1]``.
        offsets: First index of each box, sorted by offset within a tensor; int64 ``[max_dims, n]``, 0 where a tensor
            has fewer dimensions.
        lengths: Extent of each box; int64 ``[max_dims, n]``, 1 where a tensor has fewer dimensions.

    Returns:
        The index of a tensor and what is wrong with its boxes; None if all are tiled.
    """
    extents = padded_shapes(shapes)
    tensor = np.repeat(np.arange(len(shapes)), np.diff(first))
    outside = _outside(extents, tensor, offsets, lengths)
    if outside.any():
        index = int(tensor[outside.argmax()])
        error = _error(shapes[index], offsets[:, tensor == index], lengths[:, tensor == index])
        assert error is not None, "a box out of bounds passed the check"
        return index, error
    for dim in reversed(range(len(extents))):
        tensor, offsets, lengths = _merged(dim, tensor, offsets, lengths)
    whole = (lengths == extents[:, tensor]).all(axis=0)  # inside the tensor, so it begins at 0
    num_boxes = np.bincount(tensor, minlength=len(shapes))
    tiled = (num_boxes == 1) & (np.bincount(tensor[whole], minlength=len(shapes)) == 1)
    tiled |= (num_boxes == 0) & (extents == 0).any(axis=0)
    starts = np.concatenate([[0], np.cumsum(num_boxes)])
    for index in np.flatnonzero(~tiled).tolist():
        part = slice(int(starts[index]), int(starts[index + 1]))
        error = _error(shapes[index], offsets[:, part], lengths[:, part])
        if error is not None:
            return index, error
    return None


def _outside(extents: Ints, tensor: Ints, offsets: Ints, lengths: Ints) -> npt.NDArray[np.bool_]:
    """Which boxes are empty or not inside their tensor."""
    bad = np.zeros(len(tensor), dtype=bool)
    for extent, offset, length in zip(extents, offsets, lengths, strict=True):
        limit = extent[tensor]
        # Compared by subtraction: offset + length of a hostile box may overflow.
        bad |= (offset < 0) | (offset >= limit) | (length <= 0)
        bad |= length > limit - np.clip(offset, 0, limit)
    return bad


def _merged(dim: int, tensor: Ints, offsets: Ints, lengths: Ints) -> tuple[Ints, Ints, Ints]:
    """Merge each run of boxes that follow each other along ``dim`` and are alike in all other dimensions."""
    ends = offsets[dim] + lengths[dim]
    joins = (tensor[1:] == tensor[:-1]) & (offsets[dim, 1:] == ends[:-1])
    for other in range(len(offsets)):
        if other != dim:
            joins &= offsets[other, 1:] == offsets[other, :-1]
            joins &= lengths[other, 1:] == lengths[other, :-1]
    if not joins.any():
        return tensor, offsets, lengths
    heads = np.flatnonzero(np.concatenate([[True], ~joins]))
    tails = np.append(heads[1:], len(tensor)) - 1
    offsets, lengths = offsets[:, heads], lengths[:, heads]
    lengths[dim] = ends[tails] - offsets[dim]
    return tensor[heads], offsets, lengths


def _error(shape: Sequence[int], offsets: Ints, lengths: Ints) -> TilingError | None:
    try:
        check_tiling(shape, offsets[: len(shape)].T, lengths[: len(shape)].T)
    except TilingError as error:
        return error
    return None
