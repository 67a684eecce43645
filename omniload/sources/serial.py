"""A source that several threads may use: one call at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa

from omniload.sources.protocol import FileEntry, RawBlock, Source


class SerialSource:
    """Serialises the calls to a source, which by itself need not be thread-safe.

    Here and not around the whole loader: payload that is prepared already must not wait for a block being decoded.

    Args:
        source: the source.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        """Name of the source in the mixture."""
        return self._source.name

    @property
    def files(self) -> Sequence[FileEntry]:
        """The files in byte order of their paths."""
        return self._source.files

    @property
    def fingerprint(self) -> str:
        """Hex digest of everything the rows and their order depend on."""
        return self._source.fingerprint

    def num_blocks(self, file: int) -> int:
        """Blocks of a file."""
        with self._lock:
            return self._source.num_blocks(file)

    def schema(self, file: int) -> pa.Schema | None:
        """Columns of a file, if they are known."""
        with self._lock:
            return self._source.schema(file)

    def read_block(self, file: int, block: int, columns: Iterable[str] | None = None) -> RawBlock:
        """Read one block."""
        with self._lock:
            return self._source.read_block(file, block, columns)

    def row_ids(self, file: int, block: int) -> np.ndarray:
        """``int64[rows]``: ids of the rows of a block."""
        with self._lock:
            return self._source.row_ids(file, block)

    def close(self) -> None:
        """Let go of open files."""
        with self._lock:
            self._source.close()
