"""The Planner role as an actor: one per job. It also knows who takes part, and ends the job when nobody does."""

from __future__ import annotations

import asyncio
import logging
import threading
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
from omniload.planner.decisions import Decision, to_json
from omniload.runtime.feed import AVOID_S, ChunkReader, LoaderLost, SourceFeed
from omniload.runtime.plan_log import PlanLog
from omniload.runtime.plan_stream import Outcome, Planned, PlanStream
from omniload.runtime.ray.autoscale import Autoscaler, Counters
from omniload.runtime.ray.calls import Raised, told
from omniload.runtime.ray.job import PLANNER, Job
from omniload.runtime.ray.layout import Layout
from omniload.runtime.ray.loaders import RemoteLoader, make_loaders, remote_loaders
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
"""A rank that its constructor has not heard of for so long takes part no more."""
_SILENT_AFTER_S = 45.0
"""A node whose constructor is silent for so long takes part no more: on a busy machine it may take a while to be made
anew."""
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
        lost: told of a source's loader that does not answer, and why.
    """

    def __init__(
        self, job: Job, layout: Layout, lost: Callable[[str, ChunkReader, LoaderLost], None]
    ) -> None:
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
        # Of no layout that another planner of the job made before.
        self._layout = replace(job.layout, version=time.time_ns())
        self._meter = Meter(PLANNER, "planner")
        self._planning = Timing()
        self._reporter = Reporter(job)
        self._scaler: Autoscaler | None = None
        self._scaled = ""  # the stream that it observes
        self._streams: dict[str, tuple[PlanStream, Feeds]] = {}
        self._seen: dict[str, float] = {}
        # By stream and client: which node said last that it takes steps, and when. By client: what it opened, and when.
        self._heard: dict[tuple[str, str], tuple[str, float]] = {}
        self._opened: dict[str, tuple[str, float]] = {}
        self._lost_at: dict[tuple[str, str], float] = {}
        self._opening = asyncio.Lock()
        self._made = time.monotonic()
        self._used = False
        self._watching: asyncio.Task[None] | None = None
        # Made anew where every rank is gone, nobody else would call it, and it would stay for ever.
        ray.get_runtime_context().current_actor.wake.remote()

    async def wake(self) -> None:
        """Begin to watch who is there."""
        self._watch()

    async def layout(self) -> Layout:
        """The loaders there are."""
        return self._layout

    async def open(self, client: str, state: StreamState) -> Any:
        """The stream that goes on from a state, begun if there is none: its name."""
        self._watch()
        async with self._opening:
            name = next((name for name, (one, _) in self._streams.items() if one.join(client, state)), None)
            if name is None:
                name = f"{state.step}-{uuid.uuid4().hex[:8]}"
                try:
                    log = await asyncio.to_thread(self._begin_log, name, state)
                    # Ranks that are a little later than this one are to find its first steps.
                    stream = self._begin(name, state, log, keep_s=LOST_AFTER_S)
                except Exception as error:
                    return Raised(told(error))
                joined = stream.join(client, state)
                assert joined, "a stream begins with the state that it is begun from"
        self._opened[client] = name, time.monotonic()
        self._heard[name, client] = "", time.monotonic()
        for other in list(self._streams):
            if other != name:  # it started again, and takes no more of that one
                self._left(other, client)
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
        outcome = await self._planned(name, step, node, asked)
        if not isinstance(outcome, Planned | End):
            return outcome
        return Reply(outcome=outcome, layout=None if layout == self._layout.version else self._layout)

    async def _planned(self, name: str, step: int, node: str, asked: Mapping[str, int]) -> Any:
        async with self._opening:
            if name not in self._streams and not (asked and await self._recover(name, min(asked.values()))):
                return Unknown()
        self._hear(name, node, asked)
        stream, _ = self._streams[name]
        outcome: Outcome = await asyncio.wrap_future(stream.planned(step))
        if isinstance(outcome, LoaderStopped):  # the step is gone, or the stream
            return Unknown()
        return Raised(told(outcome)) if isinstance(outcome, BaseException) else outcome

    def _begin_log(self, name: str, state: StreamState) -> PlanLog:
        names = self._job.mixture.names
        return PlanLog.begin(self._log_of(name), names, state, snapshot_every=SNAPSHOT_EVERY)

    def _begin(self, name: str, state: StreamState, log: PlanLog, keep_s: float) -> PlanStream:
        feeds = Feeds(self._job, self._layout, self._lost)
        planner = Planner(self._job.mixture, feeds, state)
        # Who trains on step t asks for t + 1 already, and may decide about t + prefetch_steps + 2.
        ahead = self._job.settings.prefetch_steps
        stream = PlanStream(planner, ahead=ahead, log=log, planning=self._planning, keep_s=keep_s)
        self._streams[name] = (stream, feeds)
        self._reporter.events.write(EventKind.STREAM_OPENED, step=state.step)
        return stream

    async def _recover(self, name: str, step: int) -> bool:
        """Go on with a stream of the planner that was before this one; False if it left none that can be."""
        try:
            found = await asyncio.to_thread(self._recovered, name, step)
            if found is None:
                return False
            log, state = found
            self._begin(name, state, log, keep_s=LOST_AFTER_S)
        except Exception as error:
            logger.warning("stream %s: its plan log cannot be used, so it is planned anew: %s", name, error)
            return False
        return True

    def _recovered(self, name: str, step: int) -> tuple[PlanLog, StreamState] | None:
        log = PlanLog.open(self._log_of(name), self._job.mixture.names, snapshot_every=SNAPSHOT_EVERY)
        if log is None:
            return None
        try:
            try:
                # Ranks of other nodes may be as far behind.
                recovery = log.recover(max(0, step - self._job.settings.prefetch_steps - 1))
            except StateError:
                recovery = log.recover(step)
        except BaseException:
            log.close()
            raise
        return log, recovery.state

    def _log_of(self, name: str) -> Store:
        return Store(f"{self._job.log}/{name}")

    async def ask(self, name: str, node: str, asked: Mapping[str, int]) -> None:
        """Clients of a node have come to ask for steps."""
        self._hear(name, node, asked)

    def _hear(self, name: str, node: str, asked: Mapping[str, int]) -> None:
        if name not in self._streams:
            return
        stream, now = self._streams[name][0], time.monotonic()
        for client, step in asked.items():
            if client not in stream.clients:
                opened, at = self._opened.get(client, (name, now))
                if opened != name and at > now - LOST_AFTER_S:
                    continue  # this was said before it opened the other, and would have its clients wait for nobody
                stream.adopt(client, step)
            self._heard[name, client] = node, now
        stream.ask(asked)

    async def decide(self, name: str, client: str, asked: int, decision: Decision, nth: int) -> Any:
        """A client made a decision.

        Args:
            name: of the stream.
            client: the rank.
            asked: the first step it is not done with.
            decision: what it decided.
            nth: how often it decided just this, this time included.
        """
        if name not in self._streams:
            return Unknown()
        stream, _ = self._streams[name]
        stream.adopt(client, asked)  # if this planner has yet to hear of it
        self._heard.setdefault((name, client), ("", time.monotonic()))
        try:
            await asyncio.to_thread(stream.decide, client, decision, nth)  # it is written down first
        except Exception as error:
            return Raised(told(error))
        self._reporter.events.write(EventKind.DECISION, decision=to_json(decision))
        return None

    async def leave(self, name: str, node: str, clients: Sequence[str]) -> None:
        """Clients of a node take no more steps of a stream."""
        for client in clients:
            if self._heard.get((name, client), ("", 0.0))[0] in ("", node):  # or else it goes on elsewhere
                self._left(name, client)

    def _left(self, name: str, client: str) -> None:
        self._heard.pop((name, client), None)
        if name in self._streams:
            stream, _ = self._streams[name]
            if client in stream.clients:
                stream.leave(client)
                if not stream.clients:
                    self._stop(name)

    def _lost(self, source: str, loader: ChunkReader, why: LoaderLost) -> None:
        """Write down that a loader does not answer, once for all reads that learn of it."""
        assert isinstance(loader, RemoteLoader), "what feeds read from here"
        now = time.monotonic()
        if self._lost_at.get((source, loader.actor), -AVOID_S) > now - AVOID_S:
            return
        self._lost_at[source, loader.actor] = now
        self._reporter.events.write(EventKind.ACTOR_LOST, actor=loader.actor, role="loader", reason=str(why))
        shadows = self._layout.shadows(self._job.mixture.names.index(source))
        if shadows and loader.actor not in shadows:
            self._reporter.events.write(EventKind.PROMOTED, source=source, actor=shadows[0])

    async def stale_answers(self) -> int:
        """Answers of loaders that were refused."""
        return sum(feeds.stale_answers for _, feeds in self._streams.values())

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
            self._hear(name, node, of_stream)
        if num_clients:
            self._seen[node] = time.monotonic()
            self._used = True
        elif node in self._seen:
            del self._seen[node]
            # Not before who said this has its answer.
            asyncio.get_running_loop().call_later(_LAST_WORD_S, self._end_if_unused)

    def _watch(self) -> None:
        if self._watching is None:
            self._make_loaders()
            if ray.get_runtime_context().was_current_actor_reconstructed:
                kept = {PLANNER, *(loader.name for loader in self._layout.loaders)}
                others = self._job.actors() - kept
                self._kill({name for name in others if not self._job.is_constructor(name)})
            self._watching = asyncio.get_running_loop().create_task(self._keep_watch())

    async def _keep_watch(self) -> None:
        while True:
            await asyncio.sleep(_REPORT_EVERY_S)
            try:
                now = time.monotonic()
                self._seen = {node: at for node, at in self._seen.items() if at > now - _SILENT_AFTER_S}
                for (name, client), (_, at) in list(self._heard.items()):
                    if at < now - _SILENT_AFTER_S:
                        self._left(name, client)
                self._end_if_unused()
                self._make_loaders()
                await self._report()
                if self._job.mixture.ray.autoscale:
                    await self._scale()
            except Exception:  # who watches has to go on, whatever happened
                logger.exception("job %s: the planner's watch", self._job.name)

    def _make_loaders(self) -> None:
        """Make those that are gone for good, and have those that stand by open their sources."""
        make_loaders(self._job, self._layout)
        for loader in self._layout.loaders:
            if loader.shadow:
                with suppress(LoaderLost):
                    self._job.find(loader.name).open.remote()

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
        if len(self._streams) != 1:  # none, or ranks that go different ways for a moment
            return
        [(name, (stream, feeds))] = self._streams.items()
        if self._scaled != name:  # another one, whose counters begin anew
            self._scaled, self._scaler = name, None
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
            self._layout = layout
            self._make_loaders()
            for _, each in self._streams.values():
                each.share(self._job, layout)
            asyncio.get_running_loop().call_later(_LET_GO_S, self._kill, gone)

    async def _profiles(self) -> list[SourceProfile]:
        found: dict[int, SourceProfile] = {}
        for loader in self._layout.loaders:
            if not loader.shadow:
                asked = self._job.find(loader.name).profile.remote(_PROFILE_S)
                profiles = await asyncio.wait_for(asked, self._job.settings.timeout_s)
                if isinstance(profiles, Raised):
                    raise profiles.error
                found |= zip(loader.sources, profiles, strict=True)
        return [found[source] for source in range(len(found))]

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
        stream.stop()  # first, so that this is what ends it
        feeds.stop()
        threading.Thread(
            target=self._forget, args=(name, stream), name="omniload-forget", daemon=True
        ).start()

    def _forget(self, name: str, stream: PlanStream) -> None:
        """Remove the log of a stream that nobody takes any more."""
        stream.join_thread(_LET_GO_S)
        with suppress(StorageError):  # a folder that stays does no harm
            Store(self._job.log).delete_tree(name)


def end(job: Job) -> None:
    """End every actor of a job, the planner last."""
    for name in sorted(job.actors(), key=lambda one: one == PLANNER):
        try:
            ray.kill(ray.get_actor(name, namespace=job.namespace), no_restart=True)
        except (ValueError, RayError):
            continue  # gone already
