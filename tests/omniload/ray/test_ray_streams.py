"""What the planner's actor keeps of streams: the logs of planners before it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from omniload.mixture import Mixture
from omniload.observing.events import EventLog
from omniload.planner import StreamState
from omniload.runtime.options import Settings
from omniload.runtime.plan_log import PlanLog
from omniload.runtime.ray.fleet import Fleet
from omniload.runtime.ray.job import Job
from omniload.runtime.ray.layout import deal
from omniload.runtime.ray.membership import Membership
from omniload.runtime.ray.streams import Streams
from storage import Store
from tests.omniload.mixtures import hard_mixture

STEPS = 3


def job_of(folder: Path) -> Job:
    """A job whose streams have come to their end."""
    mixture = Mixture.load(hard_mixture(folder / "data", steps=STEPS))
    return Job(
        name="job",
        digest="",
        mixture=mixture,
        settings=Settings(
            split="train", prefetch_steps=1, buffer_bytes=1 << 20, timeout_s=60, derived=(), chaos=None
        ),
        layout=deal([1.0] * len(mixture.names), 1, 0),
        log=str(folder / "logs"),
        slow_s=10,
        loader_options={},
        import_path=(),
    )


def test_logs_that_nobody_asks_for_are_removed_once_45_s_after_a_planner_took_over(tmp_path: Path) -> None:
    """Not before, as ranks may have yet to ask for them, and not those that are planned by then."""
    job = job_of(tmp_path)
    at_end = replace(StreamState.initial(len(job.mixture.names)), step=STEPS)
    for name in ("left", "asked-for"):
        PlanLog.begin(Store(f"{job.log}/{name}"), job.mixture.names, at_end).close()

    def logs() -> set[str]:
        return {
            path.name for path in Path(job.log).iterdir() if any(one.is_file() for one in path.rglob("*"))
        }

    async def lives() -> None:
        events = EventLog(tmp_path / "events", job.name)
        streams = Streams(job, Fleet(job, events), events)
        now = 1000.0
        members = Membership(streams, clock=lambda: now)
        own = await streams.open("0/0", at_end)
        now += 44.9
        members.sweep()
        assert logs() == {"left", "asked-for", own}
        assert await streams.find("asked-for", STEPS) is not None
        now += 0.1
        members.sweep()
        assert logs() == {"asked-for", own}
        PlanLog.begin(Store(f"{job.log}/of another"), job.mixture.names, at_end).close()
        now += 1000
        members.sweep()
        assert logs() == {"asked-for", own, "of another"}
        streams.close()
        assert logs() == set()

    asyncio.run(lives())
