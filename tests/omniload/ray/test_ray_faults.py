"""Actors of a job die, hang or lose their data while it runs; the ranks get what they would have got."""

from __future__ import annotations

import itertools
import json
import logging
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray

from omniload import DataLoader, MixtureLoader
from omniload.errors import SourceNotFound
from omniload.observing.events import Event, EventKind, read_events
from omniload.observing.job_dir import events_path, job_dir
from omniload.pieces import Cursor
from omniload.planner.decisions import DropSource, to_json
from omniload.runtime.ray.loaders import THREADS
from tests.omniload.mixtures import LANES, hard_mixture
from tests.omniload.ray.jobs import Jobs, digest, lanes_of, until

STEPS, KILLED_AT = 14, 4
WAIT_S = 180.0


def inline(mixture: Any) -> dict[tuple[int, int], str]:
    """The lanes of the undisturbed run."""
    loader = DataLoader(mixture, execution="inline")
    assert isinstance(loader, MixtureLoader)
    return lanes_of(loader)


def events(job: str, kind: EventKind) -> list[Event]:
    return [one for one in read_events(events_path(job)) if one.event == kind]


def pid(job: str, name: str) -> int:
    """The process of an actor; 0 while it is being made anew."""
    try:
        actor = ray.get_actor(name, namespace=f"omniload-{job}")
        return int(ray.get(actor.stats.remote(), timeout=30)[0].pid)
    except Exception:
        return 0


def take(ranks: Sequence[MixtureLoader], at: dict[int, Any]) -> dict[tuple[int, int], str]:
    """All lanes of the ranks, step by step; before step n is asked for, ``at[n]`` is called."""
    found = {}
    for number, groups in enumerate(zip(*(rank.steps() for rank in ranks), strict=True)):
        for group in groups:
            lanes = of_group(group)
            assert not found.keys() & lanes.keys()
            found |= lanes
        at.get(number + 1, lambda: None)()
    return found


def of_group(group: Sequence[Any]) -> dict[tuple[int, int], str]:
    """Lanes of one rank and step, as those of a rank that has all of them."""
    for lane in group:
        lane["is_last_in_step"] = lane["lane"] == LANES - 1
    return {(lane["step"], lane["lane"]): digest(lane) for lane in group}


def add_rest(rank: MixtureLoader, found: dict[tuple[int, int], str]) -> None:
    """Take steps to the end, and note their lanes."""
    for group in rank.steps():
        found |= of_group(group)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("role", "shadows"),
    [("loader-0", 0), ("loader-0", 1), ("loader-0.shadow", 1), ("constructor", 0), ("planner", 0)],
    ids=["loader", "loader with a shadow", "shadow", "constructor", "planner"],
)
def test_ranks_get_the_same_lanes_when_an_actor_is_killed(jobs: Jobs, role: str, shadows: int) -> None:
    mixture = hard_mixture(jobs.folder, steps=STEPS)
    job = f"-{role}-{shadows}"
    ranks = [
        jobs.loader(mixture, job=job, ray={"shadows": shadows}, dp_rank=rank, dp_size=2, timeout_s=WAIT_S)
        for rank in range(2)
    ]
    killed = []

    def kill() -> None:
        name = next(name for name in jobs.actors(job) if name.startswith(role))
        killed.append((name, jobs.kill(role, job)))

    found = take(ranks, {KILLED_AT: kill})
    [(name, before)] = killed
    until(lambda: pid(jobs.name + job, name) not in (0, before), f"{name} is made anew", WAIT_S)
    for rank in ranks:
        rank.close()
    assert found == inline(mixture)
    opened = len(events(jobs.name + job, EventKind.STREAM_OPENED))
    assert opened == (2 if role == "planner" else 1), "the ranks go on in the stream that they were in"


@pytest.mark.slow
def test_a_planner_that_takes_over_goes_on_with_the_log_of_the_one_that_was_killed(jobs: Jobs) -> None:
    mixture = hard_mixture(jobs.folder, steps=40)
    ranks = [jobs.loader(mixture, dp_rank=rank, dp_size=2, timeout_s=WAIT_S) for rank in range(2)]
    streams = []

    def note() -> None:
        streams.append(sorted(path.name for path in (job_dir(jobs.name) / "plans").iterdir()))

    def kill() -> None:
        note()
        jobs.kill("planner")

    found = take(ranks, {25: kill, 32: kill, 39: note})
    for rank in ranks:
        rank.close()
    assert found == inline(mixture)
    assert len(streams[0]) == 1
    assert streams == [streams[0]] * 3
    opened = [one.fields["step"] for one in events(jobs.name, EventKind.STREAM_OPENED)]
    assert opened[:2] == [0, 16], "from the snapshot before the step"
    assert len(opened) == 3


@pytest.mark.slow
def test_a_loader_that_hangs_is_passed_over(jobs: Jobs, tmp_path: Path) -> None:
    mixture = hard_mixture(jobs.folder, steps=24)
    for spec in mixture["sources"].values():
        held = {"call": "tests.omniload.ray.held:hold", "args": {"folder": str(tmp_path)}}
        spec["transforms"] = [*spec.get("transforms", ()), held]
    expected = inline(mixture)
    loader = jobs.loader(mixture, ray={"shadows": 1, "slow_s": 2.0}, timeout_s=WAIT_S)
    found = take([loader], {KILLED_AT: (tmp_path / "armed").touch})
    assert (tmp_path / "held").exists()
    assert not (tmp_path / "freed").exists(), "it hangs to this moment"
    until(lambda: events(jobs.name, EventKind.STEP_SLOW), "the step that was waited for is written down")
    loader.close()
    (tmp_path / "freed").touch()
    assert found == expected
    lost = events(jobs.name, EventKind.ACTOR_LOST)
    assert any("did not answer in time" in one.fields["reason"] for one in lost)
    moved = events(jobs.name, EventKind.LEASE_MOVED)
    assert any("did not answer in time" in one.fields["reason"] for one in moved)
    assert all(one.fields["generation"] > 0 for one in moved)
    assert all(one.fields["stall_s"] > 1 for one in events(jobs.name, EventKind.STEP_SLOW))


@pytest.mark.slow
def test_a_source_that_is_gone_ends_every_rank_with_the_same_error(
    jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    mixture = hard_mixture(jobs.folder, steps=10_000)
    ranks = [jobs.loader(mixture, dp_rank=rank, dp_size=2, timeout_s=WAIT_S) for rank in range(2)]
    iterators = [iter(rank.steps()) for rank in ranks]
    for _ in range(KILLED_AT):
        for iterator in iterators:
            next(iterator)
    shutil.rmtree(jobs.folder / "long")
    jobs.kill("loader")  # it holds its files open; whoever takes its place cannot
    said = []
    for iterator in iterators:
        with pytest.raises(SourceNotFound, match="long") as raised:
            for _ in iterator:
                pass
        said.append(str(raised.value))
    assert said[0] == said[1]
    assert "\n" not in said[0]
    for rank in ranks:
        rank.close()


@pytest.mark.slow
def test_a_source_that_may_leave_does_so_on_every_rank_at_one_step_and_for_good(jobs: Jobs) -> None:
    mixture = hard_mixture(jobs.folder, steps=40)
    mixture["sources"]["long"]["on_unreachable"] = "drop_source"
    ranks = [jobs.loader(mixture, dp_rank=rank, dp_size=2, timeout_s=WAIT_S) for rank in range(2)]

    def lose() -> None:
        (jobs.folder / "long").rename(jobs.folder / "gone")

    found = take(ranks, {KILLED_AT: lose, 30: lambda: jobs.kill("planner")})
    [decision] = ranks[0].control.log
    assert ranks[1].control.log == ranks[0].control.log
    assert isinstance(decision, DropSource)
    assert KILLED_AT < decision.step < 30
    assert ranks[0].state_dict() == ranks[1].state_dict()
    assert [one.fields["source"] for one in events(jobs.name, EventKind.SOURCE_LOST)][:1] == ["long"]
    written = [one.fields["decision"] for one in events(jobs.name, EventKind.DECISION)]
    assert written == [to_json(decision)]
    for rank in ranks:
        rank.close()
    (jobs.folder / "gone").rename(jobs.folder / "long")
    replay = DataLoader(mixture, execution="inline")
    assert isinstance(replay, MixtureLoader)
    replay.control.replay([decision])
    assert lanes_of(replay) == found


@pytest.mark.slow
def test_a_step_that_was_planned_before_its_source_was_lost_ends_every_rank_until_it_can_be_read(
    jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the source may leave the stream, too: it would with a later step, and a plan is never changed."""
    caplog.set_level(logging.CRITICAL)
    mixture = hard_mixture(jobs.folder, steps=40)
    mixture["sources"]["long"]["on_unreachable"] = "drop_source"
    # Planned far ahead, and fetched one by one.
    ahead = {"ray": {"prefetch_bytes": 1}, "prefetch_steps": 8}
    ranks = [jobs.loader(mixture, dp_rank=rank, dp_size=2, timeout_s=WAIT_S, **ahead) for rank in range(2)]
    found: dict[tuple[int, int], str] = {}
    for groups in itertools.islice(zip(*(rank.steps() for rank in ranks), strict=True), KILLED_AT):
        for group in groups:
            found |= of_group(group)
    (jobs.folder / "long").rename(jobs.folder / "gone")
    jobs.kill("loader")  # it has files open, and payload; whoever takes its place has neither
    said = []
    for rank in ranks:
        with pytest.raises(SourceNotFound, match="long") as raised:
            add_rest(rank, found)
        [note] = raised.value.__notes__
        step = rank.state_dict()["stream"]["step"]
        assert note.startswith(f"step {step} was planned before this source was lost")
        assert KILLED_AT <= step < 40
        said.append(str(raised.value))
    assert said[0] == said[1]
    assert "\n" not in said[0]
    (jobs.folder / "gone").rename(jobs.folder / "long")
    with ThreadPoolExecutor(
        len(ranks)
    ) as pool:  # at once, though one may have got a step more than the other
        list(pool.map(add_rest, ranks, itertools.repeat(found)))
    replay = DataLoader(mixture, execution="inline")
    assert isinstance(replay, MixtureLoader)
    replay.control.replay(ranks[0].control.log)
    assert lanes_of(replay) == found
    for rank in ranks:
        rank.close()


@pytest.mark.slow
def test_slow_storage_keeps_no_loader_from_saying_how_it_is(jobs: Jobs, tmp_path: Path) -> None:
    mixture = hard_mixture(jobs.folder, steps=3)
    spec = mixture["sources"]["filtered"]
    spec["transforms"] = [{"call": "tests.omniload.ray.held:wait", "args": {"folder": str(tmp_path)}}]
    mixture["sources"] = {f"s{i}": spec for i in range(THREADS + 2)}
    loader = jobs.loader(mixture, timeout_s=WAIT_S)
    with ThreadPoolExecutor(1) as pool:
        try:
            taken = pool.submit(list, loader.steps())
            actor = ray.get_actor("loader-0", namespace=f"omniload-{jobs.name}")
            reads = [actor.read.remote(source, Cursor(), 1) for source in range(THREADS + 2)]
            assert not ray.wait(reads, timeout=3)[0], "all that it can read at once is waited for"
            assert ray.get(actor.stats.remote(), timeout=WAIT_S / 2)[0].name == "loader-0"
            assert ray.get(actor.failures.remote(), timeout=WAIT_S / 2) == []
            assert not taken.done()
        finally:
            (tmp_path / "freed").touch()
        assert len(taken.result(WAIT_S)) == 3
    loader.close()


@pytest.mark.slow
def test_after_any_crash_what_was_trained_up_to_a_checkpoint_is_that_of_the_run_without(
    jobs: Jobs, cluster: str, tmp_path: Path
) -> None:
    steps, every = 30, 3
    mixture = hard_mixture(jobs.folder, steps=steps)
    orders = {
        "mixture": mixture,
        "step_s": 0.02,
        "every": every,
        "folder": str(tmp_path),
        "keys": {"timeout_s": WAIT_S, "ray": {"address": cluster, "job": jobs.name, "loaders": 1}},
    }
    order = random.Random(3)
    crashes = 0
    for after in (order.randrange(2, 9) for _ in range(3)):
        crashes += _train(orders, kill_after=after)
    assert crashes == 3
    assert not _train(orders, kill_after=steps + 1)
    expected = [one for _, one in sorted(inline(mixture).items())]
    kept = sorted(tmp_path.glob("step-*.json"))
    assert len(kept) == steps // every
    for path in kept:
        saved = json.loads(path.read_text())
        assert saved["trained"] == expected[: LANES * saved["step"]]
    assert saved["trained"] == expected


def _train(orders: dict[str, Any], kill_after: int) -> bool:
    """Train until so many steps are taken, and kill the process; whether it came to that."""
    command = [sys.executable, "-m", "tests.omniload.ray.rank_script", json.dumps(orders)]
    taken = 0
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"RANK": "0"}
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            taken += '"step"' in line
            if taken == kill_after:
                process.kill()
                return True
        assert process.wait(WAIT_S) == 0
    return False
