"""JSON lines, plain or compressed: a row is a line, known by its byte offset in the (decompressed) file.

A plain file is cut in byte ranges of 1 MiB; a block has the lines that *start* in its range, so that any block can be
read without the ones before it. A compressed file cannot be entered in the middle and is one block.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import pyarrow as pa
import zstandard

from omniload.errors import CorruptSource
from omniload.sources.listing import Listing
from omniload.sources.protocol import BadRow, FileEntry, Row
from storage import Store

BLOCK_BYTES = 1 << 20
"""Bytes per block of a plain file; part of the order of the rows."""
_READ_BYTES = 1 << 20
_SCAN_BYTES = 64 << 20
_HEAD_ROWS = 64
_BOM = b"\xef\xbb\xbf"
_Buffer: TypeAlias = bytes | bytearray | memoryview


class _Decompressor(Protocol):
    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /) -> bytes: ...


_DECOMPRESSORS: dict[str, Callable[[], _Decompressor]] = {
    ".gz": lambda: zlib.decompressobj(wbits=31),
    ".zst": lambda: zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj(),
}


class LineBlock:
    """Lines of JSON, parsed when asked for.

    Args:
        data: bytes that hold the lines.
        offset: byte offset of ``data`` in the (decompressed) file.
        starts: ``int64[rows]`` first byte of each line in ``data``.
        ends: ``int64[rows]`` byte after its last, the newline left out.
    """

    def __init__(self, data: _Buffer, offset: int, starts: np.ndarray, ends: np.ndarray) -> None:
        self._data = memoryview(data)
        self._starts = starts
        self._ends = ends
        self.row_ids = starts + offset

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
        """The rows at ``indices``; one that is not a JSON object is a `BadRow`."""
        bounds = zip(self._starts[indices].tolist(), self._ends[indices].tolist(), strict=True)
        return [_parse(self._data[start:end]) for start, end in bounds]


class JsonlSource:
    """JSON lines, local or remote; ``.gz`` and ``.zst`` are decompressed.

    Memory: one block, which for a compressed file is the whole decompressed file.

    Args:
        name: name of the source.
        listing: its files.
    """

    def __init__(self, name: str, listing: Listing) -> None:
        self.name = name
        self.files: Sequence[FileEntry] = listing.files
        self.fingerprint = f"{listing.fingerprint}-{BLOCK_BYTES}"
        self._store: Store = listing.store

    def num_blocks(self, file: int) -> int:
        """Byte ranges of a plain file; 1 if it is compressed."""
        entry = self.files[file]
        return 1 if _decompressor(entry) else -(-entry.size // BLOCK_BYTES)

    def schema(self, file: int) -> pa.Schema | None:
        """Keys of the first rows; None if none of them is a JSON object. The types are not checked: all null."""
        head = next(self._chunks(file), b"") if _decompressor(self.files[file]) else self._head(file)
        keys: dict[str, None] = {}
        for line in bytes(head).split(b"\n")[:_HEAD_ROWS]:
            row = _parse(memoryview(line))
            if isinstance(row, dict):
                keys.update(dict.fromkeys(row))
        return pa.schema([(key, pa.null()) for key in keys]) if keys else None

    def read_block(self, file: int, block: int, columns: Iterable[str] | None = None) -> LineBlock:
        """Read a block; ``columns`` changes nothing, lines are parsed whole.

        Raises:
            CorruptSource: the compressed stream ends early or is damaged.
        """
        if _decompressor(self.files[file]):
            data = bytearray()
            for chunk in self._chunks(file):
                data += chunk
            return _cut_lines(data, 0, len(data))
        return self._read_range(file, block)

    def row_ids(self, file: int, block: int) -> np.ndarray:
        """``int64[rows]``: byte offset of each line."""
        return self.read_block(file, block).row_ids

    def close(self) -> None:
        """Nothing stays open."""

    def _read_range(self, file: int, block: int) -> LineBlock:
        entry = self.files[file]
        start, end = block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, entry.size)
        offset = max(0, start - 1)  # the byte before tells whether a line starts at `start`
        data = bytearray(self._read(entry, offset, end))
        last = end - offset - 1
        if start and data.find(b"\n", 0, last) < 0:
            return _cut_lines(b"", offset, 0)  # a longer line passes over the whole range
        searched, read = last, end  # the line that starts last may end after the range
        while data.find(b"\n", searched) < 0 and read < entry.size:
            searched, more = len(data), min(read + BLOCK_BYTES, entry.size)
            data += self._read(entry, read, more)
            read = more
        return _cut_lines(data, offset, end - offset)

    def _read(self, entry: FileEntry, start: int, end: int) -> memoryview:
        return self._store.read_ranges([(entry.path, start, end)])[0]

    def _head(self, file: int) -> _Buffer:
        entry = self.files[file]
        return self._read(entry, 0, min(entry.size, BLOCK_BYTES)) if entry.size else b""

    def _chunks(self, file: int) -> Iterator[bytes]:
        """The decompressed file, in order."""
        entry = self.files[file]
        new = _decompressor(entry)
        assert new is not None
        state: _Decompressor | None = None
        ended = 0  # a file may be several streams one after the other
        with self._store.open(entry.path) as stream:
            try:
                while data := stream.read(_READ_BYTES):
                    while data:
                        if state is None:
                            data = data.lstrip(b"\0") if ended else data  # gzip allows zeros to pad the end
                            if not data:
                                break
                            state = new()
                        yield state.decompress(data)
                        data = state.unused_data
                        if state.eof:
                            state, ended = None, ended + 1
            except (zlib.error, zstandard.ZstdError) as error:
                raise CorruptSource(f"{entry.url}: damaged ({error}); copy or compress it again") from error
        if state is not None or not ended:
            raise CorruptSource(f"{entry.url}: the compressed stream ends early; copy or compress it again")


def _decompressor(entry: FileEntry) -> Callable[[], _Decompressor] | None:
    return next((new for ending, new in _DECOMPRESSORS.items() if entry.path.endswith(ending)), None)


def _cut_lines(data: _Buffer, offset: int, end: int) -> LineBlock:
    """The lines of ``data`` that start before ``end``; the first bytes are a line only at the start of the file."""
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
    return LineBlock(data, offset, starts[filled], ends[filled])


def _parse(line: memoryview) -> Row | BadRow:
    try:
        row: Any = json.loads(str(line, "utf-8"))
    except (ValueError, RecursionError) as error:
        return BadRow(reason=f"not JSON: {error}")
    if not isinstance(row, dict):
        return BadRow(reason=f"a JSON {type(row).__name__}, not an object")
    return row
