"""A block whose rows are token ids already: samples are slices of one flat array, nothing is copied."""

from __future__ import annotations

import numpy as np
import pyarrow as pa


class TokenBlock:
    """The token column of a block.

    Args:
        column: lists of integers.
        row_ids: ``int64[rows]`` identities of the rows.
        limit: ids must be below it; a row with another is bad.
    """

    def __init__(self, column: pa.ChunkedArray, row_ids: np.ndarray, limit: int) -> None:
        array = (
            column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks or [_empty(column)])
        )
        self.row_ids = row_ids
        offsets = _offsets(array)
        # Of a slice of a larger column, keep and look at its own values only.
        flat = array.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
        self.offsets: np.ndarray = offsets - offsets[0]
        """``int64[rows + 1]``: bounds of each row in `values`."""
        nulls = flat.is_null().to_numpy(zero_copy_only=False) if flat.null_count else None
        values = (flat.fill_null(0) if flat.null_count else flat).to_numpy(zero_copy_only=True)
        self.lengths: np.ndarray = np.diff(self.offsets)
        """``int64[rows]``: tokens of each row."""
        self._reasons: list[tuple[str, np.ndarray]] = []
        if array.null_count:
            self._reasons.append(("null", array.is_null().to_numpy(zero_copy_only=False)))
        if not self.lengths.all():
            self._reasons.append(("empty", self.lengths == 0))
        if nulls is not None:
            self._reasons.append(("null among the token ids", self._any(nulls)))
        if _may_exceed(values, limit):
            wrong = (values < 0) | (values >= limit)
            self._reasons.append((f"token id that is not in [0, {limit})", self._any(wrong)))
        self.values: np.ndarray = values.astype(np.uint32) if values.dtype.itemsize == 8 else values
        """``int[tokens]``: the ids of all rows, in the type they are stored in (64-bit ones narrowed)."""
        self.bad: np.ndarray = np.zeros(self.num_rows, dtype=bool)
        """``bool[rows]``: rows that make no sample."""
        for _, rows in self._reasons:
            self.bad |= rows

    @property
    def num_rows(self) -> int:
        """Rows in the block."""
        return len(self.row_ids)

    @property
    def num_bytes(self) -> int:
        """Host memory held by the block."""
        held = (self.values, self.offsets, self.lengths, self.row_ids, self.bad)
        return sum(int(array.nbytes) for array in held)

    def reason(self, row: int) -> str:
        """Why a bad row makes no sample."""
        return next(reason for reason, rows in self._reasons if rows[row])

    def _any(self, flags: np.ndarray) -> np.ndarray:
        """``bool[rows]``: whether any token of the row is flagged."""
        total = np.concatenate([[0], np.cumsum(flags)])
        return np.asarray(total[self.offsets[1:]] > total[self.offsets[:-1]])


def _offsets(array: pa.Array) -> np.ndarray:
    if pa.types.is_fixed_size_list(array.type):
        return np.asarray((np.arange(len(array) + 1, dtype=np.int64) + array.offset) * array.type.list_size)
    return np.asarray(array.offsets, dtype=np.int64)


def _may_exceed(values: np.ndarray, limit: int) -> bool:
    """Whether an id may lie outside [0, limit); one pass, as negative numbers are large when read as unsigned."""
    if not values.size:
        return False
    unsigned = values.view(f"u{values.dtype.itemsize}")
    ids = 2 ** (8 * values.dtype.itemsize - (values.dtype.kind == "i"))
    return bool(unsigned.max() >= min(limit, ids))


def _empty(column: pa.ChunkedArray) -> pa.Array:
    return pa.array([], type=column.type)
