"""A block whose rows are token ids already: samples are slices of one flat array, nothing is copied."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from omniload.payload import narrowest
from omniload.recycler import BLOCKS
from omniload.samples.convention import IGNORED_LABEL


class TokenBlock:
    """The token column of a block.

    Args:
        column: lists of integers.
        row_ids: ``int64[rows]`` identities of the rows.
        limit: ids must be below it; a row with another is bad.
        labels: lists of integers, the ids again or `IGNORED_LABEL` for those that are not trained on; None if all are.
    """

    def __init__(
        self, column: pa.ChunkedArray, row_ids: np.ndarray, limit: int, labels: pa.ChunkedArray | None = None
    ) -> None:
        array = _joined(column)
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
        most = _largest(values)
        if most >= min(limit, 2 ** (8 * values.dtype.itemsize - (values.dtype.kind == "i"))):
            wrong = (values < 0) | (values >= limit)
            self._reasons.append((f"token id that is not in [0, {limit})", self._any(wrong)))
        narrow = np.dtype(narrowest(min(most, 2**32 - 1)))
        self.values: np.ndarray = _cast(values, narrow) if narrow.itemsize < values.dtype.itemsize else values
        """``int[tokens]``: the ids of all rows, in the narrowest type: what is kept is mostly these."""
        self.trained: np.ndarray | None = (
            None if labels is None else self._read_labels(_joined(labels), values)
        )
        """``bool[tokens]``: tokens that are trained on; None if all are."""
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
        held = (self.values, self.offsets, self.lengths, self.row_ids, self.bad, self.trained)
        return sum(int(array.nbytes) for array in held if array is not None)

    def reason(self, row: int) -> str:
        """Why a bad row makes no sample."""
        return next(reason for reason, rows in self._reasons if rows[row])

    def trained_of(self, row: int) -> np.ndarray:
        """``bool``: the tokens of a row that are trained on."""
        start, end = self.offsets[row : row + 2]
        return np.ones(end - start, dtype=bool) if self.trained is None else self.trained[start:end]

    def _read_labels(self, labels: pa.Array, values: np.ndarray) -> np.ndarray | None:
        """Which tokens are trained on; rows whose labels are not those of their tokens are noted as bad."""
        if labels.null_count:
            self._reasons.append(("'labels' is null", labels.is_null().to_numpy(zero_copy_only=False)))
        offsets = _offsets(labels)
        flat = labels.values.fill_null(0).to_numpy(zero_copy_only=False)
        other = np.diff(offsets) != self.lengths
        if other.any():
            self._reasons.append(("not as many labels as token ids", other))
        # Where the label of each token is; of rows with too few, anywhere.
        shift = np.repeat(offsets[:-1] - self.offsets[:-1], self.lengths)
        at = np.minimum(np.arange(len(values)) + shift, len(flat) - 1)
        of_token = flat[at] if len(flat) else np.zeros(len(values), dtype=np.int64)
        trained = np.asarray(of_token != IGNORED_LABEL)
        wrong = trained & (of_token != values)
        if wrong.any():
            self._reasons.append(
                (f"labels that are neither the token ids nor {IGNORED_LABEL}", self._any(wrong))
            )
        if trained.all():
            return None
        counted = trained.copy()
        counted[self.offsets[:-1][self.lengths > 0]] = False  # nothing predicts the first
        self._reasons.append(("no token to train on", self._any(~trained) & ~self._any(counted)))
        return trained

    def _any(self, flags: np.ndarray) -> np.ndarray:
        """``bool[rows]``: whether any token of the row is flagged."""
        total = np.concatenate([[0], np.cumsum(flags)])
        return np.asarray(total[self.offsets[1:]] > total[self.offsets[:-1]])


def _offsets(array: pa.Array) -> np.ndarray:
    if pa.types.is_fixed_size_list(array.type):
        return np.asarray((np.arange(len(array) + 1, dtype=np.int64) + array.offset) * array.type.list_size)
    return np.asarray(array.offsets, dtype=np.int64)


def _largest(values: np.ndarray) -> int:
    """The largest id; one pass tells of negative ones too, as they are large when read as unsigned."""
    return int(values.view(f"u{values.dtype.itemsize}").max(initial=0))


def _cast(values: np.ndarray, dtype: np.dtype[np.unsignedinteger]) -> np.ndarray:
    cast = BLOCKS.empty(len(values), dtype)
    np.copyto(cast, values, casting="unsafe")
    return cast


def _joined(column: pa.ChunkedArray) -> pa.Array:
    if column.num_chunks == 1:
        return column.chunk(0)
    return pa.concat_arrays(column.chunks or [pa.array([], type=column.type)])
