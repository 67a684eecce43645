"""Other loaders for a running job, as its scaler decides."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import ray

from omniload.observing.job_dir import job_dir
from omniload.planner import StreamState
from omniload.runtime.ray.job import Job
from omniload.runtime.ray.layout import Layout, Loader, with_shadows
from omniload.scaling.actors import ActorSpec, Budget
from omniload.scaling.demand import outlook, step_tokens
from omniload.scaling.observation import Observation, ScalingDecision, SourceLoad
from omniload.scaling.partition import partition
from omniload.scaling.profile import SourceProfile
from omniload.scaling.scaler import Scaler, ScalerStart

logger = logging.getLogger(__name__)

LOG = "scaling.jsonl"
"""In the job's folder: a `ScalerStart`, and then each `Observation` with the decisions that it led to;
`omniload.scaling.scaler.replay` finds them again."""
EVERY_STEPS = 8
"""Steps between observations."""
_LOOK_AHEAD_STEPS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Counters:
    """What is known of a stream at some point of time; observations are differences."""

    at_s: float
    """On the clock of `time.monotonic`."""
    state: StreamState
    """The stream after the last step planned."""
    stalled_s: float
    """How long ranks waited for plans."""
    waited_s: Sequence[float]
    """How long planning waited for each source."""


class Autoscaler:
    """Divides the sources of a job among loaders by what they cost, observes the stream, and changes the layout.

    Args:
        job: the job.
        layout: its loaders up to now, which know nothing of costs.
        profiles: of all sources.
        first: where observation begins.
    """

    def __init__(self, job: Job, layout: Layout, profiles: Sequence[SourceProfile], first: Counters) -> None:
        self._job = job
        self._profiles = profiles
        self._last = first
        ahead = outlook(job.mixture, first.state, profiles, steps=_LOOK_AHEAD_STEPS).ahead
        demand = step_tokens(job.mixture) / max(1e-3, _seconds_per_step(first))
        budget = _budget(job)
        divided = partition(profiles, ahead, demand, budget, shadows=job.mixture.ray.shadows > 0)
        divided = replace(divided, actors=_named_as(layout, job, divided.actors))
        start = ScalerStart(profiles=tuple(profiles), shares=ahead, partition=divided, budget=budget)
        self._scaler = Scaler(start)
        self.layout = layout.changed(_loaders(job, divided.actors))
        """The loaders to begin with."""
        self._log = job_dir(job.name) / LOG
        self._write({"start": start.to_json()}, "w")

    def observe(self, layout: Layout, now: Counters) -> tuple[Layout, Sequence[ScalingDecision]]:
        """The layout from now on, and why."""
        last, self._last = self._last, now
        mixture = self._job.mixture
        ahead = outlook(mixture, now.state, self._profiles, steps=_LOOK_AHEAD_STEPS).ahead
        observation = Observation(
            seconds=max(1e-3, now.at_s - last.at_s),
            stalled_s=now.stalled_s - last.stalled_s,
            sources={
                name: SourceLoad(
                    tokens=after.emitted_tokens - before.emitted_tokens,
                    waited_s=waited - waited_before,
                    ahead=ahead[name],
                )
                for name, after, before, waited, waited_before in zip(
                    mixture.names,
                    now.state.sources,
                    last.state.sources,
                    now.waited_s,
                    last.waited_s,
                    strict=True,
                )
            },
        )
        decisions = self._scaler.observe(now.state.step, observation)
        said = {"step": now.state.step, "observation": observation.to_json()}
        self._write({**said, "decisions": [decision.to_json() for decision in decisions]}, "a")
        if decisions:
            layout = layout.changed(_loaders(self._job, self._scaler.actors))
        return layout, decisions

    def _write(self, line: object, mode: str) -> None:
        """Log what decisions depend on; it is for people, so it must not fail the job."""
        try:
            with self._log.open(mode) as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            logger.warning("%s: cannot be written (%s)", self._log, error.strerror)

    def due(self, now: StreamState) -> bool:
        """Whether it is time for an observation."""
        return now.step >= self._last.state.step + EVERY_STEPS


def _seconds_per_step(first: Counters) -> float:
    return (time.monotonic() - first.at_s) / max(1, first.state.step)


def _budget(job: Job) -> Budget:
    options = job.mixture.ray
    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return Budget(
        cpus=options.max_cpus or resources.get("CPU", 1.0),
        memory_bytes=options.max_bytes or math.floor(resources.get("memory", 8 << 30) / 2),
    )


def _named_as(layout: Layout, job: Job, actors: Sequence[ActorSpec]) -> tuple[ActorSpec, ...]:
    """The actors, with the names of the loaders that read just the same sources; those need not be made anew."""
    there = {loader.sources: loader.name for loader in layout.loaders if not loader.shadow}
    named = []
    for actor in actors:
        name = there.get(_numbers(job, actor), actor.name.removesuffix(".shadow"))
        if len(actor.readers) > 1 or actor.readers[0].of == 1:
            actor = replace(actor, name=f"{name}.shadow" if actor.shadow else name)
        named.append(actor)
    return tuple(named)


def _numbers(job: Job, actor: ActorSpec) -> tuple[int, ...]:
    return tuple(sorted(job.mixture.names.index(source) for source in actor.sources))


def _loaders(job: Job, actors: Sequence[ActorSpec]) -> list[Loader]:
    """The actors that a scaler wants, as loaders."""
    found: list[Loader] = []
    for actor in actors:
        if not actor.shadow:
            loader = Loader(name=actor.name, sources=_numbers(job, actor))
            found += with_shadows(loader, job.mixture.ray.shadows)
    return found
