"""Sources are divided among loaders by what they cost, while the stream goes on as it would have."""

from __future__ import annotations

import time
from itertools import islice
from typing import Any

import pytest
import ray

from omniload import DataLoader
from omniload.observing.events import EventKind, read_events
from omniload.observing.job_dir import events_path
from omniload.runtime.ray.layout import Layout
from tests.omniload.mixtures import hard_mixture
from tests.omniload.ray.jobs import TIMEOUT_S, Jobs, digest

MORE_STEPS = 5


@pytest.mark.slow
def test_a_slow_source_gets_loaders_of_its_own_while_the_stream_goes_on(jobs: Jobs) -> None:
    mixture = hard_mixture(jobs.folder, steps=10_000)
    slow = {"call": "tests.omniload.ray.held:slow", "args": {"seconds": 0.02}}
    mixture["sources"]["long"]["transforms"] = [slow]
    found: list[list[str]] = []
    with jobs.loader(mixture, ray={"autoscale": True}, timeout_s=2 * TIMEOUT_S) as loader:
        planner = ray.get_actor("planner", namespace=f"omniload-{jobs.name}")

        def layout() -> Layout:
            now: Any = ray.get(planner.layout.remote(), timeout=TIMEOUT_S)
            assert isinstance(now, Layout)
            return now

        first, deadline, last = layout(), time.monotonic() + TIMEOUT_S, 1 << 30
        for group in loader.steps():
            found.append([digest(lane) for lane in group])
            if last == 1 << 30 and layout().loaders != first.loaders:
                last = len(found) + MORE_STEPS
            if len(found) == last:
                break
            assert time.monotonic() < deadline, "the layout never changed"
        now = layout()
    source = sorted(mixture["sources"]).index("long")
    assert source == loader.mixture.names.index("long")
    assert len(first.readers(source)) == 1 < len(now.readers(source))
    assert all(one.sources == (source,) for one in now.loaders if one.name in now.readers(source))
    with DataLoader(mixture, execution="inline") as one_process:
        expected = [[digest(lane) for lane in group] for group in islice(one_process.steps(), len(found))]
    assert found == expected
    events = read_events(events_path(jobs.name))
    [scaled] = [one for one in events if one.event == EventKind.SCALED and one.fields["source"] == "long"][:1]
    assert scaled.fields["actors_after"] == len(now.readers(source))
    # Whether there are any depends on what was being read just then.
    refused = [one for one in events if one.event == EventKind.STALE_ANSWER_REFUSED]
    assert {one.fields["actor"] for one in refused} <= set(first.readers(source))
