"""Calls between actors: errors come back as values, and who is lost is asked again until it is back."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from omniload.errors import LoaderTimeout, OmniloadError, kind_and_message
from omniload.runtime.feed import LoaderLost

_FIRST_RETRY_S, _LAST_RETRY_S = 0.05, 1.0


class Retries:
    """The time that there is for a call that is made again and again, and the pauses in between.

    Args:
        timeout_s: for all of it.
    """

    def __init__(self, timeout_s: float) -> None:
        self.deadline = time.monotonic() + timeout_s
        """When it is over, on the clock of `time.monotonic`."""
        self._next_s = _FIRST_RETRY_S

    @property
    def left_s(self) -> float:
        """What is left of it, and at least a moment."""
        return max(0.001, self.deadline - time.monotonic())

    def pause_s(self) -> float | None:
        """How long to wait before the next call, each time twice as long; None if there is no time for one."""
        if time.monotonic() + self._next_s > self.deadline:
            return None
        now_s, self._next_s = self._next_s, min(2 * self._next_s, _LAST_RETRY_S)
        return now_s


@dataclass(frozen=True, slots=True)
class Raised:
    """An error that ended a call; as a value it arrives as it was, and not wrapped into one of Ray's."""

    error: BaseException
    """The error."""


def answer(call: Callable[[], Any]) -> Any:
    """The result of a call, or `Raised`."""
    try:
        return call()
    except Exception as error:
        return Raised(told(error))


def told(error: BaseException) -> BaseException:
    """An error that can travel: foreign ones may hold what cannot, so what they say goes in a plain one."""
    if type(error).__module__.split(".")[0] not in ("builtins", "omniload", "storage"):
        return RuntimeError(kind_and_message(error))
    error.__traceback__ = error.__cause__ = error.__context__ = None
    return error


def result(ref: Any, timeout_s: float, who: str) -> Any:
    """What a call came to.

    Raises:
        LoaderLost: the actor died, or did not answer in time.
    """
    try:
        value = ray.get(ref, timeout=timeout_s)
    except GetTimeoutError:
        raise LoaderLost(f"{who} did not answer in time") from None
    except RayActorError as error:
        if getattr(error, "actor_init_failed", False):
            raise OmniloadError(f"{who} cannot start: {' '.join(str(error).split())}") from None
        raise LoaderLost(f"{who} is not running") from None
    except RayError as error:  # its result is lost with the node that held it, say
        raise LoaderLost(f"{who}: {kind_and_message(error)}") from None
    if isinstance(value, Raised):
        raise value.error
    return value


def ask(
    call: Callable[[], Any], timeout_s: float, who: str, what: str, mend: Callable[[], None] | None = None
) -> Any:
    """Call an actor, again and again while it is being made anew.

    Args:
        call: makes the call and returns Ray's reference to its result.
        timeout_s: limit of it all.
        who: the actor, for messages.
        what: what is wanted of it, for messages.
        mend: makes what is gone for good.

    Raises:
        LoaderTimeout: it did not come back in time.
    """
    retries = Retries(timeout_s)
    while True:
        try:
            return result(call(), retries.left_s, who)
        except LoaderLost as lost:
            pause_s = retries.pause_s()
            if pause_s is None:
                raise LoaderTimeout(
                    f"{what}: not there within {timeout_s:g} s ({lost}); raise timeout_s?"
                ) from None
        if mend is not None:
            mend()
        time.sleep(pause_s)
