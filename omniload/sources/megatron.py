"""Megatron's indexed datasets, ``x.idx`` and ``x.bin``: a row is a document, known by its number."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa

from omniload.errors import SourceNotFound
from omniload.recycler import BLOCKS
from omniload.sources.listing import Listing
from omniload.sources.megatron_index import Documents, MegatronIndex
from omniload.sources.protocol import FileEntry
from omniload.sources.table import TableBlock
from storage import Store

BLOCK_BYTES = 2 << 20
"""Bytes of tokens per block, on average over a file; part of the order of the rows."""
BLOCK_DOCUMENTS = 1 << 16
"""Most documents per block, so that the part of the index that it needs is small too."""

_COLUMN = "input_ids"


class MegatronSource:
    """Megatron's indexed datasets, local or remote; a row has one column, ``input_ids``.

    A document is all its sequences, one after the other. A block is a fixed number of documents of a file, as many as
    have `BLOCK_BYTES` on average, so that it is known by its number and only its part of the index is read.

    Memory: one block; of every file that was touched its header.

    Args:
        name: name of the source.
        listing: its ``.idx`` files, and the ``.bin`` beside each.

    Raises:
        SourceNotFound: an index has no ``.bin``.
    """

    def __init__(self, name: str, listing: Listing) -> None:
        self.name = name
        self.files: Sequence[FileEntry] = listing.files
        self._listing = listing
        self._store: Store = listing.store
        self._tokens = [_tokens_of(name, entry, listing) for entry in listing.files]
        self._indices: dict[int, MegatronIndex] = {}

    @property
    def fingerprint(self) -> str:
        """Hex digest of everything the rows and their order depend on."""
        return f"{self._listing.fingerprint}-{BLOCK_BYTES}-{BLOCK_DOCUMENTS}"

    def num_blocks(self, file: int) -> int:
        """Blocks of a file; reads its header."""
        return -(-self._index(file).num_documents // self._block_documents(file))

    def schema(self, file: int) -> pa.Schema:
        """The column, of the type that the file's tokens have."""
        return pa.schema([(_COLUMN, pa.large_list(pa.from_numpy_dtype(self._index(file).dtype)))])

    def read_block(self, file: int, block: int, columns: Iterable[str] | None = None) -> TableBlock:
        """Read the tokens of a block's documents; ``columns`` changes nothing, there is one.

        Raises:
            CorruptSource: the index contradicts itself or the ``.bin``, or has sequences that are not text.
        """
        return self.read_rows(file, self.row_ids(file, block))

    def num_rows(self, file: int) -> int:
        """Documents of a file; reads its header."""
        return self._index(file).num_documents

    def read_rows(self, file: int, rows: np.ndarray, columns: Iterable[str] | None = None) -> TableBlock:
        """Read the tokens of some documents; see `read_block`.

        Args:
            file: which file.
            rows: ``int64[n]`` numbers of the documents, ascending.
            columns: change nothing.
        """
        found = self._index(file).read(rows)
        documents = pa.LargeListArray.from_arrays(found.bounds, self._read_tokens(file, found))
        return TableBlock(pa.table([documents], schema=self.schema(file)), rows)

    def row_ids(self, file: int, block: int) -> np.ndarray:
        """``int64[rows]``: the number of each document in its file."""
        per_block = self._block_documents(file)
        return np.arange(
            block * per_block, min((block + 1) * per_block, self._index(file).num_documents), dtype=np.int64
        )

    def close(self) -> None:
        """Nothing stays open."""

    def _index(self, file: int) -> MegatronIndex:
        index = self._indices.get(file)
        if index is None:
            index = MegatronIndex(self._store, self.files[file], self._tokens[file])
            self._indices[file] = index
        return index

    def _block_documents(self, file: int) -> int:
        average = BLOCK_BYTES * self._index(file).num_documents // max(self._tokens[file].size, 1)
        return min(max(average, 1), BLOCK_DOCUMENTS)

    def _read_tokens(self, file: int, found: Documents) -> np.ndarray:
        """The tokens of the sequences in order; those of neighbours are read at once, as a rule of all."""
        dtype, path = self._index(file).dtype, self._tokens[file].path
        at = np.concatenate([[0], np.cumsum(found.sizes)])  # of each sequence in what is read
        values = BLOCKS.empty(int(at[-1]) // dtype.itemsize, dtype)
        into = values.view(np.uint8).data
        leaps = found.pointers[1:] != found.pointers[:-1] + found.sizes[:-1]
        runs = np.concatenate([[0], np.flatnonzero(leaps) + 1])[: len(found.sizes)]
        bounds = np.append(at[runs], at[-1]).tolist()
        ranges, views = [], []
        for pointer, begin, end in zip(found.pointers[runs].tolist(), bounds, bounds[1:], strict=False):
            ranges.append((path, pointer, pointer + end - begin))
            views.append(into[begin:end])
        self._store.read_ranges(ranges, views)
        return values


def _tokens_of(name: str, entry: FileEntry, listing: Listing) -> FileEntry:
    path = f"{entry.path.removesuffix('.idx')}.bin"
    if path not in listing.companions:
        raise SourceNotFound(f"source '{name}': {entry.url} has no .bin beside it; copy that there too")
    return listing.companions[path]
