"""Work that leaves the cores to training, but ends all the same."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Self

_LOWEST_PRIORITY: Final = 19


class Yielding:
    """Runs calls on a thread that gets a core when no other thread wants it. Use as a context manager.

    Of several ways to write beside a training that keeps every core busy this one was chosen by measurement. In all it
    costs training much the same time whoever writes, since it is the same work; what differs is how fast, and so how
    much of it each step feels. An ordinary thread takes as much of a core as a thread of training, which all others of
    it then wait for. One that sleeps most of the time does so where cores are idle, too. A process at the same priority
    writes no faster, and needs its staging memory in /dev/shm. SCHED_IDLE is felt less still, but writes at a third of
    the speed, and where there are more ranks than cores a thread may wait for one for a second while it holds the GIL,
    and all of its process with it: at nice 19 that is a fifth of a second at most. Writing, digesting and compressing
    let go of the GIL, so it is held for microseconds. What it does not do well is a training whose steps wait for
    several threads of one process, one per core: a step beside a save may then take up to twice its time.

    A thread keeps a low priority for good, and threads that it starts inherit it. So this one lives no longer than the
    block, and what starts threads that others use afterwards has no business here.

    Args:
        patience_s: After that, calls run in the calling thread, so that busy cores do not hold them up for ever.
        awaited: Once it is set, likewise: who waits for the work does not wait for idle cores.
    """

    def __init__(self, patience_s: float, awaited: threading.Event) -> None:
        self._until = time.monotonic() + patience_s
        self._awaited = awaited
        self._thread = ThreadPoolExecutor(1, "checkpoint-write", initializer=_yield_cores)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._thread.shutdown()

    def run(self, call: Callable[[], None]) -> None:
        """Call and wait for it."""
        if time.monotonic() < self._until and not self._awaited.is_set():
            self._thread.submit(call).result()
        else:
            call()


def _yield_cores() -> None:
    if sys.platform == "linux":  # elsewhere a priority is that of the whole process
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
