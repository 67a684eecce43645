"""A thread that writes behind: one job after another, and none after one that failed."""

from __future__ import annotations

import copy
import queue
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from omniload.errors import LoaderStopped, LoaderTimeout, StateError
from storage.background import BackgroundThread

T = TypeVar("T")


class WriteBehind:
    """Does jobs in the order given. Any thread may give them.

    A job that fails is the last one, as what comes after it may rely on it; whoever comes later gets its error. Only a
    `StateError` stops nothing: it is an answer.

    Args:
        what: is written, for messages.
        depth: jobs that may wait; who has one more waits itself.
        timeout_s: limit of every wait.
    """

    def __init__(self, what: str, *, depth: int, timeout_s: float) -> None:
        self._what = what
        self._timeout_s = timeout_s
        self._jobs: queue.Queue[tuple[Callable[[], Any], Future[Any]] | None] = queue.Queue(depth)
        self._closed = LoaderStopped(f"{what} is closed; open it again")
        self._failure: BaseException | None = None
        # A process that ends without close() does not wait for ever for a store that does not answer.
        self._thread = BackgroundThread(self._run, name="omniload-plan-log", ask_to_end=self._ask_to_end)
        self._thread.start()

    def check(self) -> None:
        """Raises what stopped it, if anything did."""
        if self._failure is not None:
            raise copy.copy(self._failure) from self._failure

    def put(self, job: Callable[[], object]) -> None:
        """Let a job be done some time.

        Raises:
            LoaderTimeout: too many are waiting, and none was done in time.
        """
        self._put(job, Future())

    def call(self, job: Callable[[], T]) -> T:
        """Let a job be done, after those given before, and wait for it.

        Raises:
            LoaderTimeout: it was not done in time. Whether it will be is unknown, so nothing is done after it.
        """
        future: Future[T] = Future()
        self._put(job, future)
        try:
            return future.result(self._timeout_s)
        except TimeoutError:
            if future.done():
                return future.result()  # done just now, or the time-out is its own
            self._failure = LoaderTimeout(
                f"{self._what}: not written within {self._timeout_s:g} s; open it again, or raise timeout_s if the"
                " storage is that slow"
            )
            raise self._failure from None

    def close(self) -> None:
        """Do what is waiting and end the thread. Whoever comes later gets `LoaderStopped`, or what stopped it before.

        Raises what stopped it before, if anything did, and `LoaderTimeout` if it did not end in time.
        """
        try:
            self._jobs.put(None, timeout=self._timeout_s)
            self._thread.join(self._timeout_s)
        except queue.Full:
            pass
        if self._thread.is_alive():
            raise LoaderTimeout(
                f"{self._what}: the thread that writes it did not end within {self._timeout_s:g} s"
            )
        if self._failure is not self._closed:
            self.check()

    def _put(self, job: Callable[[], object], future: Future[Any]) -> None:
        self.check()
        try:
            self._jobs.put((job, future), timeout=self._timeout_s)
        except queue.Full:
            self.check()
            raise LoaderTimeout(
                f"{self._what}: {self._jobs.maxsize} writes are waiting and none was done within {self._timeout_s:g} s;"
                " is its storage up?"
            ) from None
        self.check()  # what was put after the thread had ended is not done

    def _ask_to_end(self) -> None:
        with suppress(queue.Full):  # it is behind anyway
            self._jobs.put_nowait(None)

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            self._do(*item)
        if self._failure is None:
            self._failure = self._closed
        while not self._jobs.empty():  # given while it was being closed
            if (item := self._jobs.get()) is not None:
                self._do(*item)

    def _do(self, job: Callable[[], object], future: Future[Any]) -> None:
        try:
            self.check()
            future.set_result(job())
        except BaseException as error:
            if self._failure is None and not isinstance(error, StateError):
                self._failure = error
            future.set_exception(error)
