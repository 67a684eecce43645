"""What the planner's actor keeps of streams: who has their payload, and the logs of planners before it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from omniload.mixture import Mixture, SourceSpec
from omniload.observing.events import EventLog
from omniload.pieces import Cursor, SampleChunk
from omniload.planner import StreamState
from omniload.runtime.feed import SourceFeed
from omniload.runtime.options import Settings
from omniload.runtime.plan_log import PlanLog
from omniload.runtime.ray.feeds import Holders
from omniload.runtime.ray.fleet import Fleet
from omniload.runtime.ray.job import Job
from omniload.runtime.ray.layout import deal
from omniload.runtime.ray.membership import Membership
from omniload.runtime.ray.streams import Streams
from storage import Store
from tests.omniload.mixtures import hard_mixture
from tests.omniload.planning import FakeMetadata

STEPS = 3
METADATA = FakeMetadata([[[3, 4]] * 41], seq_len=8)
SPEC = SourceSpec(path=("memory",), weight=1, on_exhausted="repeat")


class Reader:
    """Reads rows from memory."""

    def read(self, cursor: Cursor, max_samples: int) -> SampleChunk:
        """The chunk from a cursor on."""
        return METADATA.read(0, cursor)

    def evict(self, fraction: float) -> None:
        """There is no payload."""


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Where reads run."""
    with ThreadPoolExecutor(4) as pool:
        yield pool


def test_holders_of_a_step_are_those_of_each_source_and_looked_up_once(pool: ThreadPoolExecutor) -> None:
    """Until the step is released, or sources are shared among others."""
    feeds = [
        SourceFeed(str(source), SPEC, [Reader() for _ in range(num_loaders)], pool, timeout_s=60)
        for source, num_loaders in enumerate((3, 1, 2, 2))
    ]
    tables = []
    for source in (0, 1, 3):  # the third gives nothing to the step
        cursor = Cursor()
        for _ in range(6):
            chunk = feeds[source].read(cursor)
            cursor = chunk.end
            tables.append(chunk.pieces.copy())
            tables[-1]["source"] = source
    pieces = np.random.default_rng(0).permutation(np.concatenate(tables))
    holders = Holders(feeds)
    found = holders.of(7, pieces)
    assert found.dtype == np.uint8
    one_by_one = [
        feeds[piece["source"][0]].holders(piece)[0] if piece["source"][0] != 1 else 0
        for piece in np.split(pieces, len(pieces))
    ]
    assert found.tolist() == one_by_one
    assert {
        (source, holder) for source, holder in zip(pieces["source"].tolist(), one_by_one, strict=True)
    } == {
        *((0, holder) for holder in range(3)),
        (1, 0),
        *((3, holder) for holder in range(2)),
    }
    assert holders.of(7, pieces) is found
    holders.release(before=7)
    assert holders.of(7, pieces) is found, "it is not released yet"
    holders.release(before=8)
    again = holders.of(7, pieces)
    assert again is not found
    holders.clear()
    assert holders.of(7, pieces) is not again
    assert holders.of(8, pieces[:0]).shape == (0,)


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
