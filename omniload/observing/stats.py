"""The numbers of a running job at one moment.

A float that nothing is known of yet, like the median of no calls, is nan. In JSON that is null; it is shown as a dash,
and not exported.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import BeforeValidator, TypeAdapter

Role: TypeAlias = Literal["loader", "planner", "constructor"]


SLOW_S: Final = 1.0
"""A step that a rank waits for longer is worth an event."""


def _nan_if_null(value: object) -> object:
    return math.nan if value is None else value


_Number: TypeAlias = Annotated[float, BeforeValidator(_nan_if_null)]


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorStats:
    """One actor. Its counts begin anew when it restarts, `restarts` excepted."""

    name: str
    """No other actor of the job has it."""
    role: Role
    """What it does."""
    node: str
    """Machine that it runs on."""
    pid: int
    """Its process there."""
    rss_bytes: int
    """Resident memory of that process; what it shares with others counts fully."""
    restarts: int
    """How often it was started again after a failure."""
    sources: tuple[str, ...]
    """Sources that a loader reads; empty for other roles."""
    shadow: bool
    """Whether it only stands by for another."""
    queue_bytes: int
    """Prepared payload that waits to be fetched. Near 0 at a loader: it is the bottleneck."""
    calls: int
    """Requests answered."""
    busy_s: float
    """Seconds spent on answering. Growing as fast as time: the actor is the bottleneck."""
    fetch_p50_ms: _Number
    """Median time that it waited for what it fetches: a loader for its store, a constructor for payload."""
    fetch_p99_ms: _Number
    """99th percentile of the same."""
    stale_answers: int
    """Answers refused because their lease had moved. Growing: a loader is slow and was given up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceStats:
    """One source."""

    name: str
    """As in the mixture."""
    emitted_tokens: int
    """Tokens handed out, since the stream began."""
    declared_ratio: _Number
    """Share of the stream so far that the mixture gives it, in the mixture's unit; of weights that change, the mean."""
    realised_ratio: _Number
    """Share of the stream so far that it had."""
    failures: int
    """Rows quarantined."""

    @property
    def drift(self) -> float:
        """How far the realised ratio is from the declared one, relative to that; nan if there is no telling."""
        if self.declared_ratio:
            return self.realised_ratio / self.declared_ratio - 1
        return math.inf if self.realised_ratio > 0 else math.nan


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientStats:
    """One rank of the trainer."""

    rank: int
    """Global rank."""
    step: int
    """Step that it trains on."""
    stall_p50_ms: _Number
    """Median time that a step was waited for. Near 0: the loader keeps up. Near the duration of a step: it does not."""
    stall_p99_ms: _Number
    """99th percentile of the same."""
    fetch_p50_ms: _Number
    """Median time from asking for a step to having it, most of which training should hide."""
    queue_steps: int
    """Steps held ready. 0 all the time: the loader is the bottleneck."""
    queue_bytes: int
    """Bytes of these."""
    tokens_per_s: _Number
    """Tokens yielded to this rank; ranks that share lanes each count them."""
    slow_step: int = -1
    """Last step that was waited for longer than `SLOW_S`, first ones after a start left out; -1 if none was."""
    slow_s: float = 0.0
    """How long, seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobStats:
    """One job."""

    job: str
    """Its name."""
    at: float
    """Unix time of the numbers, seconds."""
    step: int
    """Last step that every rank was given."""
    plan_p50_ms: _Number
    """Median time to plan a step. It has to stay below the duration of a step."""
    plan_p99_ms: _Number
    """99th percentile of the same."""
    imbalance: _Number
    """Cost of the costliest rank over the mean, for the last step. 1 is even; 1.2 wastes a sixth of the ranks' time."""
    actors: tuple[ActorStats, ...]
    """Its actors."""
    sources: tuple[SourceStats, ...]
    """Sources of its mixture."""
    clients: tuple[ClientStats, ...]
    """Its ranks."""
    object_store_bytes: int
    """Shared memory that payload on its way takes, over all nodes."""


_ADAPTER: Final = TypeAdapter(JobStats)


def to_json(stats: JobStats) -> dict[str, Any]:
    """The numbers as JSON holds them."""
    plain: dict[str, Any] = json.loads(_ADAPTER.dump_json(stats))
    return plain


def from_json(values: Mapping[str, Any]) -> JobStats:
    """The numbers that `to_json` made plain. Keys that are not known are passed over.

    Raises:
        ValueError: a key is missing, or its value of another kind.
    """
    return _ADAPTER.validate_python(values)
