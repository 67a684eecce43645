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

FIRST_RETRY_S, LAST_RETRY_S = 0.05, 1.0


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
    deadline = time.monotonic() + timeout_s
    pause_s = FIRST_RETRY_S
    while True:
        try:
            return result(call(), max(0.001, deadline - time.monotonic()), who)
        except LoaderLost as lost:
            if time.monotonic() + pause_s > deadline:
                raise LoaderTimeout(
                    f"{what}: not there within {timeout_s:g} s ({lost}); raise timeout_s?"
                ) from None
        if mend is not None:
            mend()
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LAST_RETRY_S)
