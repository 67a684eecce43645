"""What ``save`` and ``async_save`` give back."""

from __future__ import annotations

import threading
from concurrent.futures import Future, wait
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveReport:
    """A committed checkpoint.

    Attributes:
        url: Where it is.
        step: Step number, if one was given.
        attempt: Id of the attempt that was committed.
        num_tensors: Global tensors in it.
        num_bytes: Bytes of tensor data in it, over all ranks.
    """

    url: str
    step: int | None
    attempt: str
    num_tensors: int
    num_bytes: int


class SaveHandle:
    """An asynchronous save; the state may change as soon as the caller has this.

    Made by ``async_save``. A failure that nobody asked for here is raised by the next save on all ranks.

    Attributes:
        awaited: Set once somebody waits for the save, which from then on leaves the cores to nobody.
    """

    def __init__(self, url: str) -> None:
        self.awaited = threading.Event()
        self._url = url
        self._future: Future[SaveReport] = Future()
        self._seen = False

    def __repr__(self) -> str:
        state = "running" if not self.done() else "failed" if self.failure() else "committed"
        return f"SaveHandle({self._url!r}, {state})"

    @property
    def url(self) -> str:
        """Where the checkpoint goes."""
        return self._url

    def done(self) -> bool:
        """Whether it is committed or has failed; does not wait."""
        return self._future.done()

    def failure(self) -> BaseException | None:
        """Why it failed; None while it runs and when it is committed."""
        return self._future.exception() if self._future.done() else None

    def result(self, timeout: float | None = None) -> SaveReport:
        """Wait until the checkpoint is committed.

        Args:
            timeout: Longest wait in seconds; None waits as long as the save's own time-outs allow.

        Raises:
            TimeoutError: Not done in time; it goes on.
            Exception: Why the save failed, equal on all ranks.
        """
        self.awaited.set()
        try:
            error = self._future.exception(timeout)
        except TimeoutError:
            raise TimeoutError(f"{self._url}: the checkpoint is not committed after {timeout:g} s") from None
        if error is not None:
            self._seen = True
            try:
                raise error
            finally:
                del error, self  # as Future.result() does: the error is kept here, and leads to this frame
        return self._future.result()

    def wait(self, timeout: float | None) -> bool:
        """Wait until it is done, whatever the outcome; whether it is."""
        self.awaited.set()
        return bool(wait([self._future], timeout).done)

    @property
    def unseen_failure(self) -> BaseException | None:
        """The failure, if there is one that :meth:`result` has not raised yet."""
        return None if self._seen else self.failure()

    def mark_seen(self) -> None:
        """Note that the failure was raised elsewhere."""
        self._seen = True

    def resolve(self, outcome: SaveReport | BaseException) -> None:
        """Set the outcome; called once, by whoever does the save."""
        if isinstance(outcome, SaveReport):
            self._future.set_result(outcome)
        else:
            self._future.set_exception(outcome)
