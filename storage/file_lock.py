"""A lock between processes (and threads) that never waits for ever."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

__all__ = ["locked"]

_FIRST_PAUSE_S: Final = 0.0005
_LONGEST_PAUSE_S: Final = 0.02


@contextmanager
def locked(path: Path, timeout_s: float) -> Iterator[int | None]:
    """Hold ``flock`` on a file, made if missing, during a block.

    The system frees it when the holder dies. It is for work that is merely better done by one at a time: who cannot
    have it goes on without.

    Args:
        path: The file; never removed while it serves as a lock.
        timeout_s: Longest wait.

    Yields:
        A descriptor open for reading and writing, or None if the lock was not free in time or cannot be had at all
        (read-only or missing directory).
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError:
        yield None
        return
    try:
        yield fd if _acquire(fd, timeout_s) else None
    finally:
        # Not left to close(): a child forked meanwhile shares this lock and would keep it.
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def _acquire(fd: int, timeout_s: float) -> bool:
    # Asked again and again, because a blocking flock() cannot be given a time-out.
    deadline = time.monotonic() + timeout_s
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
        else:
            return True
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
