"""A source held in memory: the shipped fake, and a way to load rows a program already has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from omniload.sources.protocol import FileEntry
from omniload.sources.table import TableBlock


class InMemorySource:
    """Rows or tables in memory, presented as files cut in blocks.

    Args:
        files: the content of each file by name: an Arrow table, or rows that one can be made of.
        name: name of the source.
        block_rows: rows per block.
    """

    def __init__(
        self,
        files: Mapping[str, pa.Table | Sequence[Mapping[str, Any]]],
        *,
        name: str = "memory",
        block_rows: int = 1024,
    ) -> None:
        self.name = name
        self._block_rows = block_rows
        self._tables = []
        self.files: list[FileEntry] = []
        for path in sorted(files, key=str.encode):
            content = files[path]
            table = content if isinstance(content, pa.Table) else pa.Table.from_pylist(list(content))
            digest = xxhash.xxh3_128_hexdigest(_ipc_bytes(table))
            self._tables.append(table)
            self.files.append(
                FileEntry(
                    path=path,
                    url=f"{name}:{path}",
                    size=int(table.nbytes),
                    find_digest=partial(str, digest),
                )
            )
        listed = "".join(f"{entry.path}\0{entry.digest}\0" for entry in self.files)
        self.fingerprint = xxhash.xxh3_128_hexdigest(f"memory {block_rows}\0{listed}".encode())

    def num_blocks(self, file: int) -> int:
        """Blocks of a file."""
        return -(-int(self._tables[file].num_rows) // self._block_rows)

    def schema(self, file: int) -> pa.Schema:
        """Columns of a file."""
        return self._tables[file].schema

    def read_block(self, file: int, block: int, columns: Iterable[str] | None = None) -> TableBlock:
        """One block, with some or all of its columns."""
        row_ids = self.row_ids(file, block)
        table = self._tables[file].slice(block * self._block_rows, len(row_ids))
        return TableBlock(table if columns is None else table.select(list(columns)), row_ids)

    def num_rows(self, file: int) -> int:
        """Rows of a file."""
        return int(self._tables[file].num_rows)

    def read_rows(self, file: int, rows: np.ndarray, columns: Iterable[str] | None = None) -> TableBlock:
        """Some rows by number."""
        table = self._tables[file] if columns is None else self._tables[file].select(list(columns))
        return TableBlock(table.take(pa.array(rows)), rows)

    def row_ids(self, file: int, block: int) -> np.ndarray:
        """``int64[rows]``: the number of each row in its file."""
        start = block * self._block_rows
        return np.arange(start, min(start + self._block_rows, self._tables[file].num_rows), dtype=np.int64)

    def close(self) -> None:
        """Nothing is open."""


def _ipc_bytes(table: pa.Table) -> memoryview:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return memoryview(sink.getvalue())
