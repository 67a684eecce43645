"""Mixture-driven scaling: how many readers each source has, as the mixture and what is taken of it change.

The demand on a source is what the trainer takes of the stream, times the larger of two shares: the largest scheduled in
the steps to come, so that readers are there before a shift; and that of the tokens served lately, which caps, long
samples and exhausted sources may drive away from the schedule. What its readers would be busy for, ``demand / (readers
· rate)``, is a part of their time::

    busy    0 ──── one reader goes ────┬──── dead band ────┬──── more readers ────► 1
                                  low, without it         high

A source that keeps the trainer waiting though it is in the band is slower than its profile says; then it gets one
more, and is reckoned by what it gave. A shared actor whose workers are busy above the band loses its busiest sources
to actors of their own, and whatever changes is by itself from then on. After a change, readers are busy for 0.8 of
their time, inside the band on both sides, so that the same demand changes nothing again.

Decisions are a pure function of the start and of what was observed: `replay` finds them again from a log. They say who
reads a window, and nothing about the order.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any, Self

from omniload.scaling.actors import ActorSpec, Budget, resized
from omniload.scaling.layout import UTILISATION
from omniload.scaling.observation import Observation, Reason, ScalingDecision, ScalingInputs
from omniload.scaling.partition import Partition
from omniload.scaling.policy import ScalingPolicy
from omniload.scaling.profile import SourceProfile

_LEAST_AT_WORK = 0.1
"""The trainer is taken to work for this part of its time at least, so that one stall is no reason for ever so many."""
_SLOWEST = 0.25
"""Of its profiled rate: below that it is not for want of readers that a source lags."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalerStart:
    """What a scaler starts from: with the observations, all that its decisions depend on."""

    profiles: tuple[SourceProfile, ...]
    """Of all sources."""
    shares: Mapping[str, float]
    """Those that the partition was made for."""
    partition: Partition
    """The actors there are."""
    budget: Budget
    """What all actors may take together."""
    policy: ScalingPolicy = field(default_factory=ScalingPolicy)
    """When anything changes."""

    def to_json(self) -> dict[str, Any]:
        """JSON-serialisable form."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Inverse of `to_json`."""
        return cls(
            profiles=tuple(map(SourceProfile.from_json, values["profiles"])),
            shares=values["shares"],
            partition=Partition.from_json(values["partition"]),
            budget=Budget(**values["budget"]),
            policy=ScalingPolicy(**values["policy"]),
        )


@dataclass(kw_only=True, slots=True)
class _Source:
    """What is known of a source by now."""

    profile: SourceProfile
    readers: int
    rate: float
    """Tokens per second of one reader, at work all the time."""
    ahead: float
    """Share scheduled when its readers were last chosen."""
    changed_at: int | None = None
    """Step of the last change."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Wish:
    """Another number of readers, if the budget has them."""

    source: str
    readers: int
    reason: Reason
    rate: float
    """What one of them gives, by what is known now."""


class Scaler:
    """Decides on the number of readers of each source. One per job; not thread-safe.

    Args:
        start: what it starts from.
    """

    def __init__(self, start: ScalerStart) -> None:
        self._start = start
        self._policy = start.policy
        self._actors = start.partition.actors
        readers = start.partition.num_actors()
        self._sources = {
            profile.name: _Source(
                profile=profile,
                readers=readers[profile.name],
                rate=profile.tokens_per_s,
                ahead=start.shares[profile.name],
            )
            for profile in sorted(start.profiles, key=lambda profile: profile.name)
        }
        self._recent: deque[tuple[int, Observation]] = deque(maxlen=start.policy.window)
        self._held_back: dict[str, int] = {}
        self._changed_at = -1  # step of the last decision about any source

    @property
    def actors(self) -> tuple[ActorSpec, ...]:
        """The actors after the decisions made so far."""
        return self._actors

    @property
    def held_back(self) -> Mapping[str, int]:
        """Actors that sources lacked at the last observation because the budget has no more, by name."""
        return self._held_back

    def observe(self, step: int, observation: Observation) -> tuple[ScalingDecision, ...]:
        """Take note of the steps since the last observation, and decide; readers that go come first.

        Args:
            step: the next step to plan, after that of the last observation.
            observation: what happened.
        """
        assert not self._recent or step > self._recent[-1][0], "observations are of one step after the other"
        assert observation.sources.keys() == self._sources.keys()
        assert observation.seconds > 0
        self._recent.append((step, observation))
        inputs = self._inputs(observation)
        wishes = [wish for name in inputs if (wish := self._wish(step, name, inputs[name])) is not None]
        # One that lags may keep others waiting, so the worst is helped first, and then it is seen what is left.
        lagging = sorted(
            (wish for wish in wishes if wish.reason == "lag"),
            key=lambda wish: (-inputs[wish.source].waited, wish.source),
        )
        wishes = [wish for wish in wishes if wish not in lagging[1:]]
        wishes += self._crowded({wish.source for wish in wishes}, inputs)
        self._held_back = {}
        decisions = (self._grant(step, wish, inputs) for wish in sorted(wishes, key=self._rank(inputs)))
        return tuple(decision for decision in decisions if decision is not None)

    @property
    def _settled(self) -> bool:
        return len(self._recent) == self._policy.window

    def _inputs(self, observation: Observation) -> dict[str, ScalingInputs]:
        """What decisions go by, of each source."""
        recent = [one for _, one in self._recent]
        as_it_is = self._changed_at < self._recent[0][0]  # else some were waited for before the last change
        stream, total, seconds = self._start.partition.demand_tokens_per_s, 0, 1.0
        if self._settled:
            # A pause of the trainer is not slack: one slow observation does not move the median.
            stream = median(_tokens_per_s_at_work(one) for one in recent)
            total = sum(load.tokens for one in recent for load in one.sources.values())
            seconds = sum(one.seconds for one in recent)
        inputs = {}
        for name, source in self._sources.items():
            waited = 0.0
            if self._settled and as_it_is:
                waited = sum(min(one.sources[name].waited_s, one.stalled_s) for one in recent)
            inputs[name] = ScalingInputs(
                stream_tokens_per_s=stream,
                ahead=observation.sources[name].ahead,
                realised=sum(one.sources[name].tokens for one in recent) / total if total else 0.0,
                waited=waited / seconds,
                reader_tokens_per_s=source.rate,
            )
        return inputs

    def _wish(self, step: int, name: str, inputs: ScalingInputs) -> _Wish | None:
        source, policy, demand = self._sources[name], self._policy, inputs.demand_tokens_per_s
        gives = source.readers * source.rate
        cooling = source.changed_at is not None and step - source.changed_at < policy.cool_down_steps
        wish = _Wish(
            source=name,
            readers=max(1, math.ceil(demand / (UTILISATION * source.rate))),
            reason="drift",
            rate=source.rate,
        )
        if demand > policy.high * gives:
            scheduled = inputs.ahead * inputs.stream_tokens_per_s
            if inputs.ahead > source.ahead and scheduled > policy.high * gives:
                return replace(wish, reason="schedule")
            return wish if self._settled and not cooling else None
        if cooling:
            return None
        if inputs.waited > policy.lag:
            rate = min(source.rate, demand / (UTILISATION * (source.readers + 1)))
            if rate < _SLOWEST * source.profile.tokens_per_s:
                return None
            return replace(wish, readers=source.readers + 1, reason="lag", rate=rate)
        if demand < policy.low * (gives - source.rate):
            if inputs.ahead < source.ahead:
                return replace(wish, reason="schedule")
            return wish if self._settled else None
        return None

    def _crowded(self, leaving: set[str], inputs: Mapping[str, ScalingInputs]) -> Iterator[_Wish]:
        """The busiest sources of shared actors that have too much to do, so many that the rest is as planned."""
        for actor in self._actors:
            if len(actor.readers) == 1 or actor.shadow:
                continue
            busy = {
                name: inputs[name].demand_tokens_per_s / self._sources[name].rate
                for name in actor.sources
                if name not in leaving
            }
            total = math.fsum(busy.values())
            if total <= self._policy.high * actor.workers:
                continue
            for name in sorted(busy, key=lambda name: (-busy[name], name)):
                if total <= UTILISATION * actor.workers:
                    break
                total -= busy[name]
                yield _Wish(source=name, readers=1, reason="crowded", rate=self._sources[name].rate)

    def _rank(self, inputs: Mapping[str, ScalingInputs]) -> Callable[[_Wish], tuple[bool, float, str]]:
        """What goes makes room for what comes; of those that come, the one that is busiest is first."""

        def rank(wish: _Wish) -> tuple[bool, float, str]:
            source = self._sources[wish.source]
            busy = inputs[wish.source].demand_tokens_per_s / (source.readers * wish.rate)
            return wish.readers >= source.readers, -busy, wish.source

        return rank

    def _grant(self, step: int, wish: _Wish, inputs: Mapping[str, ScalingInputs]) -> ScalingDecision | None:
        """As much of a wish as the budget has; None if that is nothing."""
        source = self._sources[wish.source]
        readers = wish.readers
        if readers >= source.readers:
            readers = min(readers, self._most_readers(wish, inputs))
            if readers < wish.readers:
                self._held_back[wish.source] = max(1, wish.readers - max(readers, source.readers))
            if readers < source.readers + (wish.reason != "crowded"):
                return None
        before, cpus = source.readers, self._cpus(wish.source, readers, wish.rate, inputs)
        source.readers, source.rate = readers, wish.rate
        source.ahead = inputs[wish.source].ahead
        source.changed_at = self._changed_at = step
        self._actors = resized(self._actors, wish.source, readers, cpus=cpus)
        return ScalingDecision(
            step=step,
            source=wish.source,
            actors_before=before,
            actors_after=readers,
            cpus=cpus,
            reason=wish.reason,
            inputs=inputs[wish.source],
        )

    def _most_readers(self, wish: _Wish, inputs: Mapping[str, ScalingInputs]) -> int:
        """Actors for a source alone that the budget has memory and processors for; fewer than it has, maybe."""
        source, budget = self._sources[wish.source], self._start.budget
        copies = 2 if any(actor.shadow for actor in self._actors) else 1
        own = [actor for actor in self._actors if actor.sources == (wish.source,) and not actor.shadow]
        freed = 0 if own else source.profile.resident_bytes  # in the actor that it leaves
        free = budget.memory_bytes - sum(actor.memory_bytes for actor in self._actors) + copies * freed
        most = len(own) + free // (copies * (self._actors[0].base_bytes + source.profile.resident_bytes))
        others = math.fsum(
            self._cpus(name, one.readers, one.rate, inputs)
            for name, one in self._sources.items()
            if name != wish.source
        )
        cpu_s = source.profile.cpu_s_per_token
        if inputs[wish.source].demand_tokens_per_s * cpu_s > max(0.0, budget.cpus - others):
            most = min(most, max(source.readers, math.floor((budget.cpus - others) / (wish.rate * cpu_s))))
        return most

    def _cpus(self, name: str, readers: int, rate: float, inputs: Mapping[str, ScalingInputs]) -> float:
        """Processors that readers of a source keep busy: as the demand wants, or all the time."""
        return (
            min(inputs[name].demand_tokens_per_s, readers * rate)
            * self._sources[name].profile.cpu_s_per_token
        )


def replay(
    start: ScalerStart, observations: Iterable[tuple[int, Observation]]
) -> tuple[ScalingDecision, ...]:
    """The decisions that followed from a start and observations, found again from their log.

    Args:
        start: what the scaler started from.
        observations: what it was told, with the step, in order.
    """
    scaler = Scaler(start)
    return tuple(
        itertools.chain.from_iterable(scaler.observe(step, observation) for step, observation in observations)
    )


def _tokens_per_s_at_work(observation: Observation) -> float:
    """What the trainer takes while it does not wait for steps."""
    at_work = max(observation.seconds - observation.stalled_s, _LEAST_AT_WORK * observation.seconds)
    return sum(load.tokens for load in observation.sources.values()) / at_work
