"""How long the last calls of something took."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

WINDOW = 1024
"""Durations that quantiles are taken over."""


class Timing:
    """Durations of calls: quantiles of the last ones, and the number and sum of all. Safe to use from many threads.

    The stall of a client, that is how long each step is waited for::

        stall = Timing()
        ...
        with stall.measure():
            step = runtime.next_step()
        ...
        ClientStats(stall_p50_ms=stall.p50_ms, stall_p99_ms=stall.p99_ms, ...)

    Args:
        window: how many of the last durations count for the quantiles.
    """

    def __init__(self, window: int = WINDOW) -> None:
        self._lock = threading.Lock()
        self._last_s = np.zeros(window)
        self._count = 0
        self._total_s = 0.0

    def record(self, duration_s: float) -> None:
        """Take note of a call that took so many seconds."""
        with self._lock:
            self._last_s[self._count % len(self._last_s)] = duration_s
            self._count += 1
            self._total_s += duration_s

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Take note of how long a block takes, whether or not it raises."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.record(time.perf_counter() - began)

    @property
    def count(self) -> int:
        """Calls so far."""
        return self._count

    @property
    def total_s(self) -> float:
        """Seconds of all of them together."""
        return self._total_s

    @property
    def p50_ms(self) -> float:
        """Median of the last ones, milliseconds; nan before the first."""
        return self.quantile_ms(0.5)

    @property
    def p99_ms(self) -> float:
        """99th percentile of the last ones, milliseconds; nan before the first."""
        return self.quantile_ms(0.99)

    def quantile_ms(self, q: float) -> float:
        """A quantile of the last ones, milliseconds; nan before the first.

        Args:
            q: between 0 and 1.
        """
        with self._lock:
            last_s = self._last_s[: self._count].copy()
        return float(np.quantile(last_s, q)) * 1e3 if len(last_s) else math.nan
