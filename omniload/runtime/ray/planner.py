"""The Planner role as an actor: one per job. It also knows who takes part, and ends the job when nobody does.

::

    planner.py     what may be asked of the actor, and its watch
    streams.py     the streams that are planned, and their logs
    feeds.py       where their metadata comes from
    membership.py  who takes their steps
    fleet.py       the loaders that they are read by
    reporting.py   the numbers of all of it
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray

from omniload.errors import LoaderStopped
from omniload.observing.events import EventKind
from omniload.observing.stats import ActorStats, ClientStats
from omniload.planner import StreamState
from omniload.planner.decisions import Decision, to_json
from omniload.runtime.plan_stream import Outcome, Planned
from omniload.runtime.ray.calls import Raised, told
from omniload.runtime.ray.fleet import Fleet, end
from omniload.runtime.ray.job import PLANNER, Job
from omniload.runtime.ray.layout import Layout
from omniload.runtime.ray.membership import Membership
from omniload.runtime.ray.meter import Meter
from omniload.runtime.ray.reporting import Reporter
from omniload.runtime.ray.streams import Streams
from omniload.runtime.steps import End
from storage.errors import StorageError

logger = logging.getLogger(__name__)

_NONE = np.empty(0, np.uint8)
_LAST_WORD_S = 0.2
_CLOSE_S = 5.0
"""Limit of the removal of what a job wrote down for itself."""
_WATCH_EVERY_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """What becomes of a step, and who has its payload."""

    outcome: Planned | End
    """What becomes of it."""
    layout: Layout | None
    """The loaders; None if they are those that who asks knows."""
    holders: np.ndarray
    """``uint8[pieces]``: which of the loaders of its source, the readers first, has each piece at hand."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """The planner, made anew, does not know the stream; whoever asks is to open it again."""


class PlannerActor:
    """Plans the streams of a job.

    Args:
        job: the job.
    """

    def __init__(self, job: Job) -> None:
        job.enter()
        self._job = job
        self._meter = Meter(PLANNER, "planner")
        self._reporter = Reporter(job)
        self._fleet = Fleet(job, self._reporter.events)
        self._streams = Streams(job, self._fleet, self._reporter.events)
        self._members = Membership(self._streams)
        self._watching: asyncio.Task[None] | None = None
        self._scaling: asyncio.Task[None] | None = None
        self._last_word: asyncio.Task[None] | None = None
        self._ending = False
        # Made anew where every rank is gone, nobody else would call it, and it would stay for ever.
        ray.get_runtime_context().current_actor.wake.remote()

    async def wake(self) -> None:
        """Begin to watch who is there."""
        self._watch()

    async def layout(self) -> Layout:
        """The loaders there are."""
        return self._fleet.layout

    async def open(self, client: str, state: StreamState) -> Any:
        """The stream that goes on from a state, begun if there is none: its name."""
        self._watch()
        try:
            name = await self._streams.open(client, state)
        except Exception as error:
            return Raised(told(error))
        self._members.opens(name, client)
        return name

    async def planned(self, name: str, step: int, node: str, asked: Mapping[str, int], layout: int) -> Any:
        """What becomes of a step, once it is planned: `Reply`, `Raised` or `Unknown`.

        Args:
            name: of the stream.
            step: the step.
            node: who asks.
            asked: what the ranks of the node ask for, by name.
            layout: version of the layout that is known there.
        """
        self._watch()
        stream = await self._streams.find(name, min(asked.values(), default=None))
        if stream is None:
            return Unknown()
        self._members.asks(name, node, asked)
        outcome: Outcome = await asyncio.wrap_future(stream.plans.planned(step))
        if isinstance(outcome, LoaderStopped):  # the step is gone, or the stream
            return Unknown()
        if isinstance(outcome, BaseException):
            return Raised(told(outcome))
        known = layout == self._fleet.layout.version
        holders = _NONE
        if isinstance(outcome, Planned):
            stream.feeds.holders.release(stream.plans.first)
            holders = stream.feeds.holders.of(outcome.plan.step, outcome.plan.pieces)
        return Reply(outcome=outcome, layout=None if known else self._fleet.layout, holders=holders)

    async def ask(self, name: str, node: str, asked: Mapping[str, int]) -> None:
        """Clients of a node have come to ask for steps."""
        self._members.asks(name, node, asked)

    async def decide(self, name: str, client: str, asked: int, decision: Decision, nth: int) -> Any:
        """A client made a decision.

        Args:
            name: of the stream.
            client: the rank.
            asked: the first step it is not done with.
            decision: what it decided.
            nth: how often it decided just this, this time included.
        """
        stream = self._streams.get(name)
        if stream is None or stream.plans.failed:  # it is part of the state that the next one is opened with
            return Unknown()
        stream.plans.adopt(client, asked)  # if this planner has yet to hear of it
        self._members.decides(name, client)
        try:
            await asyncio.to_thread(stream.plans.decide, client, decision, nth)  # it is written down first
        except Exception as error:
            return Raised(told(error))
        self._reporter.events.write(EventKind.DECISION, decision=to_json(decision))
        return None

    async def leave(self, name: str, node: str, clients: Sequence[str]) -> None:
        """Clients of a node take no more steps of a stream."""
        self._members.leave(name, node, clients)

    async def stale_answers(self) -> int:
        """Answers of loaders that were refused."""
        return sum(stream.feeds.stale_answers for _, stream in self._streams)

    async def stats(self) -> tuple[ActorStats, tuple[ClientStats, ...]]:
        """How it is, and the ranks that it speaks for: none."""
        return self._meter.stats(stale_answers=await self.stale_answers()), ()

    async def alive(self, node: str, num_clients: int, asked: Mapping[str, Mapping[str, int]]) -> None:
        """A constructor is there, and so many ranks of its node.

        Args:
            node: its node.
            num_clients: ranks.
            asked: by stream, what they ask for, by name.
        """
        self._watch()
        for name, of_stream in asked.items():
            self._members.asks(name, node, of_stream)
        if not self._members.alive(node, num_clients):
            # Not before who said this has its answer.
            self._last_word = asyncio.get_running_loop().create_task(self._end_soon())

    def _watch(self) -> None:
        if self._watching is None:
            self._fleet.make()
            if ray.get_runtime_context().was_current_actor_reconstructed:
                self._fleet.take_over()
            self._watching = asyncio.get_running_loop().create_task(self._keep_watch())

    async def _keep_watch(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_EVERY_S)
            try:
                self._members.forget_silent()
                await self._end_if_over()
                self._fleet.make()
                await self._report()
                if self._job.mixture.ray.autoscale and (self._scaling is None or self._scaling.done()):
                    self._scaling = asyncio.get_running_loop().create_task(self._scale())
                await asyncio.to_thread(self._members.sweep)
            except Exception:  # who watches has to go on, whatever happened
                logger.exception("job %s: the planner's watch", self._job.name)

    async def _scale(self) -> None:
        """Beside the watch, as it takes a while to measure many sources."""
        try:
            await self._fleet.scale(self._streams)
        except Exception:  # another is begun a second later
            logger.exception("job %s: the scaling of its loaders", self._job.name)

    async def _report(self) -> None:
        furthest = max((one.plans for _, one in self._streams), key=lambda one: one.step, default=None)
        last = furthest.last if furthest else None
        await self._reporter.report(
            (await self.stats())[0],
            self._fleet.layout,
            self._members.nodes,
            last.plan if last else None,
            last.after if last else None,
            self._streams.planning,
        )

    async def _end_soon(self) -> None:
        await asyncio.sleep(_LAST_WORD_S)
        await self._end_if_over()

    async def _end_if_over(self) -> None:
        if self._ending or not self._members.is_over:
            return
        self._ending = True
        self._reporter.end("no rank takes part any more")
        with suppress(StorageError, TimeoutError):  # a folder that stays does no harm
            await asyncio.wait_for(asyncio.to_thread(self._streams.close), _CLOSE_S)
        end(self._job)
