"""The DataConstructor role as an actor: one per node. It asks every loader once for all ranks of its node."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from ray.exceptions import RayError

from omniload.constructor import pieces_of
from omniload.errors import LoaderTimeout, kind_and_message
from omniload.observing.stats import ActorStats, ClientStats
from omniload.payload import Payload
from omniload.pieces import Failure
from omniload.planner import Plan, StreamState
from omniload.runtime.bundle import Bundle
from omniload.runtime.feed import AVOID_S, LoaderLost
from omniload.runtime.plan_stream import Planned
from omniload.runtime.ray.calls import FIRST_RETRY_S, LAST_RETRY_S, Raised, told
from omniload.runtime.ray.job import PLANNER, Job
from omniload.runtime.ray.layout import Layout
from omniload.runtime.ray.meter import Meter
from omniload.runtime.ray.planner import ALIVE_EVERY_S, LOST_AFTER_S

Lanes: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """A step as it travels to a rank."""

    plan: Plan
    """The plan of the whole step."""
    after: StreamState
    """The stream after it."""
    quarantined: tuple[Failure, ...]
    """Rows that the step consumed and that make no sample."""
    bundle: Bundle
    """The payload of the rank's lanes, one after the other."""


@dataclass(kw_only=True, slots=True)
class _Taking:
    """What a rank takes, and how far it has come."""

    stream: str
    lanes: Lanes
    asked: int


@dataclass(kw_only=True, slots=True)
class _Step:
    """A step on its way."""

    outcome: asyncio.Task[Any]
    bundles: dict[Lanes, asyncio.Task[dict[Lanes, Bundle]]] = field(default_factory=dict)
    pieces: list[np.ndarray] = field(default_factory=list)
    """What was asked of the loaders."""


class Routes:
    """Which loaders to ask for payload, the most promising first.

    Any loader of a source can derive any of its payload; the one that read a window has it at hand.

    Args:
        layout: the loaders.
        num_sources: sources of the mixture.
    """

    def __init__(self, layout: Layout, num_sources: int) -> None:
        members = [(layout.readers(source), layout.shadows(source)) for source in range(num_sources)]
        # Sources that the same loaders read are asked for together.
        self._kinds = sorted(set(members))
        self._kind_of = np.array([self._kinds.index(one) for one in members])
        self._lost_at: dict[str, float] = {}

    def lost(self, name: str) -> None:
        """A loader did not answer."""
        self._lost_at[name] = time.monotonic()

    def of(self, pieces: np.ndarray) -> list[tuple[list[str], np.ndarray]]:
        """Names of loaders, and ``int64[n]`` which of the pieces to ask them for."""
        kind = self._kind_of[pieces["source"]]
        found = []
        for one in np.unique(kind).tolist():
            readers, shadows = self._kinds[one]
            owner = (pieces["file"] + pieces["block"]) % len(readers)
            for first in range(len(readers)):
                where = np.flatnonzero((kind == one) & (owner == first))
                if len(where):
                    names = [*readers[first:], *readers[:first], *shadows]
                    found.append((sorted(names, key=self._is_lost), where))
        return found

    def _is_lost(self, name: str) -> bool:
        return self._lost_at.get(name, -AVOID_S) > time.monotonic() - AVOID_S


class ConstructorActor:
    """Gathers the lanes of the ranks of a node.

    Args:
        job: the job.
        node: Ray's name of the node.
    """

    def __init__(self, job: Job, node: str) -> None:
        job.enter()
        self._job = job
        self._node = node
        self._routes = Routes(job.layout, len(job.mixture.names))
        self._meter = Meter(job.constructor(node), "constructor")
        self._seen: dict[str, float] = {}
        self._said: dict[str, ClientStats] = {}
        self._taking: dict[str, _Taking] = {}
        self._steps: dict[tuple[str, int], _Step] = {}
        self._told: dict[str, int] = {}
        self._watching: asyncio.Task[None] | None = None

    async def alive(self, client: str, stats: ClientStats | None = None) -> None:
        """A rank is there, even if it asks for nothing at the moment, and says how it is."""
        self._seen[client] = time.monotonic()
        if stats is not None:
            self._said[client] = stats
        self._watch()

    async def fetch(self, stream: str, client: str, lanes: Lanes, step: int, asked: int) -> Any:
        """A step of a stream: `Served`, `End`, `Raised` or `Unknown`.

        Args:
            stream: name of the stream, as the planner gave it.
            client: name of the rank.
            lanes: its lanes.
            step: the step it wants.
            asked: the first step it is not done with.
        """
        await self.alive(client)
        self._taking[client] = _Taking(stream=stream, lanes=lanes, asked=asked)
        self._let_go(stream)
        try:
            at = self._steps.get((stream, step))
            if at is None or (at.outcome.done() and not isinstance(at.outcome.result(), Planned)):
                task = asyncio.get_running_loop().create_task(self._planned(stream, step))
                at = self._steps[stream, step] = _Step(outcome=task)
            planned = await asyncio.shield(at.outcome)
            if not isinstance(planned, Planned):
                return planned
            bundles = await asyncio.shield(self._bundles(at, stream, planned.plan, lanes))
        except Exception as error:
            self._steps.pop((stream, step), None)
            return Raised(told(error))
        return Served(
            plan=planned.plan,
            after=planned.after,
            quarantined=planned.quarantined,
            bundle=bundles[lanes],
        )

    async def stats(self) -> tuple[ActorStats, tuple[ClientStats, ...]]:
        """How it is, and its ranks are."""
        tasks = {task for step in self._steps.values() for task in step.bundles.values() if task.done()}
        held = [bundle for task in tasks if not task.exception() for bundle in task.result().values()]
        queue_bytes = sum(bundle.num_bytes for bundle in held)
        return self._meter.stats(queue_bytes=queue_bytes), tuple(self._said.values())

    async def pause(self, client: str) -> None:
        """A rank wants no more of its stream."""
        taken = self._taking.pop(client, None)
        if taken is not None:
            self._let_go(taken.stream)
            leave = lambda planner: planner.leave.remote(taken.stream, [client])  # noqa: E731
            await self._call(PLANNER, leave, "leaving the stream")

    async def leave(self, client: str) -> None:
        """A rank wants nothing more of the job."""
        await self.pause(client)
        self._seen.pop(client, None)
        self._said.pop(client, None)
        await self._call(PLANNER, self._say_alive, "leaving the job")

    def _say_alive(self, planner: Any) -> Any:
        return planner.alive.remote(self._node, len(self._seen))

    async def _planned(self, stream: str, step: int) -> Any:
        return await self._call(
            PLANNER,
            lambda planner: planner.planned.remote(stream, step, self._asked(stream)),
            f"the plan of step {step}",
        )

    def _asked(self, stream: str) -> dict[str, int]:
        return {name: one.asked for name, one in self._taking.items() if one.stream == stream}

    def _bundles(self, at: _Step, stream: str, plan: Plan, lanes: Lanes) -> asyncio.Task[dict[Lanes, Bundle]]:
        """The payload of these lanes and, asked for with them, of those of all other ranks of the node."""
        if lanes not in at.bundles:
            every = {one.lanes for one in self._taking.values() if one.stream == stream} | {lanes}
            new = sorted(every - at.bundles.keys())
            task = asyncio.get_running_loop().create_task(self._gather(at, plan, new))
            at.bundles |= dict.fromkeys(new, task)
        return at.bundles[lanes]

    async def _gather(self, at: _Step, plan: Plan, wanted: Sequence[Lanes]) -> dict[Lanes, Bundle]:
        of_lanes = [pieces_of(plan, lanes) for lanes in wanted]
        pieces = np.concatenate([one.view(np.uint8).reshape(len(one), -1) for one in of_lanes])
        pieces = pieces.reshape(-1).view(plan.pieces.dtype)
        at.pieces.append(pieces)
        routes = self._routes.of(pieces)
        parts = await asyncio.gather(*(self._bundle(route, pieces[where]) for route, where in routes))
        whole = Payload.gathered(
            len(pieces),
            ((where.tolist(), part.payload()) for (_, where), part in zip(routes, parts, strict=True)),
        )
        bundles, begin = {}, 0
        for lanes, one in zip(wanted, of_lanes, strict=True):
            here = slice(begin, begin + len(one))
            bundles[lanes] = Bundle.of(
                Payload(
                    tokens=whole.tokens[here],
                    loss_mask=whole.loss_mask[here],
                    arrays=None if whole.arrays is None else whole.arrays[here],
                )
            )
            begin = here.stop
        return bundles

    async def _bundle(self, route: Sequence[str], pieces: np.ndarray) -> Bundle:
        """The payload of pieces, from the first loader of a route that answers."""
        turns = itertools.cycle(route)
        what = f"payload of {len(pieces)} samples"
        with self._meter.fetches.measure():
            found: Bundle = await self._call(
                lambda: next(turns), lambda loader: loader.bundle.remote(pieces), what, self._routes.lost
            )
        return found

    async def _call(
        self,
        name: str | Callable[[], str],
        call: Callable[[Any], Awaitable[Any]],
        what: str,
        lost: Callable[[str], None] | None = None,
    ) -> Any:
        """Call an actor, again and again while it is being made anew.

        Raises:
            LoaderTimeout: it did not come back in time.
        """
        timeout_s = self._job.settings.timeout_s
        deadline = time.monotonic() + timeout_s
        pause_s = FIRST_RETRY_S
        while True:
            who = name if isinstance(name, str) else name()
            try:
                value = await asyncio.wait_for(call(self._job.find(who)), deadline - time.monotonic())
                if isinstance(value, Raised):
                    raise value.error
                return value
            except TimeoutError:
                raise LoaderTimeout(
                    f"{what}: {who} did not answer within {timeout_s:g} s; raise timeout_s if the data is that slow"
                ) from None
            except (RayError, LoaderLost) as error:
                if lost is not None:
                    lost(who)
                if time.monotonic() + pause_s > deadline:
                    said = str(error) if isinstance(error, LoaderLost) else kind_and_message(error)
                    raise LoaderTimeout(
                        f"{what}: {who} was not there within {timeout_s:g} s ({said})"
                    ) from None
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_RETRY_S)

    def _let_go(self, stream: str) -> None:
        """Forget the steps that every rank of the node is done with, and tell who keeps anything for them."""
        asked = self._asked(stream)
        least = min(asked.values(), default=1 << 62)
        if self._told.get(stream) == least:
            return
        self._told[stream] = least
        for key in [key for key in self._steps if key[0] == stream and key[1] < least]:
            step = self._steps.pop(key)
            for pieces in step.pieces:
                self._release(pieces)
        if asked:
            with suppress(LoaderLost):  # it learns it with the next step it is asked for
                self._job.find(PLANNER).ask.remote(stream, asked)
        else:
            del self._told[stream]

    def _release(self, pieces: np.ndarray) -> None:
        for route, where in self._routes.of(pieces):
            for name in route:
                with suppress(LoaderLost):  # it keeps nothing then
                    self._job.find(name).release.remote(pieces[where])

    def _watch(self) -> None:
        if self._watching is None:
            self._watching = asyncio.get_running_loop().create_task(self._keep_watch())

    async def _keep_watch(self) -> None:
        while True:
            now = time.monotonic()
            for client in [client for client, at in self._seen.items() if at < now - LOST_AFTER_S]:
                del self._seen[client]
                self._said.pop(client, None)
                await self.pause(client)
            with suppress(LoaderLost):
                self._say_alive(self._job.find(PLANNER))
            await asyncio.sleep(ALIVE_EVERY_S)
