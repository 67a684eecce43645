"""Threads that end before the interpreter does.

A daemon thread that comes back from native code while the interpreter is torn down is ended by ``pthread_exit`` on the
spot (CPython before 3.14). Where the native code is C++ that does not expect this, and pybind11's and torch's does not,
that aborts the process: "terminate called without an active exception".
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401  has to ask for its place at the exit before this module does, see below
import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import Empty, SimpleQueue
from typing import Any, Final, ParamSpec, TypeVar

__all__ = ["BackgroundPool", "BackgroundThread"]

P = ParamSpec("P")
T = TypeVar("T")

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


class BackgroundPool(Executor):
    """Runs calls in background threads: as ``ThreadPoolExecutor``, but one that hangs does not hold the process up.

    Its threads live until `shutdown`, or until the process ends.

    Args:
        max_threads: Calls that run at once.
        name: Of the threads.
    """

    def __init__(self, max_threads: int, *, name: str) -> None:
        self._max_threads = max_threads
        self._name = name
        self._lock = threading.Lock()
        self._is_shut = False
        self._threads: list[BackgroundThread] = []
        self._num_open = 0  # calls that are not done
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a call when there is a thread for it.

        Raises:
            RuntimeError: The pool is shut down.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._is_shut:
                raise RuntimeError("cannot schedule new futures after shutdown")
            self._calls.put((future, functools.partial(fn, *args, **kwargs)))
            self._num_open += 1
            if len(self._threads) < min(self._num_open, self._max_threads):
                thread = BackgroundThread(self._run, name=self._name, ask_to_end=self._ask_to_end)
                self._threads.append(thread)
                thread.start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls, and end the threads when they have done those there are.

        Args:
            wait: For that, but for no thread longer than `EXIT_WAIT_S`.
            cancel_futures: Do none that has not begun.
        """
        with self._lock:
            self._is_shut = True
            if cancel_futures:
                self._cancel()
            for _ in self._threads:
                self._calls.put(None)
        for thread in self._threads if wait else ():
            thread.join(EXIT_WAIT_S)

    def _ask_to_end(self) -> None:
        self.shutdown(wait=False, cancel_futures=True)

    def _cancel(self) -> None:
        while True:
            try:
                item = self._calls.get_nowait()
            except Empty:
                return
            if item is not None:
                item[0].cancel()

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            self._do(*item)
            del item  # with what it holds on to, while the next is waited for

    def _do(self, future: Future[T], call: Callable[[], T]) -> None:
        if not future.set_running_or_notify_cancel():
            self._note_done()
            return
        try:
            result = call()
        except BaseException as error:
            self._note_done()
            future.set_exception(error)
            del future  # which holds the error, whose frames hold it
        else:
            self._note_done()  # first, so that who waits for it and calls again finds this thread free
            future.set_result(result)

    def _note_done(self) -> None:
        with self._lock:
            self._num_open -= 1


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
