"""Samples of an MDS shard: lists of token ids as columns, all else decoded when asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from omniload.joining import join_parts
from omniload.lazy import lazy
from omniload.recycler import BLOCKS
from omniload.sources.mds_encodings import Encoding, Flat
from omniload.sources.protocol import BadRow, Row

_BAD = (ValueError, LookupError, ArithmeticError, RecursionError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One column of a shard."""

    name: str
    size: int | None
    """Bytes of its values; None if they differ."""
    encoding: Encoding | None
    """None if it is not to be read."""


class MdsBlock:
    """Consecutive samples.

    A sample is ``uint32`` sizes of those values whose size is not fixed, then the values of all columns.

    Args:
        data: ``uint8``: their bytes.
        bounds: ``int64[rows + 1]`` of each sample in ``data``.
        columns: all columns of the shard.
        row_ids: ``int64[rows]`` identities of the samples.
    """

    def __init__(
        self, data: np.ndarray, bounds: np.ndarray, columns: Sequence[Column], row_ids: np.ndarray
    ) -> None:
        self._data = data
        self._columns = columns
        self.row_ids = row_ids
        self._starts, self._sizes, self._bad = _find_values(data, bounds, [one.size for one in columns])

    @property
    def num_rows(self) -> int:
        """Samples in the block."""
        return len(self.row_ids)

    @property
    def num_bytes(self) -> int:
        """Host memory held by the block."""
        held = (self._data, self._starts, self._sizes, self._bad, self.row_ids)
        return sum(int(array.nbytes) for array in held)

    @lazy
    def table(self) -> pa.Table | None:
        """The columns read, if all are lists of integers; a sample that is damaged is null. Copies them."""
        chosen = [(i, one.name, one.encoding.flat) for i, one in enumerate(self._columns) if one.encoding]
        lists = {name: self._lists(i, flat) for i, name, flat in chosen if flat is not None}
        return pa.table(lists) if len(lists) == len(chosen) else None

    def rows(self, indices: np.ndarray) -> list[Row | BadRow]:
        """The samples at ``indices``; one with a value that cannot be decoded is a `BadRow`."""
        starts, ends = self._starts[:, indices], self._starts[:, indices] + self._sizes[:, indices]
        bad = self._bad[indices].tolist()
        places = zip(starts.T.tolist(), ends.T.tolist(), bad, strict=True)
        return [
            BadRow(reason="the sizes of its values do not add up to its own") if is_bad else self._row(*place)
            for *place, is_bad in places
        ]

    def _row(self, starts: list[int], ends: list[int]) -> Row | BadRow:
        data, row = self._data.data, {}
        for column, start, end in zip(self._columns, starts, ends, strict=True):
            if column.encoding is not None:
                try:
                    row[column.name] = column.encoding.decode(data[start:end])
                except _BAD as error:
                    return BadRow(reason=f"'{column.name}': {' '.join(str(error).split())}")
        return row

    def _lists(self, column: int, flat: Flat) -> pa.LargeListArray:
        bad = self._bad
        starts, sizes = self._starts[column], np.where(bad, 0, self._sizes[column])
        if len(self._data):
            starts, sizes, good = flat.find(self._data, starts, sizes)
            bad = bad | ~good
        starts, sizes = np.where(bad, 0, starts), np.where(bad, 0, sizes)
        bounds = np.concatenate([[0], np.cumsum(sizes)])
        places = np.stack([np.zeros_like(starts), starts, starts + sizes])
        values = BLOCKS.empty(int(bounds[-1]), np.uint8)
        join_parts([self._data], places, values)
        return pa.LargeListArray.from_arrays(
            bounds // flat.dtype.itemsize, values.view(flat.dtype), mask=pa.array(bad) if bad.any() else None
        )


def _find_values(
    data: np.ndarray, bounds: np.ndarray, fixed: Sequence[int | None]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where the values of samples are.

    Args:
        data: ``uint8``.
        bounds: ``int64[n + 1]`` of the samples in it, ascending.
        fixed: bytes of the values of each column; None if each has its own.

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
    sizes = np.stack([np.full(num_rows, size) if size else next(of_stored) for size in fixed])  # [columns, n]
    ends = bounds[:-1] + head_bytes + np.cumsum(sizes, axis=0)
    return ends - sizes, sizes, ends[-1] != bounds[1:]
