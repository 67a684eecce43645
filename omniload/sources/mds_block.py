"""Samples of an MDS shard: lists of token ids as columns, all else decoded when asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from omniload.lazy import lazy
from omniload.sources.mds_encodings import Encoding, Flat
from omniload.sources.mds_lists import find_values, join_lists
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
        self._bounds = bounds
        self._columns = columns
        self._fixed = [one.size for one in columns]
        self.row_ids = row_ids

    @property
    def num_rows(self) -> int:
        """Samples in the block."""
        return len(self.row_ids)

    @property
    def num_bytes(self) -> int:
        """Host memory held by the block."""
        places = 2 * len(self._columns) * self._bounds.nbytes  # held once a row is asked for
        return int(self._data.nbytes + self._bounds.nbytes + self.row_ids.nbytes + places)

    @lazy
    def table(self) -> pa.Table | None:
        """The columns read, if all are lists of integers; a sample that is damaged is null. Copies them."""
        chosen = [(i, one.name, one.encoding.flat) for i, one in enumerate(self._columns) if one.encoding]
        lists = {name: self._lists(i, flat) for i, name, flat in chosen if flat is not None}
        return pa.table(lists) if len(lists) == len(chosen) else None

    def rows(self, indices: np.ndarray) -> list[Row | BadRow]:
        """The samples at ``indices``; one with a value that cannot be decoded is a `BadRow`."""
        starts, sizes, bad = (of_rows[..., indices] for of_rows in self._places)
        places = zip(starts.T.tolist(), (starts + sizes).T.tolist(), bad.tolist(), strict=True)
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
        bounds, bad, values = join_lists(self._data, self._bounds, self._fixed, column, flat)
        return pa.LargeListArray.from_arrays(bounds, values, mask=pa.array(bad) if bad.any() else None)

    @lazy
    def _places(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return find_values(self._data, self._bounds, self._fixed)
