"""Rows that were read in several blocks, as one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from omniload.sources.protocol import BadRow, RawBlock, Row


class GatheredBlock:
    """Rows of several blocks, in an order of their own.

    Args:
        parts: the blocks.
        part: ``int64[rows]`` which of them each row is of.
        place: ``int64[rows]`` its number in that.
        row_ids: ``int64[rows]`` identities of the rows.
    """

    def __init__(
        self, parts: Sequence[RawBlock], part: np.ndarray, place: np.ndarray, row_ids: np.ndarray
    ) -> None:
        self._parts = parts
        self._part = part
        self._place = place
        self.row_ids = row_ids

    @property
    def num_rows(self) -> int:
        """Rows in the block."""
        return len(self.row_ids)

    @property
    def num_bytes(self) -> int:
        """Host memory held."""
        return sum(part.num_bytes for part in self._parts) + 3 * int(self.row_ids.nbytes)

    @property
    def table(self) -> pa.Table | None:
        """The rows as columns, if they are stored so in all files; of types that those of all files fit in."""
        tables = [table for part in self._parts if (table := part.table) is not None]
        if not tables or len(tables) < len(self._parts):
            return None
        before = np.cumsum([0, *(table.num_rows for table in tables[:-1])])
        return pa.concat_tables(tables, promote_options="permissive").take(
            pa.array(before[self._part] + self._place)
        )

    def rows(self, indices: np.ndarray) -> list[Row | BadRow]:
        """The rows at ``indices`` as dicts."""
        found: list[Row | BadRow] = [BadRow(reason="")] * len(indices)
        part, place = self._part[indices], self._place[indices]
        for one in np.unique(part).tolist():
            here = np.flatnonzero(part == one)
            for i, row in zip(here.tolist(), self._parts[one].rows(place[here]), strict=True):
                found[i] = row
        return found
