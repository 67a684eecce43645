"""Any iterable torch dataset as a source of a mixture: read in sequence, in blocks of its rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa
import xxhash

from omniload.errors import MixtureError, SourceError
from omniload.sources.epochs import EveryEpoch
from omniload.sources.protocol import OPEN_END, BadRow, FileEntry, Row
from omniload.sources.torch_rows import copy_of
from omniload.sources.torch_stream import BLOCK_ROWS, Stream


class IterableSource:
    """An iterable dataset, presented as one file whose end is found by reading.

    Its order is the dataset's own. Rows are numbered from 0 in every epoch. A row that has passed is reached by
    iterating again, at worst from the start of the epoch; so is the place of a cursor in a new process.

    Args:
        name: name of the source.
        stream: the dataset.
        where: what made the dataset, for messages.
        identity: what, besides, its fingerprint depends on; of the rows it says nothing.
    """

    def __init__(self, name: str, stream: Stream, where: str, identity: str) -> None:
        self.name = name
        self._stream = stream
        self._where = where
        self._digest = xxhash.xxh3_128_hexdigest(f"{where}\0{identity}".encode())
        self.files: Sequence[FileEntry] = EveryEpoch(
            FileEntry(path="dataset", url=where, size=0, find_digest=self._find_content)
        )
        self.fingerprint = xxhash.xxh3_128_hexdigest(f"iterable {BLOCK_ROWS}\0{self._digest}".encode())

    def num_blocks(self, file: int) -> int:
        """Not known before the end is read."""
        return OPEN_END

    def schema(self, file: int) -> pa.Schema | None:
        """Keys of the first row, with null for their types; None if it is no row."""
        row = self._stream.first(self.name)
        return pa.schema([(key, pa.null()) for key in row]) if isinstance(row, dict) else None

    def read_block(self, file: int, block: int, columns: Iterable[str] | None = None) -> RowsBlock:
        """A block of an epoch, none of whose rows lie behind the end; ``columns`` changes nothing.

        Raises:
            SourceError: as `Stream.read` says.
        """
        rows, num_bytes = self._stream.read(self.name, file, block)
        return RowsBlock(f"source '{self.name}'", rows, block * BLOCK_ROWS, num_bytes)

    def row_ids(self, file: int, block: int) -> np.ndarray:
        """``int64[BLOCK_ROWS]``: number of each row in the epoch; of the last block as if it were full."""
        return block * BLOCK_ROWS + np.arange(BLOCK_ROWS, dtype=np.int64)

    def close(self) -> None:
        """Let go of the pass over the dataset."""
        self._stream.close()

    def _find_content(self) -> str:
        """Asked for where rows are held out."""
        if self._stream.has_epochs:
            raise MixtureError(
                f"source '{self.name}': held_out: rows are known by their number, and {self._where} has set_epoch, so"
                " that a number may be another row in every epoch; hold rows out in the dataset itself"
            )
        return self._digest


class RowsBlock:
    """A run of rows in memory.

    Args:
        where: what to name in errors.
        rows: the rows.
        first: number of the first in its epoch.
        num_bytes: about what they take.
    """

    table = None

    def __init__(self, where: str, rows: Sequence[Row | BadRow], first: int, num_bytes: int) -> None:
        self._where = where
        self._rows = rows
        self._first = first
        self.row_ids = first + np.arange(len(rows), dtype=np.int64)
        self.num_bytes = num_bytes
        """Host memory held by the rows, about."""

    @property
    def num_rows(self) -> int:
        """Rows in the block."""
        return len(self._rows)

    def rows(self, indices: np.ndarray) -> list[Row | BadRow]:
        """Copies of the rows at ``indices``.

        Raises:
            SourceError: there is no such row any more.
        """
        if len(indices) and indices.max() >= len(self._rows):
            raise SourceError(
                f"{self._where}: the dataset ends before row {self._first + int(indices.max())}, which it had before;"
                " resume with the dataset it was"
            )
        return [copy_of(self._rows[index]) for index in indices.tolist()]
