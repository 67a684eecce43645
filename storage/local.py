"""Files on this machine (or on a mounted file system)."""

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from storage.backend import FileStat, RangeRead
from storage.buffers import num_bytes_of
from storage.errors import StorageError, classify
from storage.local_file import NewFile, pread_into, sync_dir
from storage.paths import is_hidden, join

__all__ = ["LocalBackend"]


class LocalBackend:
    """Backend for a local directory, which is made when something is written.

    Symbolic links to files are followed; linked directories are not descended into by listings, nor ever deleted
    through.

    Args:
        root: Absolute path.
    """

    range_bytes = 8 << 20
    ranges_per_call = 64

    def __init__(self, root: Path) -> None:
        self._root = root
        self._root_text = str(root)  # making a Path takes as long as opening the file

    def read(self, path: str) -> bytes:
        """Read in one go."""
        return self._path(path).read_bytes()

    def read_range(self, wanted: RangeRead) -> int:
        """``preadv`` straight into the caller's memory."""
        # Opening costs microseconds, less than keeping many descriptors in bounds would.
        fd = os.open(f"{self._root_text}/{wanted.path}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return pread_into(fd, wanted.into, wanted.start)
        finally:
            os.close(fd)

    def write(self, path: str, views: Sequence[memoryview]) -> None:
        """Hidden file, fsync, rename, fsync of the directory."""
        with NewFile(self._path(path), expected_bytes=num_bytes_of(views)) as file:
            file.append(views)
            file.replace()

    def create(self, path: str, views: Sequence[memoryview]) -> None:
        """Hidden file, fsync, link, fsync of the directory."""
        target = self._path(path)
        if os.path.lexists(target):  # spares the write; the link decides
            raise FileExistsError(f"{target} exists")
        with NewFile(target, expected_bytes=num_bytes_of(views)) as file:
            file.append(views)
            file.link()

    def sink(self, path: str, header_bytes: int) -> "_LocalSink":
        """Begin a hidden file with room at its start."""
        return _LocalSink(NewFile(self._path(path), reserved_bytes=header_bytes))

    def open(self, path: str) -> BinaryIO:
        """A plain file."""
        return self._path(path).open("rb")

    def list_objects(self, prefix: str) -> list[FileStat]:
        """Walk the directory, hidden names left out."""
        return list(_walk(self._path(prefix), prefix))

    def list_dirs(self, prefix: str) -> list[str]:
        """Directories, empty ones and links to directories included."""
        return [entry.name for entry in _entries(self._path(prefix)) if entry.is_dir()]

    def stat(self, path: str) -> FileStat:
        """Size only."""
        target = self._path(path)
        if target.is_dir():
            raise FileNotFoundError("is a directory")
        return FileStat(path=path, size=target.stat().st_size)

    def delete(self, path: str) -> None:
        """Unlink; the directory stays even if it became empty."""
        target = self._path(path)
        try:
            target.unlink()
        except (FileNotFoundError, NotADirectoryError):
            return
        sync_dir(target.parent)

    def delete_tree(self, prefix: str) -> None:
        """Remove the directory itself too; a link to a directory is left alone."""
        target = self._path(prefix)
        if target.is_symlink() or not target.is_dir():
            return
        shutil.rmtree(target)
        sync_dir(target.parent)

    def sub(self, path: str) -> "LocalBackend":
        """Another root."""
        return LocalBackend(self._path(path))

    def local_path(self, path: str) -> Path | None:
        """Always known."""
        return self._path(path)

    def classify(self, error: BaseException, path: str) -> StorageError | None:
        """By errno."""
        return classify(error, path)

    def _path(self, path: str) -> Path:
        return self._root / path


class _LocalSink:
    """A new file that has its header written last."""

    def __init__(self, file: NewFile) -> None:
        self._file = file

    def append(self, views: Sequence[memoryview]) -> None:
        self._file.append(views)

    def commit(self, header: bytes) -> None:
        self._file.put_reserved(header)
        self._file.replace()
        self._file.close()

    def abort(self) -> None:
        self._file.close()


def _entries(directory: Path) -> "list[os.DirEntry[str]]":
    """What lies in a directory, or nothing if it is none (any more)."""
    try:
        with os.scandir(directory) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _walk(directory: Path, prefix: str) -> Iterator[FileStat]:
    pending = [(directory, prefix)]
    while pending:
        at, name = pending.pop()
        for entry in _entries(at):
            if is_hidden(entry.name):
                continue
            path = join(name, entry.name)
            if entry.is_dir(follow_symlinks=False):
                pending.append((Path(entry.path), path))
                continue
            try:
                if entry.is_file():
                    yield FileStat(path=path, size=entry.stat().st_size)
            except FileNotFoundError:  # deleted while we were listing
                continue
