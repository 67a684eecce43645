"""The room of a cache: a bound in bytes that holds for all processes together.

::

    usage          "<boot id> <bytes>": never less than what is really there, changed under its own flock
    new/           files being written, at their full size from the start, each locked by its writer
    blocks/ab/     finished files, by the first two digits of their names

Room is booked before a file is made and given back only by counting, so whatever is killed whenever, the count errs
on the high side, and the next eviction puts it right. What a power cut leaves behind is counted afresh, because
the boot id differs. A finished file is emptied before it loses its name, so that its room is free at once though other
processes may have it open; when a file was last used is its time of access, set by those who read it.
"""

import fcntl
import os
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from storage.file_lock import locked

__all__ = ["Space"]

_LOCK_TIMEOUT_S: Final = 10.0  # counting a million files takes a few seconds
_KEEP: Final = 0.9
"""Eviction goes down to this share of the bound, so that counting is paid once per tenth of it."""

_SECTOR_BYTES: Final = 4096  # what file systems give out


@dataclass(frozen=True, kw_only=True, slots=True)
class _File:
    """A file of the cache.

    Attributes:
        inode: Its number in the file system.
        used_ns: When it was last read, or written; Unix time, nanoseconds.
        num_bytes: What it takes on the disk.
        path: Where it lies.
    """

    inode: int
    used_ns: int
    num_bytes: int
    path: Path


class Space:
    """A directory of files that may be lost at any time.

    Args:
        root: Of the cache.
        max_bytes: Most bytes that all files take together, those being written included.
    """

    def __init__(self, root: Path, max_bytes: int) -> None:
        self._root = root
        self._max_bytes = max_bytes
        self._new = root / "new"
        self._blocks = root / "blocks"

    def path(self, name: str) -> str:
        """Where a finished file lies, if it is there."""
        return f"{self._blocks}/{name[:2]}/{name}"  # text: making a Path takes as long as opening the file

    def make(self, num_bytes: int) -> tuple[int, Path] | None:
        """Begin a file of ``num_bytes`` bytes, making room for it by removing what was not used for longest.

        Returns:
            Descriptor and path, to be filled and given to ``publish``, or to be closed and removed; None if the books
            were locked for too long.

        Raises:
            OSError: Whatever the system says.
        """
        self._new.mkdir(parents=True, exist_ok=True)
        wanted = _allocated(num_bytes)
        with locked(self._root / "usage", _LOCK_TIMEOUT_S) as books:
            if books is None:
                return None
            used = _booked(books)
            if used is None or used + wanted > self._max_bytes:
                used = self._make_room(wanted)
            _book(
                books, used + wanted
            )  # before the file is there: a kill in between counts too much, not too little
            path = self._new / uuid.uuid4().hex
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # says that its writer lives
            os.ftruncate(fd, num_bytes)
        return fd, path

    def publish(self, path: Path, name: str) -> None:
        """Give a filled file its name, in place of any of that name."""
        target = Path(self.path(name))
        target.parent.mkdir(parents=True, exist_ok=True)
        _empty(target)
        path.rename(target)

    def remove(self, name: str) -> None:
        """Remove a finished file if it is there and can be removed."""
        with suppress(OSError):
            _remove(Path(self.path(name)))

    def count(self) -> int:
        """Bytes that all files take now."""
        with locked(self._root / "usage", _LOCK_TIMEOUT_S):
            return sum(file.num_bytes for file in self._files())

    def _make_room(self, wanted: int) -> int:
        """Count, and if there is no room for ``wanted`` bytes remove files; return what is left. Under the lock."""
        for file in _files(self._new):
            _remove_if_abandoned(file.path)
        files = self._files()
        used = sum(file.num_bytes for file in files)
        if used + wanted <= self._max_bytes:
            return used
        goal = min(int(_KEEP * self._max_bytes), self._max_bytes - wanted)
        finished = [file for file in files if file.path.parent != self._new]
        for file in sorted(finished, key=lambda file: file.used_ns):
            if used <= goal:
                break
            _remove(file.path)
            used -= file.num_bytes
        return used

    def _files(self) -> list[_File]:
        """All files. Under the lock, when none is begun."""
        # New ones first and each inode once, so that one that is finished meanwhile is neither missed nor seen twice.
        found = {file.inode: file for file in _files(self._new)}
        for shard in _entries(self._blocks):
            found |= {file.inode: file for file in _files(Path(shard.path))}
        return list(found.values())


def _files(directory: Path) -> Iterator[_File]:
    for entry in _entries(directory):
        with suppress(FileNotFoundError):  # finished, or found damaged and removed by a reader
            facts = entry.stat(follow_symlinks=False)
            yield _File(
                inode=facts.st_ino,
                used_ns=facts.st_atime_ns,
                num_bytes=_allocated(facts.st_size),
                path=Path(entry.path),
            )


def _allocated(num_bytes: int) -> int:
    return -(-num_bytes // _SECTOR_BYTES) * _SECTOR_BYTES


def _entries(directory: Path) -> "list[os.DirEntry[str]]":
    try:
        with os.scandir(directory) as entries:
            return list(entries)
    except FileNotFoundError:
        return []


def _remove(path: Path) -> None:
    _empty(path)
    path.unlink(missing_ok=True)


def _empty(path: Path) -> None:
    """Give back the room of a file that is about to lose its name, also if a process has it open."""
    with suppress(OSError):
        os.truncate(path, 0)


def _remove_if_abandoned(path: Path) -> None:
    """Remove an unfinished file whose writer is dead: a living one has it locked."""
    with suppress(FileNotFoundError):  # finished meanwhile
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
        except BlockingIOError:
            pass
        finally:
            os.close(fd)


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _booked(books: int) -> int | None:
    """What was booked since the machine started; None if nothing is known."""
    boot, _, num_bytes = os.pread(books, 100, 0).decode("ascii", "replace").partition(" ")
    return int(num_bytes) if boot == _boot_id() and num_bytes.strip().isdigit() else None


def _book(books: int, num_bytes: int) -> None:
    os.pwrite(books, f"{_boot_id()} {num_bytes:020d}\n".encode("ascii"), 0)
