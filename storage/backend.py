"""What a kind of storage must do for ``Store``.

``Store`` holds the guards (paths, sizes, spans, classified errors); a backend only moves bytes. Paths given to a
backend are checked already and relative to its root; data arrive as flat, non-empty byte views. A backend may
raise whatever its driver raises: ``classify`` knows how to read it.

Implemented by ``LocalBackend``, ``S3Backend``, ``S3ObstoreBackend`` and ``FsspecBackend``. To add one, implement
``Backend`` and pass ``tests/storage/conformance.py``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from storage.errors import StorageError

__all__ = ["Abortable", "Backend", "FileStat", "RangeRead", "Sink", "give_up"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FileStat:
    """One object.

    Attributes:
        path: Relative to the store it was asked of (a full URL when it comes from ``storage.glob``).
        size: Bytes.
        etag: The server's tag of this content, without quotes; None where there is none (local files).
    """

    path: str
    size: int
    etag: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RangeRead:
    """Bytes ``start .. start + into.nbytes`` of an object, wanted in ``into``.

    Attributes:
        path: Of the object.
        start: First byte.
        into: Flat writable view, not empty.
    """

    path: str
    start: int
    into: memoryview

    @property
    def end(self) -> int:
        """One past the last byte."""
        return self.start + self.into.nbytes

    def part(self, begin: int, length: int) -> "RangeRead":
        """The ``length`` bytes that lie ``begin`` bytes into this range (fewer at its end)."""
        return RangeRead(path=self.path, start=self.start + begin, into=self.into[begin : begin + length])


class Sink(Protocol):
    """One object being written, invisible until ``commit``. Used by one thread at a time."""

    def append(self, views: Sequence[memoryview]) -> None:
        """Add bytes after those appended before; the views may be reused when this returns."""

    def commit(self, header: bytes) -> None:
        """Put ``header`` in the room reserved before the data and make the object visible, whole and durable."""

    def abort(self) -> None:
        """Remove everything stored so far. Also called after a failed ``append`` or ``commit``."""


class Abortable(Protocol):
    """Something unfinished that can be given up: a sink, a writer, a transaction."""

    def abort(self) -> None:
        """Remove everything stored so far."""


def give_up(unfinished: Abortable, error: BaseException, what: str = "object") -> None:
    """Abort because of ``error``, which stays the error to act on: a second one becomes a note on it."""
    try:
        unfinished.abort()
    except Exception as second:
        error.add_note(f"while removing the unfinished {what}: {second}")


class Backend(Protocol):
    """A tree of objects under one root."""

    range_bytes: int
    """Ranges longer than this are read in parts of this size, in parallel."""

    ranges_per_call: int
    """How many short ranges one thread reads in a row: 1 where a read mostly waits, more where it mostly copies."""

    def read(self, path: str) -> bytes:
        """The whole object."""

    def read_range(self, wanted: RangeRead) -> int:
        """Fill ``wanted.into``; return how many bytes the object had of it. Called from many threads."""

    def write(self, path: str, views: Sequence[memoryview]) -> None:
        """Store an object whole, atomic and durable, replacing one of that name."""

    def create(self, path: str, views: Sequence[memoryview]) -> None:
        """As ``write``, but raise ``FileExistsError`` if there is one; of concurrent callers one succeeds."""

    def sink(self, path: str, header_bytes: int) -> Sink:
        """Begin an object whose first ``header_bytes`` bytes come last."""

    def open(self, path: str) -> BinaryIO:
        """A seekable file for reading."""

    def list_objects(self, prefix: str) -> list[FileStat]:
        """All objects below a directory, in any order; none if there is no such directory."""

    def list_dirs(self, prefix: str) -> list[str]:
        """Names of the directories directly in a directory, in any order; none if there is no such directory."""

    def stat(self, path: str) -> FileStat:
        """Facts about one object."""

    def delete(self, path: str) -> None:
        """Remove one object if it is there."""

    def delete_tree(self, prefix: str) -> None:
        """Remove all objects below a directory."""

    def sub(self, path: str) -> "Backend":
        """The same storage, rooted below."""

    def local_path(self, path: str) -> Path | None:
        """Where the object lies on this machine's file system, if it does."""

    def classify(self, error: BaseException, path: str) -> StorageError | None:
        """As ``storage.errors.classify``, knowing this driver's errors; ``path`` is a full path or URL."""
