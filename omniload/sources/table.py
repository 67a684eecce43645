"""Rows of a block as Arrow columns."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from omniload.sources.protocol import BadRow, Row


class TableBlock:
    """A block stored as columns.

    Args:
        table: the rows.
        row_ids: ``int64[rows]`` identities of the rows in their file.
    """

    def __init__(self, table: pa.Table, row_ids: np.ndarray) -> None:
        assert table.num_rows == len(row_ids)
        self._table = table
        self.row_ids = row_ids

    @property
    def num_rows(self) -> int:
        """Rows in the block."""
        return len(self.row_ids)

    @property
    def num_bytes(self) -> int:
        """Host memory held by the block."""
        return int(self._table.nbytes) + int(self.row_ids.nbytes)

    @property
    def table(self) -> pa.Table:
        """The rows as columns."""
        return self._table

    def rows(self, indices: np.ndarray) -> list[Row | BadRow]:
        """The rows at ``indices`` as dicts; one with a value that is none in Python is a `BadRow`: text not UTF-8."""
        try:
            return list(self._table.take(pa.array(indices)).to_pylist())
        except (ValueError, OverflowError, pa.ArrowNotImplementedError):
            # One row has such a value, or Arrow cannot take rows of such a type.
            return [_row(self._table, i) for i in indices.tolist()]


def _row(table: pa.Table, index: int) -> Row | BadRow:
    try:
        row: Row = table.slice(index, 1).to_pylist()[0]
    except UnicodeDecodeError as error:
        return BadRow(reason=f"not UTF-8: {error}")
    except (ValueError, OverflowError) as error:
        return BadRow(reason=f"cannot be read: {error}")
    return row
