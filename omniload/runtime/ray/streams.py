"""The streams of a job, of which there is one unless a rank goes another way than the others; and their logs.

The log of a stream is a folder of its name in that of the job. It is removed once nobody takes the stream any more,
because it ended or its ranks opened another. Those that a planner left which is gone are removed when every rank has
had the time to ask for its stream again, and all of them when the job ends.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from omniload.errors import StateError
from omniload.observing.events import EventKind, EventLog
from omniload.observing.timing import Timing
from omniload.planner import Planner, StreamState
from omniload.planner.decisions import DropSource, to_json
from omniload.runtime.plan_log import PlanLog
from omniload.runtime.plan_stream import PlanStream
from omniload.runtime.ray.feeds import Feeds
from omniload.runtime.ray.fleet import Fleet
from omniload.runtime.ray.job import Job
from omniload.runtime.ray.membership import LOST_AFTER_S
from storage import Store
from storage.background import BackgroundThread
from storage.errors import StorageError

logger = logging.getLogger(__name__)

SNAPSHOT_EVERY = 16
"""Steps between snapshots in the plan log, so also the most that are planned again before a new planner serves one."""
_FORGET_S = 10.0
"""How long a stream that is stopped is waited for before its log is removed."""
_CLOSE_S = 2.0
"""The same where the job ends with it."""


@dataclass(frozen=True, slots=True)
class Stream:
    """A stream that is being planned."""

    plans: PlanStream
    """Its plans."""
    feeds: Feeds
    """Where its metadata comes from."""


class Streams:
    """Begins streams, goes on with those of a planner that is gone, and stops them.

    Args:
        job: the job.
        fleet: its loaders.
        events: where it is written down what happens.
    """

    def __init__(self, job: Job, fleet: Fleet, events: EventLog) -> None:
        self._job = job
        self._fleet = fleet
        self._events = events
        self._streams: dict[str, Stream] = {}
        self._opening = asyncio.Lock()
        self.planning = Timing()
        """How long plans took."""

    def __iter__(self) -> Iterator[tuple[str, Stream]]:
        """Name and stream of each."""
        return iter(list(self._streams.items()))

    def get(self, name: str) -> Stream | None:
        """The stream of that name, if it is being planned."""
        return self._streams.get(name)

    async def open(self, client: str, state: StreamState) -> str:
        """Name of the stream that goes on from a state, which the client takes now; begun if there is none."""
        async with self._opening:
            for name, stream in self:
                if stream.plans.join(client, state):
                    return name
            name = f"{state.step}-{uuid.uuid4().hex[:8]}"
            log = await asyncio.to_thread(self._begin_log, name, state)
            joined = self._begin(name, state, log).plans.join(client, state)
            assert joined, "a stream begins with the state that it is begun from"
            return name

    async def find(self, name: str, step: int | None) -> Stream | None:
        """A stream; of a planner that is gone, if it left a log from which a step can be come to again."""
        async with self._opening:
            if name not in self._streams and step is not None:
                await self._recover(name, step)
            return self._streams.get(name)

    def stop(self, name: str) -> None:
        """Plan no more of a stream that nobody takes any more, and remove its log."""
        stream = self._streams.pop(name)
        stream.plans.stop()  # first, so that this is what ends it
        stream.feeds.stop()
        BackgroundThread(partial(self._forget, name, stream.plans), name="omniload-forget").start()

    def sweep(self) -> None:
        """Remove the logs that planners before this one left, of streams that nobody has asked for again.

        Raises:
            StorageError: they cannot be listed, or not be removed.
        """
        logs = Store(self._job.log)
        for name in {one.path.partition("/")[0] for one in logs.list()} - self._streams.keys():
            logs.delete_tree(name)

    def close(self) -> None:
        """Stop all streams, and leave no log.

        Raises:
            StorageError: they cannot be listed, or not be removed.
        """
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.plans.stop()
            stream.feeds.stop()
        for stream in streams.values():
            stream.plans.join_thread(_CLOSE_S)
        self.sweep()

    def _begin_log(self, name: str, state: StreamState) -> PlanLog:
        names = self._job.mixture.names
        return PlanLog.begin(self._log_of(name), names, state, snapshot_every=SNAPSHOT_EVERY)

    def _begin(self, name: str, state: StreamState, log: PlanLog) -> Stream:
        feeds = Feeds(self._job, self._fleet)
        planner = Planner(self._job.mixture, feeds, state, partial(self._write_down, log))
        plans = PlanStream(
            planner,
            # Who trains on step t asks for t + 1 already, and may decide about t + prefetch_steps + 2.
            ahead=self._job.settings.prefetch_steps,
            log=log,
            planning=self.planning,
            # Ranks that are a little later than this one are to find its first steps.
            keep_s=LOST_AFTER_S,
        )
        stream = self._streams[name] = Stream(plans, feeds)
        self._events.write(EventKind.STREAM_OPENED, step=state.step)
        return stream

    def _write_down(self, log: PlanLog, decision: DropSource) -> None:
        log.decided(decision)
        self._events.write(EventKind.DECISION, decision=to_json(decision))

    async def _recover(self, name: str, step: int) -> None:
        try:
            found = await asyncio.to_thread(self._recovered, name, step)
            if found is not None:
                log, state = found
                self._begin(name, state, log)
        except Exception as error:
            logger.warning("stream %s: its plan log cannot be used, so it is planned anew: %s", name, error)

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

    def _forget(self, name: str, plans: PlanStream) -> None:
        plans.join_thread(_FORGET_S)
        with suppress(StorageError):  # a folder that stays does no harm
            Store(self._job.log).delete_tree(name)
