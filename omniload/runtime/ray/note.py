"""What the process that runs a cluster tells the other ranks of its machine, and who of them lives.

::

    <folder of the job>/ray.json    where the cluster is; locked by the process that runs it
    <folder of the job>/ray.ranks   locked by every other process that joined it, all at once

A process lets go of its lock when it ends, however it ends.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import IO, Any

from omniload.errors import LoaderTimeout
from omniload.observing.job_dir import job_dir

_RETRY_S = 0.05


class Note:
    """The note of one job, as one of its processes sees it.

    Args:
        job: the name that its ranks share.
    """

    def __init__(self, job: str) -> None:
        folder = job_dir(job)
        self._path, self._ranks = folder / "ray.json", folder / "ray.ranks"
        self._lock: IO[str] | None = None  # of either file

    def write(self, said: Mapping[str, Any]) -> None:
        """Tell it from now on."""
        self._ranks.unlink(missing_ok=True)  # those of a run before this one are not waited for
        written = self._path.with_suffix(f".{os.getpid()}")
        self._lock = written.open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._lock.write(json.dumps(said))
        self._lock.flush()
        written.replace(self._path)

    def withdraw(self) -> None:
        """Tell it no more."""
        self._path.unlink(missing_ok=True)
        self._ranks.unlink(missing_ok=True)
        self.let_go()

    def read(self) -> dict[str, Any] | None:
        """What it says, if who wrote it is still there."""
        with suppress(FileNotFoundError), self._path.open() as file:
            if _is_locked(file):
                said: dict[str, Any] = json.load(file)
                return said
        return None

    def wait(self, timeout_s: float) -> dict[str, Any]:
        """What it says, once it is written.

        Raises:
            LoaderTimeout: it was not in time.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            said = self.read()
            if said is not None:
                return said
            time.sleep(_RETRY_S)
        raise LoaderTimeout(
            f"ray: rank 0 did not start a cluster within {timeout_s:g} s ({self._path} does not name one)"
        )

    def take_part(self) -> None:
        """Be one of `others` for who wrote it, as long as this process lives."""
        self._lock = self._ranks.open("a")
        fcntl.flock(self._lock, fcntl.LOCK_SH)

    @property
    def others(self) -> bool:
        """Whether a process that takes part is still there."""
        with suppress(FileNotFoundError), self._ranks.open("r+") as file:
            return _is_locked(file, fcntl.LOCK_EX)
        return False

    def let_go(self) -> None:
        """Live no more, as far as the other processes see. In a child that was forked, hold nothing of its parent's."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _is_locked(file: IO[str], how: int = fcntl.LOCK_SH) -> bool:
    """Whether another process has a lock that keeps this one from having its own."""
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False
