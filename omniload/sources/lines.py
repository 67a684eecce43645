"""Files of lines, plain or compressed: a row is a line, known by its byte offset in the (decompressed) file.

A plain file is cut in byte ranges of 1 MiB; a block has the lines that *start* in its range, so that any block can be
read without the ones before it. A compressed file cannot be entered in the middle and is one block, unless it was
rewritten for it. Lines end with a newline, a carriage return before it left out; blank ones are no rows, nor is a byte
order mark part of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from omniload.sources.compressed import CompressedFiles
from omniload.sources.listing import Listing
from omniload.sources.protocol import BadRow, FileEntry, Row
from storage import Store

BLOCK_BYTES = 1 << 20
"""Bytes per block of a plain file, if nothing else is said; part of the order of the rows."""
_SCAN_BYTES = 64 << 20
_HEAD_ROWS = 64
_BOM = b"\xef\xbb\xbf"
_Buffer: TypeAlias = bytes | bytearray | memoryview

Parse: TypeAlias = Callable[[memoryview], Row | BadRow]
"""Makes a row of the bytes of a line, the end of the line left out."""


class LineBlock:
    """Lines, parsed when asked for.

    Args:
        data: bytes that hold the lines.
        offset: byte offset of ``data`` in the (decompressed) file.
        end: lines that start at or after this byte of ``data`` belong to the next block. What comes before the first
            newline is a line only at the start of the file.
        parse: makes a row of a line.
    """

    def __init__(self, data: _Buffer, offset: int, end: int, parse: Parse) -> None:
        self._data = memoryview(data)
        self._starts, self._ends = _bounds(data, offset, end)
        self._parse = parse
        self.row_ids = self._starts + offset

    @property
    def num_rows(self) -> int:
        """Lines in the block."""
        return len(self.row_ids)

    @property
    def num_bytes(self) -> int:
        """Host memory held by the block."""
        return self._data.nbytes + 3 * int(self.row_ids.nbytes)

    @property
    def table(self) -> None:
        """Lines have no columns."""
        return None

    def rows(self, indices: np.ndarray) -> list[Row | BadRow]:
        """The rows at ``indices``; a line that is none is a `BadRow`."""
        bounds = zip(self._starts[indices].tolist(), self._ends[indices].tolist(), strict=True)
        return [self._parse(self._data[start:end]) for start, end in bounds]


class LineSource:
    """Files of lines, local or remote; ``.gz`` and ``.zst`` are decompressed.

    Memory: one block, which for a compressed file that was not rewritten is the whole decompressed file.

    Args:
        name: name of the source.
        listing: its files.
        parse: makes a row of a line.
        block_bytes: bytes per block of a plain file; part of the order of the rows.
    """

    def __init__(self, name: str, listing: Listing, parse: Parse, *, block_bytes: int = BLOCK_BYTES) -> None:
        self.name = name
        self.files: Sequence[FileEntry] = listing.files
        self._listing = listing
        self._store: Store = listing.store
        self._compressed = CompressedFiles(listing.store, listing.files)
        self._parse = parse
        self._block_bytes = block_bytes

    @property
    def fingerprint(self) -> str:
        """Hex digest of everything the rows and their order depend on."""
        return f"{self._listing.fingerprint}-{self._block_bytes}"

    def num_blocks(self, file: int) -> int:
        """Byte ranges of a plain file; frames of a compressed one, 1 if it was not rewritten."""
        if file in self._compressed:
            return self._compressed.num_blocks(file)
        return -(-self.files[file].size // self._block_bytes)

    def schema(self, file: int) -> pa.Schema | None:
        """Keys of the first rows; None if none of the first lines is a row. The types are not checked: all null."""
        head = self._compressed.head(file) if file in self._compressed else self._head(file)
        keys: dict[str, None] = {}
        for line in bytes(head).split(b"\n")[:_HEAD_ROWS]:
            row = self._parse(memoryview(line))
            if isinstance(row, dict):
                keys.update(dict.fromkeys(row))
        return pa.schema([(key, pa.null()) for key in keys]) if keys else None

    def read_block(self, file: int, block: int, columns: Iterable[str] | None = None) -> LineBlock:
        """Read a block; ``columns`` changes nothing, lines are parsed whole.

        Raises:
            CorruptSource: the compressed stream ends early or is damaged.
        """
        if file not in self._compressed:
            return self._read_range(file, block)
        data, offset = self._compressed.read_block(file, block)
        if offset:  # a frame begins with a line: as if the newline before it had been read too
            data, offset = b"\n" + data, offset - 1
        return LineBlock(data, offset, len(data), self._parse)

    def row_ids(self, file: int, block: int) -> np.ndarray:
        """``int64[rows]``: byte offset of each line."""
        return self.read_block(file, block).row_ids

    def close(self) -> None:
        """Nothing stays open."""

    def _read_range(self, file: int, block: int) -> LineBlock:
        entry = self.files[file]
        start = block * self._block_bytes
        end = min(start + self._block_bytes, entry.size)
        offset = max(0, start - 1)  # the byte before tells whether a line starts at `start`
        data = bytearray(self._read(entry, offset, end))
        last = end - offset - 1
        if start and data.find(b"\n", 0, last) < 0:
            return LineBlock(b"", offset, 0, self._parse)  # a longer line passes over the whole range
        searched, read = last, end  # the line that starts last may end after the range
        while data.find(b"\n", searched) < 0 and read < entry.size:
            searched, more = len(data), min(read + BLOCK_BYTES, entry.size)
            data += self._read(entry, read, more)
            read = more
        return LineBlock(data, offset, end - offset, self._parse)

    def _read(self, entry: FileEntry, start: int, end: int) -> memoryview:
        return self._store.read_ranges([(entry.path, start, end)])[0]

    def _head(self, file: int) -> _Buffer:
        entry = self.files[file]
        return self._read(entry, 0, min(entry.size, BLOCK_BYTES)) if entry.size else b""


def _bounds(data: _Buffer, offset: int, end: int) -> tuple[np.ndarray, np.ndarray]:
    """``int64[rows]`` twice: first byte of each line that starts before ``end``, and the byte after its last."""
    values = np.frombuffer(data, dtype=np.uint8)
    # In parts, so that the comparison does not take as much memory as the data.
    parts = range(0, len(values), _SCAN_BYTES)
    newlines = [np.flatnonzero(values[at : at + _SCAN_BYTES] == ord("\n")) + at for at in parts]
    breaks = np.concatenate([*newlines, np.array([len(values)])]).astype(np.int64)
    starts = breaks[:-1] + 1
    if offset == 0:
        starts = np.insert(starts, 0, len(_BOM) if bytes(data[: len(_BOM)]) == _BOM else 0)
    starts = starts[starts < min(end, len(values))]
    ends = breaks[np.searchsorted(breaks, starts)]
    ends -= values[ends - 1] == ord("\r") if len(ends) else 0
    filled = ends > starts
    return starts[filled], ends[filled]
