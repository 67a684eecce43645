"""Lists of integers in MDS samples, found and laid end to end: compiled, or in numpy, which copies them one by one.

A sample is ``uint32`` sizes of those values whose size is not fixed, then the values of all columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from omniload.joining import join_parts_in_python
from omniload.kernels import KERNELS
from omniload.recycler import BLOCKS
from omniload.sources.mds_encodings import Flat

_MOST = 1 << 40
"""Sizes in an index may be any number; none that is larger fits a shard."""


def join_lists(
    data: np.ndarray, bounds: np.ndarray, fixed: Sequence[int | None], column: int, flat: Flat
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Copy the items of one column end to end.

    Args:
        data: ``uint8``: bytes of samples.
        bounds: ``int64[n + 1]`` of each sample in them, ascending.
        fixed: bytes of the values of each column; None if each has its own.
        column: which.
        flat: how its values are stored.

    Returns:
        ``int64[n + 1]`` bounds of each sample in the items of all, ``bool[n]`` samples that have no such list, which
        have no items then, and the items, of the type that is stored.
    """
    if KERNELS is None:
        return join_lists_in_python(data, bounds, fixed, column, flat)
    ends, bad = np.zeros(len(bounds), np.int64), np.empty(len(bounds) - 1, np.bool_)
    joined = BLOCKS.empty(int(bounds[-1] - bounds[0]), np.uint8)
    KERNELS.join_lists(
        data,
        bounds,
        np.array([min(size or 0, _MOST) for size in fixed]),
        column,
        flat.dtype.itemsize,
        flat.has_shape,
        -1 if flat.num_items is None else min(flat.num_items, _MOST),
        ends[1:],
        bad,
        joined,
    )
    items = joined[: ends[-1]]
    if len(items) < len(joined) * 3 // 4:  # of several columns: a part would hold all of the memory
        items = items.copy()
    return ends // flat.dtype.itemsize, bad, items.view(flat.dtype)


def join_lists_in_python(
    data: np.ndarray, bounds: np.ndarray, fixed: Sequence[int | None], column: int, flat: Flat
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """As `join_lists`."""
    of_columns, of_values, bad = find_values(data, bounds, fixed)
    starts, sizes = of_columns[column], np.where(bad, 0, of_values[column])
    if len(data):
        starts, sizes, good = _find_items(data, starts, sizes, flat)
        bad = bad | ~good
    starts, sizes = np.where(bad, 0, starts), np.where(bad, 0, sizes)
    ends = np.append(0, np.cumsum(sizes))
    joined = np.empty(ends[-1], np.uint8)
    join_parts_in_python([data], np.stack([np.zeros_like(starts), starts, starts + sizes]), joined)
    return ends // flat.dtype.itemsize, bad, joined.view(flat.dtype)


def find_values(
    data: np.ndarray, bounds: np.ndarray, fixed: Sequence[int | None]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where the values of samples are; see `join_lists`.

    Returns:
        ``int64[columns, n]`` first byte of each value, ``int64[columns, n]`` its bytes, ``bool[n]`` samples whose sizes
        do not add up: theirs mean nothing.
    """
    num_rows, num_stored = len(bounds) - 1, sum(not size for size in fixed)
    stored = np.zeros((num_rows, num_stored), dtype=np.int64)
    head_bytes = 4 * num_stored
    if len(data) >= head_bytes:
        at = np.minimum(bounds[:-1], len(data) - head_bytes)
        stored[:] = data[at[:, None] + np.arange(head_bytes)].view("<u4")
    of_stored = iter(stored.T)
    # [columns, n]
    sizes = np.stack([np.full(num_rows, min(size, _MOST)) if size else next(of_stored) for size in fixed])
    ends = bounds[:-1] + head_bytes + np.cumsum(sizes, axis=0)
    return ends - sizes, sizes, ends[-1] != bounds[1:]


def _find_items(
    data: np.ndarray, starts: np.ndarray, sizes: np.ndarray, flat: Flat
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where the items of values are.

    Args:
        data: ``uint8``; not empty.
        starts: ``int64[n]`` first byte of each value.
        sizes: ``int64[n]`` its bytes, which lie in ``data``.
        flat: how they are stored.

    Returns:
        ``int64[n]`` first byte of the items, ``int64[n]`` their bytes, ``bool[n]`` whether they are an array of one
        dimension.
    """
    item_bytes = flat.dtype.itemsize
    if not flat.has_shape:
        if flat.num_items is None:
            return starts, sizes, sizes % item_bytes == 0
        return starts, sizes, sizes == min(flat.num_items, _MOST) * item_bytes
    head = data[np.minimum(starts, len(data) - 1)]
    width = np.left_shift(1, head & 3, dtype=np.int64)  # of the number of items
    at = np.minimum(starts[:, None] + np.arange(1, 9), len(data) - 1)
    digits = np.where(np.arange(8) < width[:, None], data[at], 0).astype(np.uint8)
    num_items = digits.view("<u8")[:, 0]
    size = sizes - 1 - width
    good = (head >> 2 == 1) & (size >= 0) & (size % item_bytes == 0)
    good &= num_items == (np.maximum(size, 0) // item_bytes).astype(np.uint64)
    return starts + 1 + width, size, good
