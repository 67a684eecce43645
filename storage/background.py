"""Threads that end before the interpreter does.

A daemon thread that comes back from native code while the interpreter is torn down is ended by ``pthread_exit`` on the
spot (CPython before 3.14). Where the native code is C++ that does not expect this, and pybind11's and torch's does not,
that aborts the process: "terminate called without an active exception".
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401  has to ask for its place at the exit before this module does, see below
import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import Final

__all__ = ["BackgroundThread"]

EXIT_WAIT_S: Final = 10.0
"""Longest wait for a thread when the process ends. What takes longer probably hangs, and must not hold the process."""

_logger = logging.getLogger("storage")
_started: weakref.WeakSet[BackgroundThread] = weakref.WeakSet()


class BackgroundThread(threading.Thread):
    """A daemon thread that is asked to end, and awaited within bounds, before the interpreter is torn down.

    Args:
        run: What it does.
        name: Of the thread.
        ask_to_end: Called when the process ends and the thread still runs; neither waits nor raises. None for a thread
            that ends soon by itself.
        exit_wait_s: Longest wait for it then, seconds.
    """

    def __init__(
        self,
        run: Callable[[], None],
        *,
        name: str,
        ask_to_end: Callable[[], None] | None = None,
        exit_wait_s: float = EXIT_WAIT_S,
    ) -> None:
        super().__init__(target=run, name=name, daemon=True)
        self.ask_to_end = ask_to_end
        self.exit_wait_s = exit_wait_s
        _started.add(self)

    def run(self) -> None:
        """Do it."""
        try:
            super().run()
        finally:
            self.ask_to_end = None  # and let go of what it belongs to


def _end_all() -> None:
    threads = [thread for thread in list(_started) if thread.is_alive()]
    began = time.monotonic()
    for thread in threads:
        if (ask_to_end := thread.ask_to_end) is not None:
            ask_to_end()
    for thread in threads:
        thread.join(max(0.0, began + thread.exit_wait_s - time.monotonic()))
    if late := ", ".join(thread.name for thread in threads if thread.is_alive()):
        _logger.warning("the process ends while these threads still run: %s", late)


# Not atexit: its handlers run when executors refuse work already, and have been awaited without bounds. These run
# before that, the last registered first.
threading._register_atexit(_end_all)  # type: ignore[attr-defined]
