"""The Planner role as an actor: one per job. It also knows who takes part, and ends the job when nobody does."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError

from omniload.errors import LoaderStopped, StateError
from omniload.observing.events import EventKind
from omniload.observing.stats import ActorStats, ClientStats
from omniload.observing.timing import Timing
from omniload.pieces import Cursor, SampleChunk
from omniload.planner import Planner, StreamState
from omniload.planner.decisions import Decision
from omniload.runtime.feed import LoaderLost, SourceFeed
from omniload.runtime.plan_log import PlanLog
from omniload.runtime.plan_stream import Outcome, Planned, PlanStream, StepGone
from omniload.runtime.ray.autoscale import Autoscaler, Counters
from omniload.runtime.ray.calls import Raised, told
from omniload.runtime.ray.job import PLANNER, Job
from omniload.runtime.ray.layout import Layout
from omniload.runtime.ray.loaders import make_loader, remote_loaders
from omniload.runtime.ray.meter import Meter
from omniload.runtime.ray.reporting import Reporter
from omniload.runtime.steps import End
from omniload.scaling.profile import SourceProfile
from storage import Store
from storage.errors import StorageError

logger = logging.getLogger(__name__)

SNAPSHOT_EVERY = 16
"""Steps between snapshots in the plan log, so also the most that are planned again before a new planner serves one."""
READERS = 16
"""Reads that wait for loaders at once."""
LOST_AFTER_S = 15.0
"""A node whose constructor is silent for so long takes part no more."""
ALIVE_EVERY_S = 2.0
"""How often ranks tell constructors that they are there, and constructors the planner."""
_LAST_WORD_S = 0.2
_REPORT_EVERY_S = 1.0
_PROFILE_S = 0.5
_LET_GO_S = 10.0
"""How long a loader that is no longer needed stays, for those who do not know yet."""
_UNUSED_S = 60.0
"""A job that nobody takes part in for so long since it was made is ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """What becomes of a step, and who has its payload."""

    outcome: Planned | End
    """What becomes of it."""
    layout: Layout | None
    """The loaders; None if they are those that who asks knows."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """The planner, made anew, does not know the stream; whoever asks is to open it again."""


class Feeds:
    """Metadata of all sources, from the actors that read them.

    Args:
        job: the job.
        layout: those actors.
        lost: told of a source's loader that does not answer, by its place among them, and why.
    """

    def __init__(self, job: Job, layout: Layout, lost: Callable[[str, int, LoaderLost], None]) -> None:
        self._pool = ThreadPoolExecutor(READERS, thread_name_prefix="omniload-read")
        chaos = job.settings.chaos
        self._feeds = [
            SourceFeed(
                name,
                job.mixture.sources[name],
                remote_loaders(job, layout, source),
                self._pool,
                timeout_s=job.settings.timeout_s,
                num_standbys=len(layout.shadows(source)),
                lost=partial(lost, name),
                chaos=chaos.source(name) if chaos else None,
            )
            for source, name in enumerate(job.mixture.names)
        ]
        self.stopped = False

    @property
    def stale_answers(self) -> int:
        """Answers refused because their lease had moved."""
        return sum(feed.stale_answers for feed in self._feeds)

    def read(self, source: int, cursor: Cursor) -> SampleChunk:
        """Metadata for the planner."""
        if self.stopped:
            raise LoaderStopped("the loader is closed")
        return self._feeds[source].read(cursor)

    def share(self, job: Job, layout: Layout) -> None:
        """Read from other actors from now on."""
        for source, feed in enumerate(self._feeds):
            feed.share(remote_loaders(job, layout, source), len(layout.shadows(source)))

    @property
    def waited_s(self) -> list[float]:
        """How long planning waited for each source."""
        return [feed.waited_s for feed in self._feeds]

    def stop(self) -> None:
        """Begin no further reads."""
        self.stopped = True
        self._pool.shutdown(wait=False, cancel_futures=True)


class PlannerActor:
    """Plans the streams of a job, of which there is one unless a rank goes another way than the others.

    Args:
        job: the job.
    """

    def __init__(self, job: Job) -> None:
        job.enter()
        self._job = job
        self._layout = job.layout
        self._meter = Meter(PLANNER, "planner")
        self._planning = Timing()
        self._reporter = Reporter(job)
        self._scaler: Autoscaler | None = None
        self._streams: dict[str, tuple[PlanStream, Feeds]] = {}
        self._seen: dict[str, float] = {}
        self._made = time.monotonic()
        self._used = False
        self._watching: asyncio.Task[None] | None = None

    async def open(self, client: str, state: StreamState) -> Any:
        """The stream that goes on from a state, begun if there is none: its name."""
        self._watch()
        name = next((name for name, (one, _) in self._streams.items() if one.join(client, state)), None)
        if name is None:
            name = f"{state.step}-{uuid.uuid4().hex[:8]}"
            try:
                log = PlanLog.begin(
                    self._log_of(name), self._job.mixture.names, state, snapshot_every=SNAPSHOT_EVERY
                )
                stream = self._begin(name, state, log)
            except Exception as error:
                return Raised(told(error))
            joined = stream.join(client, state)
            assert joined, "a stream begins with the state that it is begun from"
        for other, (stream, _) in list(self._streams.items()):
            if other != name and client in stream.clients:  # it started again, and takes no more of that one
                await self.leave(other, [client])
        return name

    async def planned(self, name: str, step: int, asked: Mapping[str, int], layout: int) -> Any:
        """What becomes of a step, once it is planned: `Reply`, `Raised` or `Unknown`.

        Args:
            name: of the stream.
            step: the step.
            asked: what the ranks of the node ask for, by name.
            layout: version of the layout that is known there.
        """
        self._watch()
        outcome = await self._planned(name, step, asked)
        if not isinstance(outcome, Planned | End):
            return outcome
        return Reply(outcome=outcome, layout=None if layout == self._layout.version else self._layout)

    async def _planned(self, name: str, step: int, asked: Mapping[str, int]) -> Any:
        if name not in self._streams and not (asked and self._recover(name, min(asked.values()))):
            return Unknown()
        stream, _ = self._streams[name]
        for client in asked.keys() - stream.clients:
            stream.adopt(client, asked[client])
        stream.ask(asked)
        outcome: Outcome = await asyncio.wrap_future(stream.planned(step))
        if isinstance(outcome, StepGone):
            return Unknown()
        return Raised(told(outcome)) if isinstance(outcome, BaseException) else outcome

    def _begin(self, name: str, state: StreamState, log: PlanLog, keep_s: float = 0.0) -> PlanStream:
        feeds = Feeds(self._job, self._layout, self._lost)
        planner = Planner(self._job.mixture, feeds, state)
        ahead = self._job.settings.prefetch_steps + 1
        stream = PlanStream(planner, ahead=ahead, log=log, planning=self._planning, keep_s=keep_s)
        self._streams[name] = (stream, feeds)
        self._reporter.events.write(EventKind.STREAM_OPENED, step=state.step)
        return stream

    def _recover(self, name: str, step: int) -> bool:
        """Go on with a stream of the planner that was before this one; False if it left none that can be."""
        try:
            log = PlanLog.open(self._log_of(name), self._job.mixture.names, snapshot_every=SNAPSHOT_EVERY)
            if log is None:
                return False
            try:
                # Ranks of other nodes may be as far behind.
                recovery = log.recover(max(0, step - self._job.settings.prefetch_steps - 1))
            except StateError:
                recovery = log.recover(step)
            self._begin(name, recovery.state, log, keep_s=LOST_AFTER_S)
        except Exception as error:
            logger.warning("stream %s: its plan log cannot be used, so it is planned anew: %s", name, error)
            return False
        return True

    def _log_of(self, name: str) -> Store:
        return Store(f"{self._job.log}/{name}")

    async def ask(self, name: str, asked: Mapping[str, int]) -> None:
        """Clients have come to ask for steps."""
        if name in self._streams:
            self._streams[name][0].ask(asked)

    async def decide(self, name: str, client: str, decision: Decision, nth: int) -> Any:
        """A client made a decision."""
        if name not in self._streams:
            return Unknown()
        try:
            self._streams[name][0].decide(client, decision, nth)
        except Exception as error:
            return Raised(told(error))
        return None

    async def leave(self, name: str, clients: Sequence[str]) -> None:
        """Clients take no more steps of a stream."""
        if name in self._streams:
            stream, _ = self._streams[name]
            for client in clients:
                stream.leave(client)
            if not stream.clients:
                self._stop(name)

    def _lost(self, source: str, member: int, why: LoaderLost) -> None:
        number = self._job.mixture.names.index(source)
        members = [*self._layout.readers(number), *self._layout.shadows(number)]
        following = members[(member + 1) % len(members)]
        self._reporter.events.write(
            EventKind.ACTOR_LOST, actor=members[member], role="loader", reason=str(why)
        )
        if following in self._layout.shadows(number):
            self._reporter.events.write(EventKind.PROMOTED, source=source, actor=following)

    async def stale_answers(self) -> int:
        """Answers of loaders that were refused."""
        return sum(feeds.stale_answers for _, feeds in self._streams.values())

    async def stats(self) -> tuple[ActorStats, tuple[ClientStats, ...]]:
        """How it is, and the ranks that it speaks for: none."""
        return self._meter.stats(stale_answers=await self.stale_answers()), ()

    async def alive(self, node: str, num_clients: int) -> None:
        """A constructor is there, and so many ranks of its node."""
        self._watch()
        if num_clients:
            self._seen[node] = time.monotonic()
            self._used = True
        elif node in self._seen:
            del self._seen[node]
            # Not before who said this has its answer.
            asyncio.get_running_loop().call_later(_LAST_WORD_S, self._end_if_unused)

    def _watch(self) -> None:
        if self._watching is None:
            if ray.get_runtime_context().was_current_actor_reconstructed:
                self._kill({name for name in names_of(self._job) if name not in self._known()})
            self._watching = asyncio.get_running_loop().create_task(self._keep_watch())

    async def _keep_watch(self) -> None:
        while True:
            await asyncio.sleep(_REPORT_EVERY_S)
            await self._report()
            if self._job.mixture.ray.autoscale:
                await self._scale()
            now = time.monotonic()
            self._seen = {node: at for node, at in self._seen.items() if at > now - LOST_AFTER_S}
            self._end_if_unused()

    async def _report(self) -> None:
        stream = max((one for one, _ in self._streams.values()), key=lambda one: one.step, default=None)
        last = stream.last if stream else None
        await self._reporter.report(
            (await self.stats())[0],
            self._layout,
            list(self._seen),
            last.plan if last else None,
            last.after if last else None,
            self._planning,
        )

    async def _scale(self) -> None:
        """Let the scaler see how the stream goes, and give the sources the loaders it decides on."""
        name, stream = next(((name, one) for name, (one, _) in self._streams.items()), (None, None))
        if name is None or stream is None:
            return
        feeds = self._streams[name][1]
        now = Counters(
            at_s=time.monotonic(), state=stream.after, stalled_s=stream.stalled_s, waited_s=feeds.waited_s
        )
        if self._scaler is None:
            if now.state.step:
                began = replace(now, at_s=self._made)
                self._scaler = Autoscaler(self._job, self._layout, await self._profiles(), began)
            return
        if not self._scaler.due(now.state):
            return
        layout, decisions = self._scaler.observe(self._layout, now)
        for decision in decisions:
            self._reporter.events.write(EventKind.SCALED, **decision.to_json())
        if layout.version != self._layout.version:
            gone = {one.name for one in self._layout.loaders} - {one.name for one in layout.loaders}
            for loader in layout.loaders:
                make_loader(self._job, loader)
            self._layout = layout
            for _, each in self._streams.values():
                each.share(self._job, layout)
            asyncio.get_running_loop().call_later(_LET_GO_S, self._kill, gone)

    async def _profiles(self) -> list[SourceProfile]:
        found: dict[int, SourceProfile] = {}
        for loader in self._layout.loaders:
            if not loader.shadow:
                profiles = await self._job.find(loader.name).profile.remote(_PROFILE_S)
                if isinstance(profiles, Raised):
                    raise profiles.error
                found |= zip(loader.sources, profiles, strict=True)
        return [found[source] for source in range(len(found))]

    def _known(self) -> set[str]:
        """Names of the actors that the job has by its layout."""
        constructors = {name for name in names_of(self._job) if self._job.is_constructor(name)}
        return {PLANNER, *constructors, *(loader.name for loader in self._layout.loaders)}

    def _kill(self, names: set[str]) -> None:
        for name in names:
            with suppress(LoaderLost):
                ray.kill(self._job.find(name), no_restart=True)

    def _end_if_unused(self) -> None:
        if self._seen or (not self._used and time.monotonic() < self._made + _UNUSED_S):
            return
        for name in list(self._streams):
            self._stop(name)
        self._reporter.end("no rank takes part any more")
        end(self._job)

    def _stop(self, name: str) -> None:
        stream, feeds = self._streams.pop(name)
        feeds.stop()
        stream.stop()
        with suppress(StorageError):  # a folder that stays does no harm
            Store(self._job.log).delete_tree(name)


def names_of(job: Job) -> list[str]:
    """Names of the actors of a job that are there."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    return [actor["name"] for actor in actors if actor["namespace"] == job.namespace]


def end(job: Job) -> None:
    """End every actor of a job, the planner last."""
    for name in sorted(names_of(job), key=lambda one: one == PLANNER):
        try:
            ray.kill(ray.get_actor(name, namespace=job.namespace), no_restart=True)
        except (ValueError, RayError):
            continue  # gone already
