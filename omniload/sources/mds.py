"""MosaicML streaming datasets (MDS): a file is an ``index.json`` with its shards, a row is a sample."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa

from omniload.errors import ColumnMissing, MixtureError
from omniload.sources.gathered import GatheredBlock
from omniload.sources.listing import Listing
from omniload.sources.mds_block import Column, MdsBlock
from omniload.sources.mds_encodings import Encoding, find_encoding
from omniload.sources.mds_index import BLOCK_BYTES, MdsIndex, Shard
from omniload.sources.mds_shard import ShardReader
from omniload.sources.protocol import FileEntry, RawBlock
from omniload.sources.recent import Recent
from storage import Store

_OPEN_FILES = 2
"""The index being read, and the one whose payload is derived again."""


class MdsSource:
    """MDS datasets, local or remote.

    A block of a plain shard is a fixed number of samples, as many as have `BLOCK_BYTES` on average over the shard; a
    compressed shard is one block. Values are what the real tool gives, but for images, which stay
    ``{"bytes": ..., "path": None}``. Digests in the index are checked of compressed shards, which are read whole.

    Memory: one block, and at most two indices.

    Args:
        name: name of the source.
        listing: its ``index.json`` files, and the shards that were listed with them.
    """

    def __init__(self, name: str, listing: Listing) -> None:
        self.name = name
        self.files: Sequence[FileEntry] = listing.files
        self._listing = listing
        self._store: Store = listing.store
        self._sizes = {path: entry.size for path, entry in listing.companions.items()}
        self._indices = Recent(_OPEN_FILES, self._parse_index)
        self._num_blocks: dict[int, int] = {}

    @property
    def fingerprint(self) -> str:
        """Hex digest of everything the rows and their order depend on."""
        return f"{self._listing.fingerprint}-{BLOCK_BYTES}"

    def num_blocks(self, file: int) -> int:
        """Blocks of all shards of an index; reads that only."""
        if file not in self._num_blocks:
            self._num_blocks[file] = self._index(file).num_blocks
        return self._num_blocks[file]

    def schema(self, file: int) -> pa.Schema | None:
        """Columns of the first shard, null where only the values tell the type; None if there is no shard."""
        shards = self._index(file).shards
        if not shards:
            return None
        found = {name: find_encoding(name, encoding) for name, encoding in _encodings(shards[0])}
        return pa.schema([(name, one.type if one else pa.null()) for name, one in found.items()])

    def read_block(self, file: int, block: int, columns: Iterable[str] | None = None) -> MdsBlock:
        """Read the samples of a block; only ``columns`` of them are decoded.

        Raises:
            ColumnMissing: the shard has not all of the columns, or one that is encoded unlike in the first shard, or
                that is not to be decoded, such as a pickle.
            CorruptSource: the shard is not what the index says.
        """
        number, first, last = self._index(file).locate(block)
        return self._read(file, number, np.arange(first, last), columns, self.row_ids(file, block))

    def num_rows(self, file: int) -> int:
        """Samples of an index; reads that only.

        Raises:
            MixtureError: a shard is compressed, so that its samples cannot be read one by one.
        """
        index = self._index(file)
        packed = next((shard for shard in index.shards if shard.zip_data is not None), None)
        if packed is not None:
            raise MixtureError(
                f"source '{self.name}': {self.files[file].url}: shard {packed.stored.basename} is compressed, and"
                " shuffle: global reads single samples; set shuffle: window, or write it without compression"
            )
        return index.num_rows

    def read_rows(self, file: int, rows: np.ndarray, columns: Iterable[str] | None = None) -> RawBlock:
        """Read some samples of plain shards; see `read_block`.

        Args:
            file: which index.
            rows: ``int64[n]`` numbers of the samples, ascending.
            columns: the only ones to decode.
        """
        shard, sample = self._index(file).places(rows)
        numbers, part = np.unique(shard, return_inverse=True)
        wanted = None if columns is None else list(columns)
        blocks = [
            self._read(file, number, sample[shard == number], wanted, rows[shard == number])
            for number in numbers.tolist()
        ]
        if len(blocks) == 1:
            return blocks[0]
        return GatheredBlock(blocks, part, np.arange(len(rows)) - np.searchsorted(part, part), rows)

    def _read(
        self, file: int, number: int, samples: np.ndarray, columns: Iterable[str] | None, row_ids: np.ndarray
    ) -> MdsBlock:
        """Samples of one shard."""
        index = self._index(file)
        shard = index.shards[number]
        found = self._columns(file, shard, index.shards[0], None if columns is None else set(columns))
        data, bounds = self._reader(file, shard).read(samples)
        return MdsBlock(data, bounds, found, row_ids)

    def row_ids(self, file: int, block: int) -> np.ndarray:
        """``int64[rows]``: the number of each sample in its index, over all shards."""
        return self._index(file).row_ids(block)

    def close(self) -> None:
        """Nothing stays open."""

    def _index(self, file: int) -> MdsIndex:
        return self._indices.get(file)

    def _parse_index(self, file: int) -> MdsIndex:
        entry = self.files[file]
        [data] = self._store.read_ranges([(entry.path, 0, entry.size)])
        return MdsIndex(data, entry.url)

    def _columns(self, file: int, shard: Shard, first: Shard, wanted: set[str] | None) -> list[Column]:
        where = f"source '{self.name}': {self.files[file].url}: {shard.stored.basename}"
        for name in sorted((wanted or set()).difference(shard.column_names)):
            raise ColumnMissing(
                f"{where}: no column '{name}', unlike the source's first shard; it has {', '.join(shard.column_names)};"
                " make it a source of its own"
            )
        of_first = dict(_encodings(first))
        return [
            Column(
                name=name,
                size=size or None,
                encoding=_encoding(where, name, encoded, of_first.get(name, encoded))
                if wanted is None or name in wanted
                else None,
            )
            for (name, encoded), size in zip(_encodings(shard), shard.column_sizes, strict=True)
        ]

    def _reader(self, file: int, shard: Shard) -> ShardReader:
        entry, basename = self.files[file], shard.stored.basename
        reader = ShardReader(
            store=self._store,
            shard=shard,
            path=posixpath.join(posixpath.dirname(entry.path), basename),
            url=posixpath.join(posixpath.dirname(entry.url), basename),
        )
        size = self._sizes.get(reader.path)
        if size is None:
            self._sizes[reader.path] = size = self._store.stat(reader.path).size
        if size != shard.stored.bytes:
            raise reader.corrupt(
                min(size, shard.stored.bytes),
                f"ends at byte {size}, not {shard.stored.bytes} as in the index",
            )
        return reader


def _encodings(shard: Shard) -> Iterable[tuple[str, str]]:
    return zip(shard.column_names, shard.column_encodings, strict=True)


def _encoding(where: str, column: str, encoded: str, of_first: str) -> Encoding:
    if encoded != of_first:
        raise ColumnMissing(
            f"{where}: column '{column}' is encoded as {encoded}, unlike {of_first} in the source's first shard;"
            " make it a source of its own"
        )
    encoding = find_encoding(column, encoded)
    if encoding is None:
        reason = "could run any code" if encoded == "pkl" else "is not known here"
        raise ColumnMissing(
            f"{where}: column '{column}' is encoded as {encoded}, which {reason}; write it as json, str, bytes,"
            " ndarray, jpeg or png"
        )
    return encoding
