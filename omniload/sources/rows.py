"""Some consecutive rows of a source, as a source of their own: whole blocks, and parts of the first and the last."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from omniload.errors import MixtureError
from omniload.sources.protocol import BadRow, FileEntry, RawBlock, Row, Source


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """A place between two rows of a source."""

    file: int
    """Number of the file."""
    block: int
    """Block of the file."""
    row: int
    """Rows of the block before the place."""


class SomeRows:
    """Rows ``start:stop`` of a source, counted over its files in order.

    Where they are is found at once, by the row counts of the files up to ``stop`` (``start`` if it is None): of
    formats with an index that reads the index, of lines the lines.

    Args:
        source: all rows.
        start: first row, from 0.
        stop: row after the last; None: to the end.

    Raises:
        MixtureError: the source has no row in the range.
        CorruptSource: a file cannot be read.
    """

    def __init__(self, source: Source, start: int, stop: int | None) -> None:
        first, self._last = self._find(source, start, stop)
        if first is None:
            raise MixtureError(
                f"source '{source.name}': rows: it has no row {start} or later; lower rows.start"
            )
        self._source = source
        self._first = first
        self.name = source.name
        last_file = len(source.files) - 1 if self._last is None else self._last.file
        self.files: Sequence[FileEntry] = source.files[first.file : last_file + 1]
        self._range = f"{start}:{'' if stop is None else stop}"

    @property
    def fingerprint(self) -> str:
        """Hex digest of everything the rows and their order depend on."""
        return f"{self._source.fingerprint}[{self._range}]"

    def num_blocks(self, file: int) -> int:
        """Blocks of a file that have rows of the range."""
        stored, first = self._stored(file, 0)
        if self._last is not None and stored == self._last.file:
            return self._last.block + 1 - first
        return self._source.num_blocks(stored) - first

    def schema(self, file: int) -> pa.Schema | None:
        """Columns of a file."""
        return self._source.schema(self._stored(file, 0)[0])

    def read_block(self, file: int, block: int, columns: Iterable[str] | None = None) -> RawBlock:
        """Read one block, or the part of it that is in the range."""
        whole = self._source.read_block(*self._stored(file, block), columns)
        begin, end = self._bounds(file, block, whole.num_rows)
        return whole if end - begin == whole.num_rows else _Part(whole, begin, end)

    def row_ids(self, file: int, block: int) -> np.ndarray:
        """``int64[rows]``: ids of the rows of a block, as in the whole file."""
        row_ids = self._source.row_ids(*self._stored(file, block))
        begin, end = self._bounds(file, block, len(row_ids))
        return row_ids[begin:end]

    def close(self) -> None:
        """Let go of open files."""
        self._source.close()

    @staticmethod
    def _find(source: Source, start: int, stop: int | None) -> tuple[_Place | None, _Place | None]:
        """Where the range begins, None if the source ends before; and where it ends, None if with the source."""
        first = None
        before = 0
        for file in range(len(source.files)):
            for block in range(source.num_blocks(file)):
                size = len(source.row_ids(file, block))
                if first is None and before + size > start:
                    first = _Place(file=file, block=block, row=start - before)
                if first is not None and stop is None:
                    return first, None
                if stop is not None and before + size >= stop:
                    return first, _Place(file=file, block=block, row=stop - before)
                before += size
        return first, None

    def _stored(self, file: int, block: int) -> tuple[int, int]:
        """File and block as the source counts them."""
        return self._first.file + file, block if file else self._first.block + block

    def _bounds(self, file: int, block: int, num_rows: int) -> tuple[int, int]:
        """First row in the range of a block that the source has in ``num_rows``, and the row after the last."""
        begin = self._first.row if file == block == 0 else 0
        last = self._last
        if last is not None and self._stored(file, block) == (last.file, last.block):
            return begin, last.row
        return begin, num_rows


class _Part:
    """Rows ``begin:end`` of a block."""

    def __init__(self, whole: RawBlock, begin: int, end: int) -> None:
        self._whole = whole
        self._begin = begin
        self.row_ids = whole.row_ids[begin:end]

    @property
    def num_rows(self) -> int:
        """Rows in the part."""
        return len(self.row_ids)

    @property
    def num_bytes(self) -> int:
        """Host memory held, by the whole block."""
        return self._whole.num_bytes

    @property
    def table(self) -> pa.Table | None:
        """The rows as columns, if they are stored so."""
        table = self._whole.table
        return None if table is None else table.slice(self._begin, self.num_rows)

    def rows(self, indices: np.ndarray) -> list[Row | BadRow]:
        """The rows at ``indices`` as dicts."""
        return self._whole.rows(indices + self._begin)
