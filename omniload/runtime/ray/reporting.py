"""The numbers of a job, gathered by its planner and published about once a second."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from omniload.errors import ObservingError
from omniload.observing import job_dir
from omniload.observing.events import EventKind, EventLog
from omniload.observing.stats import ActorStats, ClientStats, JobStats, SourceStats
from omniload.observing.timing import Timing
from omniload.planner import Plan, StreamState
from omniload.planner.state import scheduled_weights
from omniload.runtime.ray.job import Job
from omniload.runtime.ray.layout import Layout

logger = logging.getLogger(__name__)

_ANSWER_S = 1.0


class Reporter:
    """Asks the actors of a job how they are, and publishes it.

    Args:
        job: the job.
    """

    def __init__(self, job: Job) -> None:
        from omniload.runtime.ray.gauges import Gauges  # loads prometheus_client

        self._job = job
        self.events = EventLog(job_dir.events_path(job.name), job.name)
        """What happened."""
        self.latest: JobStats | None = None
        """The numbers published last."""
        self._gauges = Gauges()
        self._pids: dict[str, int] = {}
        self._restarts: dict[str, int] = {}
        self._slow: dict[int, int] = {}  # the step of each rank that was waited for long, and is written down

    async def report(
        self,
        own: ActorStats,
        layout: Layout,
        nodes: Sequence[str],
        plan: Plan | None,
        state: StreamState | None,
        planning: Timing,
    ) -> None:
        """Gather and publish; an actor that does not answer is left out.

        Args:
            own: of the planner.
            layout: the loaders.
            nodes: those with a constructor.
            plan: the last one made.
            state: the stream after it.
            planning: how long plans took.
        """
        names = [*(loader.name for loader in layout.loaders), *map(self._job.constructor, nodes)]
        answers = await asyncio.gather(*(self._of(name) for name in names))
        actors = [self._counted(own)]
        clients: list[ClientStats] = []
        for answer in answers:
            if answer is not None:
                actors.append(self._counted(answer[0]))
                clients += answer[1]
        for client in clients:
            self._note_slow(client)
        self.latest = JobStats(
            job=self._job.name,
            at=time.time(),
            step=min((client.step for client in clients), default=0),
            plan_p50_ms=planning.p50_ms,
            plan_p99_ms=planning.p99_ms,
            imbalance=_imbalance(plan),
            actors=tuple(actors),
            sources=_sources(self._job, state),
            clients=tuple(sorted(clients, key=lambda client: client.rank)),
            object_store_bytes=sum(actor.queue_bytes for actor in actors if actor.role == "constructor"),
        )
        self._gauges.set(self.latest)
        try:
            job_dir.publish(self.latest)
        except ObservingError as error:
            logger.warning("%s", error)

    def end(self, reason: str) -> None:
        """The job ends."""
        step = self.latest.step if self.latest else 0
        self.events.write(EventKind.JOB_ENDED, step=step, reason=reason)
        try:
            job_dir.withdraw(self._job.name)
        except ObservingError as error:
            logger.warning("%s", error)

    async def _of(self, name: str) -> tuple[ActorStats, Sequence[ClientStats]] | None:
        try:
            actor, clients = await asyncio.wait_for(self._job.find(name).stats.remote(), _ANSWER_S)
        except Exception:  # lost, or busy; it is asked again in a second
            return None
        return actor, clients

    def _note_slow(self, client: ClientStats) -> None:
        if client.slow_step not in (-1, self._slow.get(client.rank)):
            self._slow[client.rank] = client.slow_step
            said = {"rank": client.rank, "step": client.slow_step, "stall_s": client.slow_s}
            self.events.write(EventKind.STEP_SLOW, **said)

    def _counted(self, stats: ActorStats) -> ActorStats:
        """With the number of times that it was started again, which another process of the name tells."""
        known = self._pids.get(stats.name)
        if known != stats.pid:
            if known is not None:
                self._restarts[stats.name] = self._restarts.get(stats.name, 0) + 1
            self._pids[stats.name] = stats.pid
            said = {"actor": stats.name, "role": stats.role, "node": stats.node, "pid": stats.pid}
            self.events.write(EventKind.ACTOR_STARTED, **said)
        return replace(stats, restarts=self._restarts.get(stats.name, 0))


def _imbalance(plan: Plan | None) -> float:
    """Costliest lane over the mean, of what the backbone is given; ranks take equal numbers of lanes."""
    if plan is None or not plan.lane_costs.size or not plan.lane_costs[0].any():
        return math.nan
    costs = plan.lane_costs[0].astype(np.float64)
    return float(costs.max() / costs.mean())


def _sources(job: Job, state: StreamState | None) -> tuple[SourceStats, ...]:
    if state is None:
        return ()
    mixture = job.mixture
    declared = state.decided.weights or scheduled_weights(mixture, state.sources, state.step)
    by_samples = mixture.unit == "samples"
    emitted = [one.emitted_samples if by_samples else one.emitted_tokens for one in state.sources]
    return tuple(
        SourceStats(
            name=name,
            emitted_tokens=source.emitted_tokens,
            declared_ratio=weight / (math.fsum(declared) or math.nan),
            realised_ratio=given / (sum(emitted) or math.nan),
            failures=source.failures,
        )
        for name, source, weight, given in zip(mixture.names, state.sources, declared, emitted, strict=True)
    )
