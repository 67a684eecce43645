"""A remote object as a file that libraries can read."""

import io
from typing import BinaryIO, Protocol

from storage.backend import FileStat, RangeRead
from storage.errors import Corrupt, StorageError

__all__ = ["RangeSource", "open_ranges"]

_BUFFER_BYTES = 1 << 20  # one request fetches at least this much; longer reads pass the buffer by


class RangeSource(Protocol):
    """What a file needs of a ``Backend``, and what one version of a cached object gives as well."""

    def stat(self, path: str) -> FileStat:
        """Facts about one object."""

    def read_range(self, wanted: RangeRead) -> int:
        """Fill ``wanted.into``; return how many bytes the object had of it."""

    def classify(self, error: BaseException, path: str) -> StorageError | None:
        """As ``storage.errors.classify``."""


def open_ranges(source: RangeSource, path: str, url: str) -> BinaryIO:
    """Open an object for reading by ranges.

    Args:
        source: Where it lies.
        path: Relative to the source.
        url: Full URL, for messages.

    Returns:
        A buffered, seekable file. Its size is fixed now; its errors are classified as those of ``Store`` are.
    """
    return io.BufferedReader(_RangeFile(source, path, url), _BUFFER_BYTES)


class _RangeFile(io.RawIOBase):
    """Raw file over ``read_range``. Unlike a driver's own file it gives classified errors."""

    def __init__(self, source: RangeSource, path: str, url: str) -> None:
        super().__init__()
        self._source = source
        self._path = path
        self._url = url
        self._size = source.stat(path).size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        if origin + offset < 0:
            raise ValueError(f"{self._url}: seek to {origin + offset}: it must be at least 0")
        self._position = origin + offset
        return self._position

    def readall(self) -> bytes:
        # In one request: the inherited method would make one for every few KiB.
        rest = bytearray(max(0, self._size - self._position))
        view, num_read = memoryview(rest), 0
        while num_read < len(rest):
            num_read += self.readinto(view[num_read:])
        return bytes(rest)

    def readinto(self, buffer: "memoryview[int] | bytearray") -> int:  # type: ignore[override]
        view = memoryview(buffer).cast("B")[: max(0, self._size - self._position)]
        if not view.nbytes:
            return 0
        try:
            num_read = self._source.read_range(RangeRead(path=self._path, start=self._position, into=view))
        except Exception as error:
            classified = self._source.classify(error, self._url)
            if classified is None:
                raise
            try:
                raise classified from error
            finally:
                del classified
        if not num_read:
            raise Corrupt(self._url, f"had {self._size} bytes when opened, now ends before {self._position}")
        self._position += num_read
        return num_read
