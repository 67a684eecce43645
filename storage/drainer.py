"""Draining trees in the background."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from queue import SimpleQueue
from types import TracebackType
from typing import Final, Self

from storage.background import BackgroundThread
from storage.errors import BadRequest, Stalled
from storage.tiers import Tiers
from storage.tree_copy import Stopped

__all__ = ["Drainer"]

CLOSE_TIMEOUT_S: Final = 60.0
"""Longest wait of ``close`` for the part of a file that is on its way."""


class Drainer:
    """A thread that drains one tree after another, in the order in which they were given.

    Nothing is lost with it: what is committed at local stays so until it is committed elsewhere, and ``resume`` finds
    it again in a new process. Failures are kept in the futures and raised by ``wait``; they do not stop what follows.

    Args:
        tiers: Whose trees.
    """

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._unseen: dict[str, Future[None]] = {}
        # A process that ends without close() does not wait for gigabytes either.
        self._thread = BackgroundThread(self._run, name="drainer", ask_to_end=self._ask_to_end)
        self._thread.start()

    def __repr__(self) -> str:
        return f"Drainer({self._tiers!r}, unseen={len(self._unseen)})"

    def submit(self, name: str, *, before_commit: Callable[[], None] = lambda: None) -> Future[None]:
        """Drain a tree that is committed at local, after those submitted before; see ``Tiers.drain``.

        Returns:
            A future that is done once the tree is committed at remote. One for a tree that is waiting already is
            that of the first call.

        Raises:
            BadRequest: The drainer is closed.
        """
        with self._lock:
            if self._stopping.is_set():
                raise BadRequest(f"{self!r} is closed: make a new one")
            known = self._unseen.get(name)
            if known is not None and not known.done():
                return known
            future: Future[None] = Future()
            self._unseen[name] = future
        self._queue.put(lambda: self._drain(name, before_commit, future))
        return future

    def resume(self) -> list[str]:
        """Submit everything that is committed at local only, as an earlier process may have left it.

        Returns:
            The names.
        """
        names = self._tiers.undrained()
        for name in names:
            self.submit(name)
        return names

    def wait(self, timeout_s: float) -> None:
        """Wait until all that was submitted is drained.

        Args:
            timeout_s: Longest wait, seconds.

        Raises:
            Stalled: It is not done in time; names the trees, which go on being drained.
            ExceptionGroup: Some failed; a note on each error names the tree. Raised once for each.
        """
        deadline = time.monotonic() + timeout_s
        failed: list[Exception] = []
        with self._lock:
            waiting = dict(self._unseen)
        for name, future in waiting.items():
            try:
                error = future.exception(max(0.0, deadline - time.monotonic()))
            except CancelledError:  # by the caller, who knows
                error = None
            except TimeoutError:
                names = ", ".join(one for one, other in waiting.items() if not other.done())
                raise Stalled(self._tiers.local.url, f"not drained within {timeout_s:g} s: {names}") from None
            with self._lock:
                if self._unseen.get(name) is future:
                    del self._unseen[name]
            if error is not None:
                assert isinstance(error, Exception)
                error.add_note(f"while draining {name}")
                failed.append(error)
        if failed:
            raise ExceptionGroup(f"{len(failed)} of {len(waiting)} trees were not drained", failed)

    def close(self) -> None:
        """Stop after the part of a file that is on its way. What is not drained stays committed at local.

        Raises:
            Stalled: That part does not end in time; the thread may still be running.
        """
        with self._lock:
            self._ask_to_end()
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            raise Stalled(self._tiers.local.url, f"the drain under way did not stop in {CLOSE_TIMEOUT_S:g} s")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask_to_end(self) -> None:
        self._stopping.set()
        self._queue.put(None)

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            job()

    def _drain(self, name: str, before_commit: Callable[[], None], future: "Future[None]") -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            if self._stopping.is_set():
                raise Stopped(f"{name}: the drainer was closed before its turn")
            self._tiers.drain(name, before_commit=before_commit, stopping=self._stopping.is_set)
        except BaseException as error:
            future.set_exception(error)
            return
        with self._lock:
            if self._unseen.get(name) is future:
                del self._unseen[name]
        future.set_result(None)
