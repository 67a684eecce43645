"""Some columns of a source, as a source of their own: the others are not decoded where a format can leave them out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa

from omniload.errors import ColumnMissing
from omniload.sources.protocol import BadRow, FileEntry, RawBlock, Row, Source


class SomeColumns:
    """The same rows with fewer columns.

    Args:
        source: the rows.
        columns: what to keep.

    Raises:
        ColumnMissing: the first file is a table without one of them.
        CorruptSource: the first file cannot be read.
    """

    def __init__(self, source: Source, columns: Sequence[str]) -> None:
        self._source = source
        self._columns = tuple(dict.fromkeys(columns))
        self.name = source.name
        self.files: Sequence[FileEntry] = source.files
        schema = source.schema(0) if source.files else None
        if schema is None or all(pa.types.is_null(type_) for type_ in schema.types):
            return  # of lines only the first are known, and a later one may have the column
        for column in self._columns:
            if column not in schema.names:
                raise ColumnMissing(
                    f"source '{self.name}': {self.files[0].url}: no column '{column}'; it has"
                    f" {', '.join(schema.names)}; correct read_columns"
                )

    @property
    def fingerprint(self) -> str:
        """Hex digest of everything the rows and their order depend on."""
        return f"{self._source.fingerprint}[{', '.join(self._columns)}]"

    def num_blocks(self, file: int) -> int:
        """Blocks of a file."""
        return self._source.num_blocks(file)

    def schema(self, file: int) -> pa.Schema | None:
        """Those of the columns that a file has."""
        schema = self._source.schema(file)
        return None if schema is None else pa.schema([one for one in schema if one.name in self._columns])

    def read_block(self, file: int, block: int, columns: Iterable[str] | None = None) -> RawBlock:
        """Read some of the columns of one block."""
        kept = self._columns if columns is None else tuple(columns)
        whole = self._source.read_block(file, block, kept)
        return whole if whole.table is not None else _Picked(whole, frozenset(kept))

    def row_ids(self, file: int, block: int) -> np.ndarray:
        """``int64[rows]``: ids of the rows of a block."""
        return self._source.row_ids(file, block)

    def close(self) -> None:
        """Let go of open files."""
        self._source.close()


class _Picked:
    """Rows without columns of their own, each reduced to some keys."""

    def __init__(self, whole: RawBlock, keys: frozenset[str]) -> None:
        self._whole = whole
        self._keys = keys

    @property
    def num_rows(self) -> int:
        """Rows in the block."""
        return self._whole.num_rows

    @property
    def row_ids(self) -> np.ndarray:
        """``int64[rows]``: ids of the rows."""
        return self._whole.row_ids

    @property
    def num_bytes(self) -> int:
        """Host memory held by the block."""
        return self._whole.num_bytes

    @property
    def table(self) -> None:
        """There is none."""
        return None

    def rows(self, indices: np.ndarray) -> list[Row | BadRow]:
        """The rows at ``indices`` as dicts of the keys that they have."""
        return [
            row if isinstance(row, BadRow) else {key: row[key] for key in row if key in self._keys}
            for row in self._whole.rows(indices)
        ]
