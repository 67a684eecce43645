"""Repeating calls that failed for a reason that passes.

Only calls that may be repeated are, and only after ``Transient``, ``Throttled`` and ``Stalled`` errors. The waits are
"full jitter" exponential back-off (Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015): a
uniformly random part of a bound that doubles, so that callers who failed together do not come back together.

Nothing but the retries is ever slowed down: the first attempt of a call never waits, whatever happened to the calls
before it, so speed is back at once when a server has recovered. What protects a server that is down is a budget that
all retries of a store share.
"""

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from storage.errors import BadRequest, Stalled, StorageError, Throttled, Transient
from storage.parallel import STALL_TIMEOUT_S
from storage.spans import span

__all__ = ["DEFAULT_POLICY", "Attempt", "Budget", "Retrier", "RetryPolicy", "num_retries"]

T = TypeVar("T")

_PASSING: Final = (Stalled, Throttled, Transient)
_LEAST_S: Final = (
    1e-3  # for an attempt that was due right at the deadline: 0 would mean no time-out to fsspec
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """When to repeat a call, and when to give it up.

    What is repeated, and what the times bound, is one request: a whole object up to some MiB, one part of a larger
    one, one range, one page of a listing. A long operation takes as many of them as it needs.

    Attributes:
        max_attempts: Most attempts of a request, the first included; 1 repeats nothing.
        first_delay_s: Bound of the wait before the second attempt; it doubles before each later one.
        max_delay_s: Where the bound stops to double.
        attempt_timeout_s: Longest first attempt, then it is cut off; it doubles for each later one, so that a
            connection that hangs is left soon and one that is slow gets through. Only for ``s3://``: a call of the
            local system or of another driver can't be cut off.
        deadline_s: No attempt begins or (where it can be cut off) lasts longer after the first began. Removing what a
            failed write has stored may take as long again. At most 300.
        burst: Retries that a store may make at once.
        retries_per_s: Retries that it may make for long; those beyond wait, or give up if the wait ends too late.

    Raises:
        BadRequest: A value out of bounds.
    """

    max_attempts: int = 12
    first_delay_s: float = 0.1
    max_delay_s: float = 20.0
    attempt_timeout_s: float = 60.0
    deadline_s: float = 240.0
    burst: int = 32
    retries_per_s: float = 4.0

    def __post_init__(self) -> None:
        """Check the bounds."""
        for name in ("max_attempts", "burst"):
            if getattr(self, name) < 1:
                raise BadRequest(f"RetryPolicy: {name} is {getattr(self, name)}: it must be at least 1")
        for name in ("first_delay_s", "max_delay_s", "attempt_timeout_s", "deadline_s", "retries_per_s"):
            if not getattr(self, name) > 0:
                raise BadRequest(f"RetryPolicy: {name} is {getattr(self, name)}: it must be above 0")
        if self.deadline_s > STALL_TIMEOUT_S:
            raise BadRequest(
                f"RetryPolicy: deadline_s is {self.deadline_s}: it must be at most {STALL_TIMEOUT_S:g}, after which "
                "the parts of a parallel operation count as stalled"
            )

    def max_wait_s(self, number: int) -> float:
        """Bound of the random wait after attempt ``number`` (from 1) failed."""
        return min(self.max_delay_s, self.first_delay_s * 2.0 ** (number - 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One attempt of a call.

    Attributes:
        number: From 1. Later ones may find that an earlier one was done after all and only its answer got lost.
        timeout_s: When to cut it off.
    """

    number: int
    timeout_s: float

    @property
    def repeated(self) -> bool:
        """Whether there was one before."""
        return self.number > 1


DEFAULT_POLICY: Final = RetryPolicy()
"""For most: an outage of half a minute passes unnoticed, and an endpoint that never answers is given up after that."""


class Budget:
    """A token bucket: ``burst`` at once, ``per_s`` for long.

    Args:
        burst: Size of the bucket, which is full at first.
        per_s: Tokens that come back each second.
        now: Clock, seconds.
    """

    def __init__(self, burst: int, per_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._lock = threading.Lock()
        self._burst = burst
        self._per_s = per_s
        self._now = now
        self._tokens = float(burst)
        self._seen_s = now()

    def reserve(self, longest_wait_s: float) -> float | None:
        """Take a token, perhaps one that is yet to come.

        Returns:
            Seconds until it is there, or None (and nothing is taken) if that is longer than ``longest_wait_s``.
        """
        with self._lock:
            now_s = self._now()
            self._tokens = min(self._burst, self._tokens + (now_s - self._seen_s) * self._per_s)
            self._seen_s = now_s
            wait_s = max(0.0, (1.0 - self._tokens) / self._per_s)
            if wait_s > longest_wait_s:
                return None
            self._tokens -= 1.0
            return wait_s


class Retrier:
    """Calls under one policy, sharing one budget. Safe to use from many threads.

    Args:
        policy: When to repeat.
        now: Clock, seconds.
        sleep: How to wait, given seconds.
        uniform: A random number between two.
    """

    def __init__(
        self,
        policy: RetryPolicy,
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._policy = policy
        self._now = now
        self._sleep = sleep
        self._uniform = uniform
        # Made once: most calls need no other, and small local reads would feel it.
        self._first = Attempt(number=1, timeout_s=min(policy.attempt_timeout_s, policy.deadline_s))
        self._budget = Budget(policy.burst, policy.retries_per_s, now)

    def __reduce__(self) -> "tuple[type[Retrier], tuple[RetryPolicy]]":
        return type(self), (self._policy,)  # each process has a budget of its own

    def call(
        self,
        attempt: Callable[[Attempt], T],
        path: str,
        classify: Callable[[BaseException, str], StorageError | None],
    ) -> T:
        """Do something that may be done again.

        Args:
            attempt: Does it once, and raises whatever its driver raises. A ``StorageError`` of its own is a verdict
                and passes as it is.
            path: Full path or URL of the object, for messages.
            classify: Reads the driver's errors.

        Raises:
            Stalled: The last attempt was cut off.
            StorageError: The last error, classified, saying how often it was tried; its cause is the driver's.
        """
        began_s = attempt_began_s = self._now()
        this = self._first
        while True:
            try:
                return attempt(this)
            except Exception as error:
                classified = classify(error, path)
                if classified is None or classified is error:
                    raise
                if isinstance(error, TimeoutError) and self._now() - attempt_began_s > 0.9 * this.timeout_s:
                    classified = Stalled(path, f"not done within {this.timeout_s:.3g} s")
                wait_s = self._wait_s(classified, this.number, began_s + self._policy.deadline_s)
                if wait_s is None:
                    try:
                        raise _last(classified, this.number, self._now() - began_s) from error
                    finally:
                        del classified
                kind = type(classified).__name__
            _count.number = num_retries() + 1
            with span("storage.backoff", path=path, attempt=this.number, cause=kind):
                self._sleep(wait_s)
            attempt_began_s = self._now()
            left_s = max(began_s + self._policy.deadline_s - attempt_began_s, _LEAST_S)
            this = Attempt(number=this.number + 1, timeout_s=min(2 * this.timeout_s, left_s))

    def _wait_s(self, error: StorageError, number: int, deadline_s: float) -> float | None:
        """How long to wait after attempt ``number`` failed, or None to give up."""
        if number >= self._policy.max_attempts or not isinstance(error, _PASSING):
            return None
        left_s = deadline_s - self._now()
        wait_s = self._uniform(0.0, self._policy.max_wait_s(number))
        if wait_s >= left_s:
            return None
        budget_s = self._budget.reserve(left_s)
        return None if budget_s is None else max(wait_s, budget_s)


class _Count(threading.local):
    number = 0


_count = _Count()


def num_retries() -> int:
    """Retries that this thread has made in its life; the difference of two readings is what an operation took."""
    return _count.number


def _last(error: StorageError, number: int, spent_s: float) -> StorageError:
    if number == 1:
        return error
    remedy = ": check that the server is up and its address right" if isinstance(error, Transient) else ""
    return type(error)(error.path, f"{error.reason} (tried {number} times in {spent_s:.1f} s){remedy}")
