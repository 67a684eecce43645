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
        """The rows at ``indices`` as dicts; one with text that is not UTF-8 is a `BadRow`."""
        taken = self._table.take(pa.array(indices))
        try:
            return list(taken.to_pylist())
        except UnicodeDecodeError:
            return [_row(taken, i) for i in range(taken.num_rows)]


def _row(table: pa.Table, index: int) -> Row | BadRow:
    try:
        row: Row = table.slice(index, 1).to_pylist()[0]
    except UnicodeDecodeError as error:
        return BadRow(reason=f"not UTF-8: {error}")
    return row
