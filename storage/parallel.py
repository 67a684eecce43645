"""Many blocking calls at once, on threads that the process shares.

Leaf calls only: nothing that runs here may itself wait for these threads.
"""

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Final

from storage.background import BackgroundPool
from storage.errors import Stalled

__all__ = ["NUM_THREADS", "STALL_TIMEOUT_S", "Group", "run_all"]

NUM_THREADS: Final = 32
"""Threads of the process that move bytes. They wait most of the time; enough to hide tens of ms of latency."""

STALL_TIMEOUT_S: Final = 300.0
"""Longest wait for any part of an operation to finish. A part is a few MiB or a few remote requests."""

_lock = threading.Lock()
_pool: BackgroundPool | None = None


class Group:
    """Calls of one operation, started one by one and awaited together. Used by one thread.

    Args:
        what: Path or URL the operation is about, named when it stalls.
        max_pending: Most calls started and not done; ``start`` waits beyond it. None: no bound.
        timeout_s: Longest wait for any one call to finish.
    """

    def __init__(
        self, what: str, *, max_pending: int | None = None, timeout_s: float = STALL_TIMEOUT_S
    ) -> None:
        self._what = what
        self._max_pending = max_pending
        self._timeout_s = timeout_s
        self._pending: set[Future[None]] = set()
        # A queue of the finished costs O(1) a call; concurrent.futures.wait would look at all of them each time.
        self._done: SimpleQueue[Future[None]] = SimpleQueue()

    def start(self, call: Callable[[], None]) -> None:
        """Start a call, after waiting for room.

        Raises:
            Stalled: No room within the time-out.
            Exception: The error of a call that failed meanwhile.
        """
        while self._max_pending is not None and len(self._pending) >= self._max_pending:
            self._await_one()
        future = _submit(call)
        self._pending.add(future)
        future.add_done_callback(self._done.put)

    def finish(self) -> None:
        """Wait for all calls.

        Raises:
            Stalled: None of them finished for the time-out.
            Exception: The first error of a call; the others go on.
        """
        while self._pending:
            self._await_one()

    def cancel(self) -> None:
        """Start nothing more and wait until what runs has finished, whatever its outcome.

        When this returns, no call touches the caller's buffers any more, unless one is stuck beyond the time-out.
        """
        for future in list(self._pending):
            future.cancel()
        while self._pending:
            try:
                self._pending.discard(self._done.get(timeout=self._timeout_s))
            except Empty:
                return

    def _await_one(self) -> None:
        try:
            future = self._done.get(timeout=self._timeout_s)
        except Empty:
            raise Stalled(
                self._what, f"none of {len(self._pending)} parts finished within {self._timeout_s:g} s"
            ) from None
        self._pending.discard(future)
        try:
            future.result()
        finally:
            del future


def run_all(calls: Iterable[Callable[[], None]], what: str, *, timeout_s: float = STALL_TIMEOUT_S) -> None:
    """Run independent calls in parallel and return when all are done.

    After an error nothing new is started, and what is running has finished before the error is raised.

    Raises:
        Stalled: No call finished for ``timeout_s``. Only then may calls still be running.
        Exception: The first error of a call.
    """
    group = Group(what, timeout_s=timeout_s)
    try:
        for call in calls:
            group.start(call)
        group.finish()
    except BaseException:
        group.cancel()
        raise


def _submit(call: Callable[[], None]) -> "Future[None]":
    global _pool
    with _lock:
        if _pool is None:
            _pool = BackgroundPool(NUM_THREADS, name="storage")
        return _pool.submit(call)


def _forget_pool() -> None:
    # A forked child has the pool object but none of its threads.
    global _lock, _pool
    _lock = threading.Lock()
    _pool = None


os.register_at_fork(after_in_child=_forget_pool)
