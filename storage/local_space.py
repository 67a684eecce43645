"""Room on a local disk for a file whose size is known before its first byte is written."""

import ctypes
import errno
import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

__all__ = ["require_space", "reserve_on_disk", "reserve_space"]


def require_space(directory: Path, num_bytes: int) -> None:
    """Fail if a disk has not so many bytes free.

    Raises:
        OSError: ``ENOSPC``.
    """
    if not num_bytes:
        return
    disk = os.statvfs(directory)
    free_bytes = disk.f_bavail * disk.f_frsize
    if disk.f_blocks and num_bytes > free_bytes:  # some network file systems report no sizes at all
        raise OSError(errno.ENOSPC, f"{num_bytes} bytes to write, {free_bytes} free: make room")


def reserve_on_disk(fd: int, num_bytes: int) -> None:
    """As ``reserve_space``, on a block device only.

    There it costs nothing that could be measured (ext4). In memory (tmpfs) a write takes a tenth longer, because every
    page is visited twice, and over a network the server may not know the request.
    """
    if num_bytes and os.major(os.fstat(fd).st_dev):
        reserve_space(fd, num_bytes)


def reserve_space(fd: int, num_bytes: int) -> None:
    """Make a new file this long, all of its blocks its own, so that no other writer can take them meanwhile.

    Does nothing where the system or the file system cannot do it. (``os.posix_fallocate`` would then write to every
    block, which is why it is not used.)

    Raises:
        OSError: ``ENOSPC`` or ``EDQUOT``: they do not fit.
    """
    fallocate = _fallocate()
    if fallocate is None or fallocate(fd, 0, 0, num_bytes) == 0:
        return
    number = ctypes.get_errno()
    if number in (errno.ENOSPC, errno.EDQUOT):
        raise OSError(number, f"{num_bytes} bytes to write, and no room for them: make room")


@lru_cache(maxsize=1)
def _fallocate() -> Callable[[int, int, int, int], int] | None:
    """``fallocate(fd, mode, offset, length)`` of Linux, which the standard library lacks."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if function is not None:
        function.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
        function.restype = ctypes.c_int
    return function
