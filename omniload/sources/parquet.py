"""Parquet: a block is a row group, a row is known by its number in the file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from omniload.errors import ColumnMissing, CorruptSource
from omniload.sources.listing import Listing
from omniload.sources.protocol import FileEntry
from omniload.sources.table import TableBlock
from storage import Store

_OPEN_FILES = 2
"""The file being read, and the one whose payload is derived again: every footer costs memory."""


class ParquetSource:
    """Parquet files, local or remote.

    Memory: one row group, and the footers of at most two files.

    Args:
        name: name of the source.
        listing: its files.
    """

    def __init__(self, name: str, listing: Listing) -> None:
        self.name = name
        self.files: Sequence[FileEntry] = listing.files
        self._listing = listing
        self._store: Store = listing.store
        self._open: dict[int, pq.ParquetFile] = {}  # least recently used first
        self._starts: dict[
            int, np.ndarray
        ] = {}  # of the open files: first row of each row group, and the end
        self._num_blocks: dict[int, int] = {}

    @property
    def fingerprint(self) -> str:
        """Hex digest of everything the rows and their order depend on."""
        return self._listing.fingerprint

    def num_blocks(self, file: int) -> int:
        """Row groups of a file."""
        if file not in self._num_blocks:
            self._num_blocks[file] = self._file(file).metadata.num_row_groups
        return self._num_blocks[file]

    def schema(self, file: int) -> pa.Schema:
        """Columns of a file."""
        with self._corrupt_if_unreadable(file):
            return self._file(file).schema_arrow

    def read_block(self, file: int, block: int, columns: Iterable[str] | None = None) -> TableBlock:
        """Read a row group, or some of its columns.

        Raises:
            ColumnMissing: the file has not all of the columns.
            CorruptSource: its bytes are not Parquet.
        """
        wanted = None if columns is None else list(columns)
        names = self.schema(file).names
        for column in wanted or ():
            if column not in names:
                raise ColumnMissing(
                    f"source '{self.name}': {self.files[file].url}: no column '{column}', unlike the source's first"
                    f" file; it has {', '.join(names)}; make it a source of its own"
                )
        with self._corrupt_if_unreadable(file):
            # Threads would help only across columns, and one is read; the loaders of a mixture run side by side.
            table = self._file(file).read_row_group(block, columns=wanted, use_threads=False)
        start, end = self._starts[file][block : block + 2].tolist()
        if table.num_rows != end - start:
            raise CorruptSource(
                f"{self.files[file].url}: row group {block} holds {table.num_rows} rows where the footer says "
                f"{end - start}; write the file again"
            )
        return TableBlock(table, self.row_ids(file, block))

    def row_ids(self, file: int, block: int) -> np.ndarray:
        """``int64[rows]``: the number of each row in its file."""
        self._file(file)
        return np.arange(*self._starts[file][block : block + 2], dtype=np.int64)

    def close(self) -> None:
        """Close the open files."""
        while self._open:
            self._close_oldest()

    def _file(self, file: int) -> pq.ParquetFile:
        opened = self._open.pop(file, None)
        if opened is None:
            while len(self._open) >= _OPEN_FILES:
                self._close_oldest()
            path = self.files[file].path
            # Not a memory map: a file that shrinks under one kills the process instead of raising.
            local = self._store.local_path(path)
            with self._corrupt_if_unreadable(file):
                opened = pq.ParquetFile(
                    pa.OSFile(str(local)) if local is not None else self._store.open(path),
                    pre_buffer=local is None,
                    page_checksum_verification=True,
                )
                metadata = opened.metadata
                sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
            self._starts[file] = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self._open[file] = opened
        return opened

    def _close_oldest(self) -> None:
        oldest = next(iter(self._open))
        self._open.pop(oldest).close(force=True)
        del self._starts[oldest]

    @contextmanager
    def _corrupt_if_unreadable(self, file: int) -> Iterator[None]:
        """Name the file in Arrow's errors about its bytes; let errors of the storage pass as they are."""
        try:
            yield
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            # Arrow reports bad bytes as an OSError too, but one of the system has a number, of the storage a class.
            if isinstance(error, OSError) and (error.errno is not None or type(error) is not OSError):
                raise
            reason = " ".join(str(error).split())
            raise CorruptSource(
                f"{self.files[file].url}: cannot be read as Parquet ({reason}); copy or write the file again, "
                "or take it out of the source's path"
            ) from error
