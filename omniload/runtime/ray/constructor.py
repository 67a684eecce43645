"""The DataConstructor role as an actor: one per node. It asks every loader once for all ranks of its node.

What the loaders answer lies in shared memory, in one object for each rank and loader, and the rank reads it there: the
constructor hands over references and touches no payload itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import ray
from ray.exceptions import RayError
from ray.experimental import get_local_object_locations

from omniload.constructor import pieces_of
from omniload.errors import LoaderTimeout, MixtureError, kind_and_message
from omniload.observing.stats import ActorStats, ClientStats
from omniload.pieces import join_pieces
from omniload.runtime.feed import LoaderLost
from omniload.runtime.plan_stream import Planned
from omniload.runtime.ray.calls import Raised, Retries, answer, told
from omniload.runtime.ray.job import PLANNER, Job
from omniload.runtime.ray.loaders import RemoteSources
from omniload.runtime.ray.membership import ALIVE_EVERY_S, LOST_AFTER_S
from omniload.runtime.ray.meter import Meter
from omniload.runtime.ray.planner import Reply
from omniload.runtime.ray.routes import Routes

logger = logging.getLogger(__name__)

Lanes: TypeAlias = tuple[int, ...]
_FEW_PIECES = 3000
"""Of a step that each rank is sent by itself; it comes to some 50 KiB, and above 100 Ray would put it elsewhere."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """What one loader has of the payload of a rank's lanes."""

    loader: str
    """Name of the loader."""
    where: np.ndarray
    """``int64[n]``: which of the pieces."""
    others: bool
    """Whether another loader could give it as well."""
    bundle: Any
    """Ray's reference to their `Bundle`, or `Raised`, in the shared memory of the node that has it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """A step as it travels to a rank."""

    planned: Any
    """The `Planned` of the whole step; if it is large, Ray's reference to the one that the ranks of a node share."""
    parts: tuple[Part, ...]
    """The payload of the rank's lanes; together the parts have every piece of the lanes, one lane after the other."""


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
    parts: dict[Lanes, tuple[Part, ...]] = field(default_factory=dict)
    asked: list[tuple[str, np.ndarray]] = field(default_factory=list)
    """Names of loaders, and the pieces that each was asked for."""
    shared: Any = None
    """What every rank gets; see `Served.planned`."""

    @property
    def failed(self) -> bool:
        """Whether it came to something that is to be asked for again."""
        done = self.outcome.done() and not self.outcome.cancelled()
        return done and (self.outcome.exception() is not None or not isinstance(self.outcome.result(), Reply))


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
        self._layout = job.layout.version
        self._meter = Meter(job.constructor(node), "constructor")
        self._seen: dict[str, float] = {}
        self._said: dict[str, ClientStats] = {}
        self._taking: dict[str, _Taking] = {}
        self._steps: dict[tuple[str, int], _Step] = {}
        self._told: dict[str, int] = {}
        # By loader: pieces that it need not keep. It is told when it is asked for others, or a little later.
        self._done: dict[str, list[np.ndarray]] = {}
        self._made = time.monotonic()
        self._digests: asyncio.Task[Any] | None = None
        self._watching: asyncio.Task[None] | None = None
        # Made anew where every rank is gone, nobody else would call it, and the planner would never hear of it.
        ray.get_runtime_context().current_actor.wake.remote()

    async def wake(self) -> None:
        """Begin to tell the planner who is there."""
        self._watch()

    async def alive(self, client: str, stats: ClientStats | None = None, digest: str | None = None) -> Any:
        """A rank is there, even if it asks for nothing at the moment.

        Args:
            client: name of the rank.
            stats: how it is.
            digest: of what it loads, which has to be what the job does.
        """
        if digest not in (None, self._job.digest):
            if not self._seen:
                raise LoaderLost("the job that had the name before is just ending")
            return Raised(
                MixtureError(
                    f"ray: job '{self._job.name}' loads another mixture, split or prefetch_steps; give the ranks of a"
                    " job the same, and another loader another ray.job"
                )
            )
        if client not in self._seen:  # before the last one that leaves could end the job
            with suppress(LoaderLost, RayError, TimeoutError):
                self._seen[client] = time.monotonic()
                await asyncio.wait_for(self._say_alive(self._job.find(PLANNER)), ALIVE_EVERY_S)
        self._seen[client] = time.monotonic()
        if stats is not None:
            self._said[client] = stats
        self._watch()
        return None

    async def fetch(
        self, stream: str, client: str, lanes: Lanes, step: int, asked: int, lost: Sequence[str] = ()
    ) -> Any:
        """A step of a stream: `Served`, `End`, `Raised` or `Unknown`.

        Args:
            stream: name of the stream, as the planner gave it.
            client: name of the rank.
            lanes: its lanes.
            step: the step it wants.
            asked: the first step it is not done with.
            lost: loaders that did not give their parts of the step when it was served before.
        """
        await self.alive(client)
        with self._meter.answering():
            before = self._taking.get(client)
            self._taking[client] = _Taking(stream=stream, lanes=lanes, asked=asked)
            if before is not None and before.stream != stream:
                self._let_go(before.stream)
            at = self._steps.get((stream, step))
            to_plan = at is None or at.failed
            self._let_go(stream, tell=not to_plan)  # which tells as well
            if at is None or to_plan:
                task = asyncio.get_running_loop().create_task(self._planned(stream, step))
                at = self._steps[stream, step] = _Step(outcome=task)
        try:
            reply = await asyncio.shield(at.outcome)
            if not isinstance(reply, Reply):
                return reply
            planned = reply.outcome
            assert isinstance(planned, Planned), "an end is not a reply here"
            if lost:
                self._routes.lost(lost)
                at.parts = {
                    lanes: parts
                    for lanes, parts in at.parts.items()
                    if not any(part.loader in lost for part in parts)  # or another rank has said so before
                }
            with self._meter.answering():
                parts = self._parts(at, stream, reply, lanes)
                if at.shared is None:
                    few = len(planned.plan.pieces) + len(planned.after.carried) < _FEW_PIECES
                    at.shared = planned if few else ray.put(planned)
        except LoaderLost:  # for the rank to make, and to ask again
            self._steps.pop((stream, step), None)
            raise
        except Exception as error:
            self._steps.pop((stream, step), None)
            return Raised(told(error))
        return Served(planned=at.shared, parts=parts)

    async def digests(self) -> Any:
        """`Digests` of every source, for which loaders are asked once for all ranks; may read the ends of files."""
        done = self._digests is not None and self._digests.done()
        if self._digests is None or (done and isinstance(self._digests.result(), Raised)):
            find = RemoteSources(
                self._job, lambda: None
            ).digests  # the planner makes loaders that are missing
            task = asyncio.to_thread(answer, find)
            self._digests = asyncio.get_running_loop().create_task(task)
        return await asyncio.shield(self._digests)

    async def stats(self) -> tuple[ActorStats, tuple[ClientStats, ...]]:
        """How it is, and its ranks are."""
        return self._meter.stats(queue_bytes=self._held_bytes()), tuple(self._said.values())

    async def pause(self, client: str) -> None:
        """A rank wants no more of its stream."""
        taken = self._taking.pop(client, None)
        if taken is not None:
            self._let_go(taken.stream)
            leave = lambda planner: planner.leave.remote(taken.stream, self._node, [client])  # noqa: E731
            await self._call(PLANNER, leave, "leaving the stream")

    async def leave(self, client: str) -> None:
        """A rank wants nothing more of the job."""
        await self.pause(client)
        self._seen.pop(client, None)
        self._said.pop(client, None)
        await self._call(PLANNER, self._say_alive, "leaving the job")

    def _held_bytes(self) -> int:
        """Shared memory of what is kept for the ranks; what is on its way counts once it is there."""
        steps = list(self._steps.values())
        refs = [part.bundle for step in steps for parts in step.parts.values() for part in parts]
        refs += [step.shared for step in steps if isinstance(step.shared, ray.ObjectRef)]
        return sum(one.get("object_size") or 0 for one in get_local_object_locations(refs).values())

    def _say_alive(self, planner: Any) -> Any:
        asked = {one.stream: self._asked(one.stream) for one in self._taking.values()}
        return planner.alive.remote(self._node, len(self._seen), asked)

    async def _planned(self, stream: str, step: int) -> Any:
        reply = await self._call(
            PLANNER,
            lambda planner: planner.planned.remote(
                stream, step, self._node, self._asked(stream), self._layout
            ),
            f"the plan of step {step}",
        )
        if not isinstance(reply, Reply):
            return reply
        if reply.layout is not None:
            self._layout = reply.layout.version
            self._routes = Routes(reply.layout, len(self._job.mixture.names))
        return reply if isinstance(reply.outcome, Planned) else reply.outcome

    def _asked(self, stream: str) -> dict[str, int]:
        return {name: one.asked for name, one in self._taking.items() if one.stream == stream}

    def _parts(self, at: _Step, stream: str, reply: Reply, lanes: Lanes) -> tuple[Part, ...]:
        """The payload of these lanes and, asked for with them, of those of all other ranks of the node."""
        if lanes not in at.parts:
            every = {one.lanes for one in self._taking.values() if one.stream == stream} | {lanes}
            self._ask_loaders(at, reply, sorted(every - at.parts.keys()))
        return at.parts[lanes]

    def _ask_loaders(self, at: _Step, reply: Reply, wanted: Sequence[Lanes]) -> None:
        """Ask each loader once for what it has of all these lanes; the answers lie ready when they are looked at.

        Raises:
            LoaderLost: a source has no loader that is there.
        """
        assert isinstance(reply.outcome, Planned), "of which there is payload"
        plan = reply.outcome.plan
        of_lanes = [pieces_of(plan, lanes) for lanes in wanted]
        pieces = join_pieces(of_lanes)
        holders = np.concatenate([reply.holders[plan.lane_slice(lane)] for lanes in wanted for lane in lanes])
        starts = np.cumsum([0, *map(len, of_lanes)])
        found: list[list[Part]] = [[] for _ in wanted]
        for names, where in self._routes.of(pieces, holders):
            name, loader = self._first_there(names)
            # Where the pieces of each of the lanes begin, among those asked for.
            bounds = np.searchsorted(where, starts)
            ask = loader.bundles.options(num_returns=len(wanted))
            asked = pieces.take(where)
            refs = ask.remote(asked, bounds.tolist(), self._done.pop(name, []))
            at.asked.append((name, asked))
            for i, ref in enumerate(refs if len(wanted) > 1 else [refs]):
                if bounds[i] < bounds[i + 1]:
                    part = where[bounds[i] : bounds[i + 1]] - starts[i]
                    found[i].append(Part(loader=name, where=part, others=len(names) > 1, bundle=ref))
        at.parts |= {lanes: tuple(parts) for lanes, parts in zip(wanted, found, strict=True)}

    def _first_there(self, names: Sequence[str]) -> tuple[str, Any]:
        for name in names:
            with suppress(LoaderLost):
                return name, self._job.find(name)
        raise LoaderLost(f"none of {', '.join(names)} is there")

    async def _call(self, name: str, call: Callable[[Any], Awaitable[Any]], what: str) -> Any:
        """Call an actor, again and again while it is being made anew.

        Raises:
            LoaderTimeout: it did not come back in time.
        """
        timeout_s = self._job.settings.timeout_s
        retries = Retries(timeout_s)
        while True:
            try:
                value = await asyncio.wait_for(call(self._job.find(name)), retries.left_s)
            except TimeoutError:
                raise LoaderTimeout(
                    f"{what}: {name} did not answer within {timeout_s:g} s; raise timeout_s if the data is that slow"
                ) from None
            except (RayError, LoaderLost) as error:
                pause_s = retries.pause_s()
                if pause_s is None:
                    said = str(error) if isinstance(error, LoaderLost) else kind_and_message(error)
                    raise LoaderTimeout(
                        f"{what}: {name} was not there within {timeout_s:g} s ({said})"
                    ) from None
            else:
                if isinstance(value, Raised):
                    raise value.error
                return value
            await asyncio.sleep(pause_s)

    def _let_go(self, stream: str, *, tell: bool = True) -> None:
        """Forget the steps that every rank of the node is done with.

        Args:
            stream: the stream.
            tell: whether to tell the planner how far they are.
        """
        asked = self._asked(stream)
        least = min(asked.values(), default=1 << 62)
        if self._told.get(stream) == least:
            return
        self._told[stream] = least
        for key in [key for key in self._steps if key[0] == stream and key[1] < least]:
            for name, pieces in self._steps.pop(key).asked:
                self._done.setdefault(name, []).append(pieces)
        if not asked:
            del self._told[stream]
        elif tell:
            with suppress(LoaderLost):  # what it does not hear, it is told again with the next sign of life
                self._job.find(PLANNER).ask.remote(stream, self._node, asked)

    def _release(self) -> None:
        """Tell the loaders what they need not keep, if they were not asked for anything since."""
        done, self._done = self._done, {}
        for name, pieces in done.items():
            with suppress(LoaderLost):  # it keeps nothing then
                self._job.find(name).release.remote(pieces)

    def _watch(self) -> None:
        if self._watching is None:
            self._watching = asyncio.get_running_loop().create_task(self._keep_watch())

    async def _keep_watch(self) -> None:
        while True:
            now = time.monotonic()
            try:
                for client in [client for client, at in self._seen.items() if at < now - LOST_AFTER_S]:
                    del self._seen[client]
                    self._said.pop(client, None)
                    taken = self._taking.pop(client, None)
                    if taken is not None:
                        self._let_go(taken.stream)
                        # Or the others would wait until the planner had heard nothing of it for long.
                        self._job.find(PLANNER).leave.remote(taken.stream, self._node, [client])
                # Made anew, it has yet to hear of its ranks, and must not say that there are none.
                if self._seen or now > self._made + LOST_AFTER_S:
                    self._say_alive(self._job.find(PLANNER))
                self._release()
            except LoaderLost:
                pass  # it is being made anew
            except Exception:  # who watches has to go on, whatever happened
                logger.exception("job %s: the watch of the constructor", self._job.name)
            await asyncio.sleep(ALIVE_EVERY_S)
