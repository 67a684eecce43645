"""The bytes that tar headers are looked for in: a file read here and there, a stream, or what is in memory."""

from __future__ import annotations

from collections.abc import Iterator

from omniload.sources.protocol import FileEntry
from storage import Store

_LOCAL_BYTES = 4 << 10
_REMOTE_BYTES = 256 << 10  # about what a connection brings in the time that a request waits
_LONGEST_BYTES = 8 << 20


class RangedBytes:
    """A file of which only what is asked for is read, and a little more.

    Each read is twice as long as the one before while the offsets follow each other closely, so that many small members
    cost few requests, and short again after a jump, so that the content of large ones is not fetched.

    Args:
        store: holds the file.
        entry: the file.
    """

    def __init__(self, store: Store, entry: FileEntry) -> None:
        self._store = store
        self._entry = entry
        self._shortest = _REMOTE_BYTES if store.local_path(entry.path) is None else _LOCAL_BYTES
        self._length = self._shortest
        self._held = memoryview(b"")
        self._start = 0  # of what is held

    def at(self, offset: int, length: int) -> memoryview:
        """Bytes from an offset on, fewer where the file ends."""
        end = min(offset + length, self._entry.size)
        if end <= offset:
            return memoryview(b"")
        held_end = self._start + len(self._held)
        if offset < self._start or end > held_end:
            jumped = not self._start <= offset <= held_end + self._shortest
            self._length = self._shortest if jumped else min(2 * self._length, _LONGEST_BYTES)
            stop = min(max(end, offset + self._length), self._entry.size)
            self._held = self._store.read_ranges([(self._entry.path, offset, stop)])[0]
            self._start = offset
        return self._held[offset - self._start : end - self._start]

    def reaches(self, end: int) -> bool:
        """Whether the file has as many bytes."""
        return end <= self._entry.size


class StreamedBytes:
    """A file of unknown size that comes in order; what lies before the offset asked for last is gone.

    Args:
        chunks: its bytes.
    """

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._held = b""
        self._start = 0

    def at(self, offset: int, length: int) -> memoryview:
        """Bytes from an offset on, which is not below the one before; fewer where the file ends."""
        assert offset >= self._start
        while self._start + len(self._held) < offset + length:
            chunk = next(self._chunks, None)
            if chunk is None:
                break
            gone = min(len(self._held), offset - self._start)
            self._held = self._held[gone:] + chunk
            self._start += gone
        begin = offset - self._start
        return memoryview(self._held)[begin : begin + length]

    def reaches(self, end: int) -> bool:
        """Whether the file has as many bytes."""
        return not end or bool(self.at(max(end - 1, self._start), 1))


class BytesInMemory:
    """A part of a file.

    Args:
        data: the part.
        offset: of its first byte in the file.
        size: bytes of the whole file.
    """

    def __init__(self, data: bytes | bytearray | memoryview, offset: int, size: int) -> None:
        self._data = memoryview(data)
        self._offset = offset
        self._size = size

    def at(self, offset: int, length: int) -> memoryview:
        """Bytes from an offset on, fewer where the part ends."""
        begin = offset - self._offset
        return self._data[begin : begin + length]

    def reaches(self, end: int) -> bool:
        """Whether the file has as many bytes."""
        return end <= self._size
