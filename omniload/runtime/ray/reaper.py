"""Ends what is left of a local cluster whose rank 0 was killed: Ray's agents, which else stay for a minute.

A process of its own, as nothing of rank 0 is left to do it. It waits for the end of its input, which comes with the end
of the process that started it, however that ends. Needs Linux's /proc; elsewhere nothing is started.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_GRACE_S = 5.0
"""Time for processes to end by themselves, as nearly all do."""


class Reaper:
    """Started by the process that runs a cluster, right after it started it, with `descendants` it did not have before.

    Args:
        processes: to end, as `descendants` names them.
    """

    def __init__(self, processes: Iterable[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, *processes],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def end(self) -> None:
        """The cluster ended as it should."""
        self._process.kill()
        self._process.communicate()

    def forget(self) -> None:
        """In a child that was forked: let the end of its input come with that of the process that runs the cluster."""
        assert self._process.stdin is not None, "it is a pipe"
        self._process.stdin.close()


def descendants() -> set[str]:
    """The processes that this one started, and those that they started: ``pid:time of start``."""
    parents = {pid: (parent, start) for pid, parent, start in _processes()}
    found, size = {os.getpid()}, 0
    while len(found) > size:
        size = len(found)
        found |= {pid for pid, (parent, _) in parents.items() if parent in found}
    return {f"{pid}:{parents[pid][1]}" for pid in found - {os.getpid()}}


def _processes() -> Iterable[tuple[int, int, str]]:
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            yield int(folder.name), int(fields[1]), fields[19]


def reap(processes: Iterable[str]) -> None:
    """Kill processes; the time of start tells them from others that have their number now."""
    time.sleep(_GRACE_S)
    there = {f"{pid}:{start}" for pid, _, start in _processes()}
    for one in there.intersection(processes):
        with suppress(ProcessLookupError):
            os.kill(int(one.partition(":")[0]), signal.SIGKILL)


if __name__ == "__main__":
    sys.stdin.read()
    reap(sys.argv[1:])
