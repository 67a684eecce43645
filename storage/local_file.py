"""One new local file that appears whole or not at all, and stays after a power cut.

The bytes go into a hidden file in the directory of the target (same file system, so that it can be renamed), which
is fsynced before it gets its name, and the directory is fsynced after. A crash at any point leaves the old state
or the new one, plus at worst a hidden file.
"""

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from storage.local_space import require_space, reserve_on_disk
from storage.paths import new_hidden_name

__all__ = ["NewFile", "pread_into", "pwrite_all", "sync_dir"]

_MAX_BUFFERS_PER_CALL: Final = 1024  # IOV_MAX


class NewFile:
    """A file being written. As a context manager it is closed, and removed unless it was published.

    Args:
        target: Absolute path it will have.
        expected_bytes: Size, if known: a disk that cannot hold it is reported before anything is written.
        reserved_bytes: Room left at the start, to be filled by ``put_reserved``.

    Raises:
        OSError: ``ENOSPC`` if there is not enough space; whatever the system says otherwise.
    """

    def __init__(self, target: Path, *, expected_bytes: int = 0, reserved_bytes: int = 0) -> None:
        _make_dirs(target.parent)
        require_space(target.parent, expected_bytes)
        self._target = target
        self._hidden: Path | None = target.parent / new_hidden_name()
        self._fd: int | None = os.open(
            self._hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666
        )
        self._end = reserved_bytes
        try:
            reserve_on_disk(self._fd, expected_bytes)
        except BaseException:
            self.close()
            raise

    def append(self, views: Sequence[memoryview]) -> None:
        """Write after what was appended before, straight from the given memory."""
        assert self._fd is not None
        for first in range(0, len(views), _MAX_BUFFERS_PER_CALL):
            self._end = pwrite_all(self._fd, views[first : first + _MAX_BUFFERS_PER_CALL], self._end)

    def put_reserved(self, header: bytes) -> None:
        """Fill the reserved room."""
        if header:
            assert self._fd is not None
            pwrite_all(self._fd, [memoryview(header)], 0)

    def replace(self) -> None:
        """Make it durable and give it its name, in place of any file of that name.

        Raises:
            FileExistsError: A directory has that name.
        """
        assert self._fd is not None
        assert self._hidden is not None
        os.fsync(self._fd)
        try:
            self._hidden.rename(self._target)
        except IsADirectoryError as error:
            raise FileExistsError(errno.EEXIST, "a directory has that name") from error
        self._hidden = None
        sync_dir(self._target.parent)

    def link(self) -> None:
        """Make it durable and give it its name.

        Raises:
            FileExistsError: The name is taken. Of several processes exactly one gets it.
        """
        assert self._fd is not None
        assert self._hidden is not None
        os.fsync(self._fd)
        # link() and not rename(): it is the one POSIX call that fails when the name is taken.
        self._target.hardlink_to(self._hidden)
        sync_dir(self._target.parent)

    def close(self) -> None:
        """Close it, and remove the hidden name if there still is one."""
        fd, self._fd = self._fd, None
        hidden, self._hidden = self._hidden, None
        try:
            if fd is not None:
                os.close(fd)
        finally:
            if hidden is not None:
                hidden.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def sync_dir(directory: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def pread_into(fd: int, into: memoryview, offset: int) -> int:
    """Fill flat memory from an offset; return how many bytes the file had of it."""
    num_read = os.preadv(fd, [into], offset)
    while 0 < num_read < into.nbytes:
        got = os.preadv(fd, [into[num_read:]], offset + num_read)
        if not got:
            break
        num_read += got
    return num_read


def pwrite_all(fd: int, views: Sequence[memoryview], offset: int) -> int:
    """Write views one after another at an offset; return the offset after them."""
    pending = list(views)
    while pending:
        num_written = os.pwritev(fd, pending, offset)
        offset += num_written
        while pending and num_written >= pending[0].nbytes:
            num_written -= pending.pop(0).nbytes
        if num_written:
            pending[0] = pending[0][num_written:]
    return offset


def _make_dirs(directory: Path) -> None:
    """Make a directory and its parents; each new name is durable."""
    if directory.is_dir():
        return
    _make_dirs(directory.parent)
    directory.mkdir(exist_ok=True)
    sync_dir(directory.parent)
