"""What an actor says of itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray

from omniload.observing.stats import ActorStats, Role
from omniload.observing.timing import Timing

_STATM = Path("/proc/self/statm")


class Meter:
    """Counts the calls that an actor answers, and the time that takes.

    Args:
        name: of the actor.
        role: what it does.
        sources: that it reads.
        shadow: whether it only stands by.
    """

    def __init__(self, name: str, role: Role, sources: tuple[str, ...] = (), *, shadow: bool = False) -> None:
        self._name = name
        self._role: Role = role
        self._sources = sources
        self._shadow = shadow
        self._answers = Timing()
        self.fetches = Timing()
        """How long it waited for what it fetches."""

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Around the answer to a call."""
        with self._answers.measure():
            yield

    def stats(self, *, queue_bytes: int = 0, stale_answers: int = 0) -> ActorStats:
        """The numbers now; restarts are counted by who outlives the actor."""
        return ActorStats(
            name=self._name,
            role=self._role,
            node=ray.get_runtime_context().get_node_id(),
            pid=os.getpid(),
            rss_bytes=_rss_bytes(),
            restarts=0,
            sources=self._sources,
            shadow=self._shadow,
            queue_bytes=queue_bytes,
            calls=self._answers.count,
            busy_s=self._answers.total_s,
            fetch_p50_ms=self.fetches.p50_ms,
            fetch_p99_ms=self.fetches.p99_ms,
            stale_answers=stale_answers,
        )


def _rss_bytes() -> int:
    """Resident memory of this process; 0 where there is no telling."""
    if not _STATM.exists():
        return 0
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
