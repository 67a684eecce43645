"""The loaders of a job: which there are, that they are there, and that there are as many as it takes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import ray
from ray.exceptions import RayError

from omniload.errors import kind_and_message
from omniload.observing.events import EventKind, EventLog
from omniload.pieces import Cursor
from omniload.runtime.feed import AVOID_S, ChunkReader, LoaderLost
from omniload.runtime.leases import Lease
from omniload.runtime.ray.calls import Raised
from omniload.runtime.ray.job import PLANNER, Job
from omniload.runtime.ray.layout import Layout
from omniload.runtime.ray.loaders import RemoteLoader, make_loaders

if TYPE_CHECKING:
    from omniload.runtime.ray.autoscale import Autoscaler
    from omniload.runtime.ray.streams import Streams
    from omniload.scaling.profile import SourceProfile

_PROFILE_S = 0.5
_LET_GO_S = 10.0
"""How long a loader that is no longer needed stays, for those who do not know yet."""


class Fleet:
    """Makes the loaders of a job, and changes their number.

    Args:
        job: the job.
        events: where it is written down what happens to them.
    """

    def __init__(self, job: Job, events: EventLog) -> None:
        self._job = job
        self._events = events
        # Of no layout that another planner of the job made before.
        self.layout = replace(job.layout, version=time.time_ns())
        """The loaders there are."""
        self._made = time.monotonic()
        self._scaler: Autoscaler | None = None
        self._scaled = ""  # the stream that it observes
        self._lost_at: dict[tuple[str, str], float] = {}

    def make(self) -> None:
        """Make those that are gone for good, and have those that stand by open their sources."""
        make_loaders(self._job, self.layout)
        for loader in self.layout.loaders:
            if loader.shadow:
                with suppress(LoaderLost):
                    self._job.find(loader.name).open.remote()

    def take_over(self) -> None:
        """End the loaders of another planner of the job that are not of this layout."""
        kept = {PLANNER, *(loader.name for loader in self.layout.loaders)}
        others = self._job.actors() - kept
        self._kill(name for name in others if not self._job.is_constructor(name))

    def lost(self, source: str, loader: ChunkReader, why: LoaderLost) -> None:
        """Write down that a loader does not answer, once for all reads that learn of it."""
        assert isinstance(loader, RemoteLoader), "what feeds read from here"
        now = time.monotonic()
        if self._lost_at.get((source, loader.actor), -AVOID_S) > now - AVOID_S:
            return
        self._lost_at[source, loader.actor] = now
        self._events.write(EventKind.ACTOR_LOST, actor=loader.actor, role="loader", reason=str(why))
        shadows = self.layout.shadows(self._job.mixture.names.index(source))
        if shadows and loader.actor not in shadows:
            self._events.write(EventKind.PROMOTED, source=source, actor=shadows[0])

    def lease_moved(self, source: str, cursor: Cursor, lease: Lease, why: str) -> None:
        """Write down that a window goes to another loader."""
        self._events.write(EventKind.LEASE_MOVED, reason=why, **_window(source, cursor, lease))

    def answer_refused(self, source: str, cursor: Cursor, loader: ChunkReader, lease: Lease) -> None:
        """Write down that a loader answered too late."""
        assert isinstance(loader, RemoteLoader), "what feeds read from here"
        window = _window(source, cursor, lease)
        self._events.write(EventKind.STALE_ANSWER_REFUSED, actor=loader.actor, **window)

    def source_lost(self, source: str, error: Exception) -> None:
        """Write down that none of its loaders can read a source."""
        self._events.write(EventKind.SOURCE_LOST, source=source, reason=kind_and_message(error))

    async def scale(self, streams: Streams) -> None:
        """Let the scaler see how the stream goes, and give the sources the loaders it decides on."""
        from omniload.runtime.ray.autoscale import Autoscaler, Counters  # loads what reads sources

        going = list(streams)
        if len(going) != 1:  # none, or ranks that go different ways for a moment
            return
        [(name, stream)] = going
        if self._scaled != name:  # another one, whose counters begin anew
            self._scaled, self._scaler = name, None
        now = Counters(
            at_s=time.monotonic(),
            state=stream.plans.after,
            stalled_s=stream.plans.stalled_s,
            waited_s=stream.feeds.waited_s,
        )
        if self._scaler is None:
            if now.state.step:
                began = replace(now, at_s=self._made)
                self._scaler = Autoscaler(self._job, self.layout, await self._profiles(), began)
                self._divide(self._scaler.layout, streams)
            return
        if not self._scaler.due(now.state):
            return
        layout, decisions = self._scaler.observe(self.layout, now)
        for decision in decisions:
            self._events.write(EventKind.SCALED, **decision.to_json())
        self._change(layout, streams)

    def _divide(self, layout: Layout, streams: Streams) -> None:
        """Read with the loaders that the sources are divided among once it is known what they cost."""
        for source, name in enumerate(self._job.mixture.names):
            before, after = (len(one.readers(source)) for one in (self.layout, layout))
            if before != after:
                said = {"source": name, "actors_before": before, "actors_after": after, "reason": "profile"}
                self._events.write(EventKind.SCALED, **said)
        self._change(layout, streams)

    def _change(self, layout: Layout, streams: Streams) -> None:
        """Read with other loaders from now on."""
        if layout.loaders == self.layout.loaders:
            return
        gone = {one.name for one in self.layout.loaders} - {one.name for one in layout.loaders}
        self.layout = layout
        self.make()
        for _, each in streams:
            each.feeds.share(self._job, layout)
        asyncio.get_running_loop().call_later(_LET_GO_S, self._kill, gone)

    async def _profiles(self) -> list[SourceProfile]:
        found: dict[int, SourceProfile] = {}
        for loader in self.layout.loaders:
            if not loader.shadow:
                asked = self._job.find(loader.name).profile.remote(_PROFILE_S)
                profiles = await asyncio.wait_for(asked, self._job.settings.timeout_s)
                if isinstance(profiles, Raised):
                    raise profiles.error
                found |= profiles
        return [found[source] for source in range(len(found))]

    def _kill(self, names: Iterable[str]) -> None:
        for name in names:
            with suppress(LoaderLost):
                ray.kill(self._job.find(name), no_restart=True)


def _window(source: str, cursor: Cursor, lease: Lease) -> dict[str, object]:
    return {
        "source": source,
        "epoch": cursor.epoch,
        "window": cursor.window,
        "generation": lease.generation,
    }


def end(job: Job) -> None:
    """End every actor of a job, the planner last."""
    for name in sorted(job.actors(), key=lambda one: one == PLANNER):
        try:
            ray.kill(ray.get_actor(name, namespace=job.namespace), no_restart=True)
        except (ValueError, RayError):
            continue  # gone already
