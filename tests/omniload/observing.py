"""Numbers of a job that tests look at."""

from __future__ import annotations

import math
from typing import Any

from omniload.observing.stats import ActorStats, ClientStats, JobStats, SourceStats


def actor(**changes: Any) -> ActorStats:
    values: dict[str, Any] = {
        "name": "web-0",
        "role": "loader",
        "node": "a",
        "pid": 4001,
        "rss_bytes": 410_000_000,
        "restarts": 0,
        "sources": ("web",),
        "shadow": False,
        "queue_bytes": 12_600_000,
        "calls": 1_840,
        "busy_s": 71.25,
        "fetch_p50_ms": 3.5,
        "fetch_p99_ms": 18.25,
        "stale_answers": 0,
    }
    return ActorStats(**values | changes)


def source(**changes: Any) -> SourceStats:
    values: dict[str, Any] = {
        "name": "web",
        "emitted_tokens": 7_012_345,
        "declared_ratio": 0.7,
        "realised_ratio": 0.7,
        "failures": 0,
    }
    return SourceStats(**values | changes)


def client(**changes: Any) -> ClientStats:
    values: dict[str, Any] = {
        "rank": 0,
        "step": 1_233,
        "stall_p50_ms": 0.25,
        "stall_p99_ms": 2.5,
        "fetch_p50_ms": 14.0,
        "queue_steps": 2,
        "queue_bytes": 524_288,
        "tokens_per_s": 40_960.0,
    }
    return ClientStats(**values | changes)


def job(**changes: Any) -> JobStats:
    """A job of four actors, three sources and two ranks, not all of it well."""
    values: dict[str, Any] = {
        "job": "pretrain",
        "at": 1_790_000_000.5,
        "step": 1_232,
        "plan_p50_ms": 6.5,
        "plan_p99_ms": 11.0,
        "imbalance": 1.0375,
        "object_store_bytes": 268_435_456,
        "actors": (
            actor(
                name="planner",
                role="planner",
                pid=4000,
                sources=(),
                fetch_p50_ms=math.nan,
                fetch_p99_ms=math.nan,
            ),
            actor(),
            actor(name="web-shadow", pid=4002, shadow=True, restarts=1, calls=0, busy_s=0.0),
            actor(name="lanes-a", role="constructor", pid=4003, sources=(), fetch_p99_ms=31.0),
        ),
        "sources": (
            source(),
            source(
                name="code", declared_ratio=0.25, realised_ratio=0.2, emitted_tokens=2_003_456, failures=17
            ),
            source(name="maths", declared_ratio=0.05, realised_ratio=0.0525, emitted_tokens=526_000),
        ),
        "clients": (client(), client(rank=1, stall_p99_ms=4.75, queue_steps=0)),
    }
    return JobStats(**values | changes)
