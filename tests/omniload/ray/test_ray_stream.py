"""The stream of a loader whose roles are actors: the one that threads of a single process give."""

from __future__ import annotations

import gc
import json
import logging
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from omniload import Chaos, DataLoader
from omniload.errors import (
    DecisionError,
    JobNotFound,
    LoaderStopped,
    SampleError,
    SourceNotFound,
    StateError,
    TooManyFailures,
)
from omniload.observing import job_dir
from omniload.observing.events import EventKind, read_events
from omniload.runtime.ray.runtime import RayRuntime
from tests.omniload.mixtures import LANES, hard_mixture, write_parquet
from tests.omniload.ray.jobs import Jobs, digest, lanes_of, until
from tests.omniload.test_laws import WAYS

STEPS = 12


def inline(mixture: Any, **keys: Any) -> Any:
    return DataLoader(mixture, execution="inline", **keys)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["as by default", "uneven lanes, delayed"])
def test_batches_are_those_of_the_inline_runtime_byte_for_byte(jobs: Jobs, way: str) -> None:
    mixture = hard_mixture(jobs.folder, steps=STEPS, **WAYS[way])
    expected = lanes_of(inline(mixture))
    assert len(expected) == STEPS * LANES
    assert lanes_of(jobs.loader(mixture, ray={"loaders": 2})) == expected


@pytest.mark.slow
def test_a_state_of_one_runtime_goes_on_in_the_other_on_other_ranks(jobs: Jobs) -> None:
    mixture = hard_mixture(jobs.folder, steps=STEPS)
    whole = lanes_of(inline(mixture))
    with jobs.loader(mixture) as loader:
        states = {0: loader.state_dict()}
        for group in loader.steps():
            states[group[0]["step"] + 1] = json.loads(json.dumps(loader.state_dict()))
        assert loader.samples(group[-1]).equals(_samples(mixture, states[STEPS - 1], group[-1]))
        ledger = loader.ledger()
    with inline(mixture) as other:
        other.load_state_dict(states[STEPS])
        assert other.state_dict() == states[STEPS]
        assert other.ledger() == ledger
    for step in (1, 5, STEPS - 1):
        left = {key: value for key, value in whole.items() if key[0] >= step}
        with inline(mixture) as other:
            other.load_state_dict(states[step])
            assert lanes_of(other) == left
    with jobs.loader(mixture, dp_rank=1, dp_size=3) as other:
        for step in (1, 5):
            other.load_state_dict(states[step])
            found = {}
            for lane in other:
                lane["is_last_in_step"] = lane["lane"] == LANES - 1
                found[lane["step"], lane["lane"]] = digest(lane)
            left = {key: one for key, one in whole.items() if key[0] >= step and key[1] % 3 == 1}
            assert found == left
            assert other.state_dict() == states[STEPS]


def _samples(mixture: Any, state: Any, lane: Any) -> Any:
    with inline(mixture) as other:
        other.load_state_dict(state)
        for _ in other:
            pass
        return other.samples(lane)


@pytest.mark.slow
def test_ranks_share_one_stream_and_one_set_of_loaders(jobs: Jobs) -> None:
    mixture = hard_mixture(jobs.folder, steps=STEPS)
    whole = lanes_of(inline(mixture))
    ranks = [jobs.loader(mixture, dp_rank=rank, dp_size=2) for rank in range(2)]
    assert len([name for name in jobs.actors() if name.startswith("loader")]) == 1
    found = {}
    for groups in zip(*(rank.steps() for rank in ranks), strict=True):
        assert ranks[0].state_dict() == ranks[1].state_dict()
        for rank, group in zip(ranks, groups, strict=True):
            for lane in group:
                lane["is_last_in_step"] = lane["lane"] == LANES - 1
                found[lane["step"], lane["lane"]] = digest(lane)
            assert rank.plan(group[0]["step"]).hash == ranks[0].plan(group[0]["step"]).hash
    assert found == whole
    ranks[0].close()
    assert jobs.actors(), "the other rank is still there"
    ranks[1].close()
    until(lambda: not jobs.actors(), "the actors of a job that all ranks have left end")


@pytest.mark.slow
def test_nobody_waits_for_a_rank_whose_loader_was_collected_while_it_asked_for_a_step(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask_for = RayRuntime._ask_for

    def ask_slowly(self: RayRuntime, step: int, lost: Sequence[str] = ()) -> Any:
        if self._client.startswith("0/"):
            time.sleep(0.5)
        return ask_for(self, step, lost)

    monkeypatch.setattr(RayRuntime, "_ask_for", ask_slowly)
    mixture = hard_mixture(jobs.folder, steps=10 * STEPS)
    collected, other = (jobs.loader(mixture, dp_rank=rank, dp_size=2, timeout_s=20) for rank in range(2))
    of_collected, of_other = collected.steps(), other.steps()
    next(of_collected)
    next(of_other)
    del collected, of_collected
    gc.collect()
    for _ in range(5 * STEPS):
        next(of_other)
    other.close()


@pytest.mark.slow
def test_nobody_waits_for_a_rank_that_was_closed_while_it_opened_the_stream(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_stream, opened = RayRuntime._open, threading.Event()

    def open_slowly(self: RayRuntime) -> None:
        open_stream(self)
        if self._client.startswith("0/"):
            opened.set()
            time.sleep(0.5)

    monkeypatch.setattr(RayRuntime, "_open", open_slowly)
    mixture = hard_mixture(jobs.folder, steps=10 * STEPS)
    closed, other = (jobs.loader(mixture, dp_rank=rank, dp_size=2, timeout_s=20) for rank in range(2))

    def take() -> None:
        with pytest.raises(LoaderStopped):
            list(closed)

    taking = threading.Thread(target=take)
    taking.start()
    assert opened.wait(60)
    closed.close()
    taking.join(60)
    of_other = other.steps()
    for _ in range(5 * STEPS):
        next(of_other)
    other.close()


@pytest.mark.slow
def test_two_jobs_on_a_cluster_do_not_meet(jobs: Jobs) -> None:
    one = hard_mixture(jobs.folder / "one", steps=4)
    other = hard_mixture(jobs.folder / "other", steps=4) | {"seed": 8}
    expected = [lanes_of(inline(mixture)) for mixture in (one, other)]
    loaders = [jobs.loader(one, job="-one"), jobs.loader(other, job="-other")]
    found: list[dict[tuple[int, int], str]] = [{}, {}]
    for lanes in zip(*loaders, strict=True):
        for lane, of in zip(lanes, found, strict=True):
            of[lane["step"], lane["lane"]] = digest(lane)
    assert found == expected
    assert jobs.actors("-one")
    loaders[0].close()
    until(lambda: not jobs.actors("-one"), "the actors of the first job end")
    assert len(jobs.actors("-other")) == 3
    loaders[1].close()


@pytest.mark.slow
def test_decisions_take_effect_as_they_do_inline_and_have_to_be_made_by_every_rank(jobs: Jobs) -> None:
    mixture = hard_mixture(jobs.folder, steps=STEPS)
    at = 6

    def decide(loader: Any) -> None:
        loader.control.set_weights({"long": 0.1}, at)
        loader.control.skip_steps(1, at + 1)

    with inline(mixture) as loader:
        decide(loader)
        expected = {group[0]["step"]: loader.plan(group[0]["step"]).hash for group in loader.steps()}
        state = loader.state_dict()
    ranks = [jobs.loader(mixture, dp_rank=rank, dp_size=2) for rank in range(2)]
    found = {}
    for groups in zip(*(rank.steps() for rank in ranks), strict=True):
        step = groups[0][0]["step"]
        found[step] = ranks[1].plan(step).hash
        if step == 1:
            decide(ranks[1])
            decide(ranks[0])
    assert found == expected
    assert ranks[0].state_dict() == ranks[1].state_dict() == state
    start = _start_state(mixture)
    for rank in ranks:
        rank.load_state_dict(start)
    pairs = zip(*(rank.steps() for rank in ranks), strict=True)
    for _ in range(2):
        next(pairs)
    ranks[0].control.set_weights({"long": 0.1}, at)
    with pytest.raises(DecisionError, match=rf"step {at}: rank 1/\S+ did not decide SetWeights"):
        list(pairs)
    for rank in ranks:
        rank.close()


def _start_state(mixture: Any) -> Any:
    with inline(mixture) as loader:
        return loader.state_dict()


@pytest.mark.slow
def test_errors_arrive_as_they_are_and_the_loader_can_be_used_afterwards(
    jobs: Jobs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    good = hard_mixture(jobs.folder, steps=3)
    missing = good | {"sources": {"gone": {"path": str(tmp_path / "no-*.parquet"), "weight": 1}}}
    for mixture, error in ((missing, SourceNotFound),):
        with pytest.raises(error) as expected:
            inline(mixture)
        with pytest.raises(error) as found:
            jobs.loader(mixture, job="-missing")
        assert str(found.value) == str(expected.value)
    until(lambda: not jobs.actors("-missing"), "what was begun for a loader that cannot be made ends")

    write_parquet(tmp_path / "bad.parquet", [[1, 2, 3]] * 20 + [[]] * 5 + [[4, 5]] * 400)
    bad = good | {"sources": {"bad": {"path": str(tmp_path / "bad.parquet"), "weight": 1, "max_failures": 2}}}
    long = good | {"sources": {"long": good["sources"]["long"] | {"overflow": "error"}}}
    for number, (mixture, error) in enumerate(((bad, TooManyFailures), (long, SampleError))):
        with pytest.raises(error) as expected, inline(mixture) as loader:
            list(loader)
        with jobs.loader(mixture, job=f"-{number}") as loader:
            for _ in range(2):
                with pytest.raises(error) as found:
                    list(loader)
                assert str(found.value) == str(expected.value)
            with pytest.raises(StateError):
                loader.load_state_dict({"version": 0})


@pytest.mark.slow
def test_an_answer_that_comes_after_its_lease_has_moved_is_refused_and_written_down(jobs: Jobs) -> None:
    mixture = hard_mixture(jobs.folder, steps=STEPS)
    disturbed = jobs.loader(mixture, chaos=Chaos(seed=5, max_delay_s=0.001, revoke_probability=0.5))
    assert lanes_of(disturbed) == lanes_of(inline(mixture))
    refused, moved = (
        [one.fields for one in read_events(job_dir.events_path(jobs.name)) if one.event == kind]
        for kind in (EventKind.STALE_ANSWER_REFUSED, EventKind.LEASE_MOVED)
    )
    assert refused, "no lease moved while a loader was reading: the disturbance was too weak"
    assert {one["actor"] for one in refused} == {"loader-0"}
    windows = {(one["source"], one["epoch"], one["window"], one["generation"]) for one in moved}
    for one in refused:
        assert (one["source"], one["epoch"], one["window"], one["generation"] + 1) in windows


@pytest.mark.slow
def test_a_plan_log_is_there_as_long_as_its_stream_is_taken(jobs: Jobs, tmp_path: Path) -> None:
    mixture = hard_mixture(jobs.folder, steps=100)
    folder = tmp_path / "logs" / jobs.name
    left = folder / "7-0badcafe" / "left by a planner that is gone"
    left.parent.mkdir(parents=True)
    left.touch()

    def logs() -> set[str]:
        return {path.name for path in folder.iterdir()} - {left.parent.name}

    with jobs.loader(mixture, ray={"log": str(tmp_path / "logs")}) as loader:
        start = loader.state_dict()
        next(loader.steps())
        first = logs()
        assert len(first) == 1
        loader.load_state_dict(start)
        next(loader.steps())
        until(lambda: len(logs()) == 1 and logs() != first, "the log of the stream that was left is removed")
    until(lambda: not jobs.actors(), "the job ends")
    assert not any(path.is_file() for path in folder.rglob("*"))


@pytest.mark.slow
def test_what_lies_ready_in_shared_memory_is_among_the_numbers_of_a_job(jobs: Jobs) -> None:
    with jobs.loader(hard_mixture(jobs.folder, steps=10_000)) as loader:
        next(loader.steps())

        def held() -> int:
            with suppress(JobNotFound):
                return job_dir.read(jobs.name).stats.object_store_bytes
            return 0

        until(lambda: held() > 0, "the numbers say what is held")
        assert held() < 1 << 20, "three steps of 12 packs of 64 tokens, and their plans"
