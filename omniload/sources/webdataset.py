"""WebDataset: tar files whose consecutive members of one key are a row, known by the offset of its first header.

The key is the path up to the first dot of the name, what follows is the name of the field; a row is
``{"__key__": key, "jpg": {"bytes", "path"}, "txt": text, ...}``, as `omniload.sources.fields` decodes them. As with the
``webdataset`` tool a key that comes again later is a row of its own, members without a dot and those called
``__name__`` are left out, and so are links and directories. A row with two members of one name, and one that the file
ends in, are `BadRow`.

A block is a run of rows of at least 1 MiB. Where it begins says a side-car index, made by reading the headers and
nothing else. A compressed tar file is one block, unless it was rewritten.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, takewhile

import numpy as np
import pyarrow as pa

from omniload.errors import CorruptSource
from omniload.sources.compressed import CompressedFiles
from omniload.sources.fields import decode_field
from omniload.sources.listing import Listing
from omniload.sources.protocol import BadRow, FileEntry, Row
from omniload.sources.recent import Recent
from omniload.sources.sidecar import load_or_build
from omniload.sources.tar import KEY, Bytes, TarSample, tar_samples
from omniload.sources.tar_bytes import BytesInMemory, RangedBytes
from storage import Store

BLOCK_BYTES = 1 << 20
"""Bytes after which the next row begins a block; part of the order of the rows."""
INDEX_KIND = f"tar {BLOCK_BYTES}"
_KEPT_INDICES = 2
_HEAD_ROWS = 64


class SampleBlock:
    """Samples of a tar file, decoded when asked for.

    Args:
        samples: where their members are.
        data: bytes that hold them.
        offset: of ``data`` in the (decompressed) file.
        columns: the fields wanted; None for all.
    """

    def __init__(
        self,
        samples: Sequence[TarSample],
        data: bytes | bytearray | memoryview,
        offset: int,
        columns: Iterable[str] | None,
    ) -> None:
        self._samples = samples
        self._data = memoryview(data)
        self._offset = offset
        self._columns = None if columns is None else frozenset(columns)
        self.row_ids = np.array([sample.start for sample in samples], dtype=np.int64)

    @property
    def num_rows(self) -> int:
        """Samples in the block."""
        return len(self.row_ids)

    @property
    def num_bytes(self) -> int:
        """Host memory held by the block, what Python needs to know of each member left out."""
        return self._data.nbytes + int(self.row_ids.nbytes)

    @property
    def table(self) -> None:
        """Samples have no columns."""
        return None

    def rows(self, indices: np.ndarray) -> list[Row | BadRow]:
        """The rows at ``indices``; one that has a field that cannot be decoded is a `BadRow`."""
        return [self._row(self._samples[index]) for index in indices.tolist()]

    def _row(self, sample: TarSample) -> Row | BadRow:
        if sample.problem is not None:
            return BadRow(reason=sample.problem)
        row: Row = {KEY: sample.key} if self._columns is None or KEY in self._columns else {}
        try:
            for name, member in sample.fields.items():
                if self._columns is None or name in self._columns:
                    begin = member.data - self._offset
                    row[name] = decode_field(name, member.name, self._data[begin : begin + member.size])
        except ValueError as error:
            return BadRow(reason=str(error))
        return row


class WebDatasetSource:
    """Tar files, local or remote; ``.tar.gz``, ``.tgz`` and ``.tar.zst`` are decompressed.

    Memory: one block, which for a compressed file that was not rewritten is the whole decompressed file, and the
    indices of at most two files, 8 bytes for a block.

    Args:
        name: name of the source.
        listing: its files.
    """

    def __init__(self, name: str, listing: Listing) -> None:
        self.name = name
        self.files: Sequence[FileEntry] = listing.files
        self._listing = listing
        self._store: Store = listing.store
        self._compressed = CompressedFiles(listing.store, listing.files)
        self._indices = Recent(_KEPT_INDICES, lambda file: load_index(self._store, self.files[file]))

    @property
    def fingerprint(self) -> str:
        """Hex digest of everything the rows and their order depend on."""
        return f"{self._listing.fingerprint}-{INDEX_KIND}"

    def num_blocks(self, file: int) -> int:
        """Runs of rows of at least 1 MiB; frames of a compressed file, 1 if it was not rewritten.

        Reads the headers of the file, if there is no index of it yet.

        Raises:
            CorruptSource: it is no tar file.
        """
        if file in self._compressed:
            return self._compressed.num_blocks(file)
        return len(self._index(file)) - 1

    def schema(self, file: int) -> pa.Schema | None:
        """Names of the fields of the first rows; None if there are none. The types are not checked: all null."""
        names: dict[str, None] = {}
        for sample in islice(self._first_samples(file), _HEAD_ROWS):
            names.update(dict.fromkeys((KEY, *sample.fields)))
        return pa.schema([(name, pa.null()) for name in names]) if names else None

    def read_block(self, file: int, block: int, columns: Iterable[str] | None = None) -> SampleBlock:
        """Read a block; only the fields in ``columns`` are decoded.

        Raises:
            CorruptSource: it is no part of a tar file, or its compressed stream is damaged.
        """
        entry = self.files[file]
        if file in self._compressed:
            data: bytes | bytearray | memoryview
            data, start = self._compressed.read_block(file, block)
            size = start + len(data)
        else:
            start, end = self._index(file)[block : block + 2].tolist()
            data, size = self._store.read_ranges([(entry.path, start, end)])[0], entry.size
        samples = tar_samples(BytesInMemory(data, start, size), start, start + len(data), entry.url)
        return SampleBlock(list(samples), data, start, columns)

    def row_ids(self, file: int, block: int) -> np.ndarray:
        """``int64[rows]``: offset of the first header of each row in the (decompressed) file."""
        return self.read_block(file, block).row_ids

    def close(self) -> None:
        """Nothing stays open."""

    def _index(self, file: int) -> np.ndarray:
        return self._indices.get(file)

    def _first_samples(self, file: int) -> Iterator[TarSample]:
        entry = self.files[file]
        start_bytes: Bytes
        if file in self._compressed:
            head = self._compressed.head(file)
            start_bytes, size = BytesInMemory(head, 0, len(head)), len(head)
        else:
            start_bytes, size = RangedBytes(self._store, entry), entry.size
        samples = tar_samples(start_bytes, 0, size, entry.url)
        return takewhile(lambda sample: sample.start < BLOCK_BYTES, samples)


def load_index(store: Store, entry: FileEntry) -> np.ndarray:
    """``int64[blocks + 1]``: where the blocks of a tar file begin, and where its last row ends.

    Raises:
        CorruptSource: it is no tar file.
    """

    def build() -> np.ndarray:
        if not entry.size:
            raise CorruptSource(f"{entry.url}: an empty file, not a tar file; copy it again")
        return np.array(list(cut_rows(RangedBytes(store, entry), entry.size, entry.url)), dtype=np.int64)

    return load_or_build(store, entry, INDEX_KIND, build)


def cut_rows(file: Bytes, size: int, url: str) -> Iterator[int]:
    """Offsets at which the blocks of a tar file begin, then the one where its last row ends.

    Args:
        file: its bytes.
        size: how many, or more than there are.
        url: of the file, for messages.

    Raises:
        CorruptSource: it is no tar file.
    """
    begun: int | None = None
    end = 0
    for sample in tar_samples(file, 0, size, url):
        if begun is None or sample.start - begun >= BLOCK_BYTES:
            begun = sample.start
            yield begun
        end = min(sample.end, size)
    yield end
