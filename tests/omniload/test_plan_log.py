"""The plan log: whenever a planner dies, its successor makes the same plans, or is told that it cannot."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniload.errors import LoaderStopped
from omniload.planner.decisions import Decision, SkipSteps
from omniload.runtime.plan_log import PlanLog
from storage import Store
from tests.omniload.plan_logging import (
    FaultyStore,
    Job,
    abandon,
    begin,
    memory,
    new_planner,
    plan_steps,
    reopen,
    undisturbed,
)

small = st.integers(0, 9)
actions = st.lists(
    st.tuples(st.just("plan"), st.integers(1, 18), st.just(0))
    | st.tuples(st.just("decide"), st.integers(0, 6), small)
    | st.tuples(st.just("release"), st.integers(0, 12), st.just(0))
    | st.tuples(st.just("dies"), st.integers(0, 30), st.integers(0, 1))
    | st.tuples(st.sampled_from(["reopen", "vanish"]), st.just(0), st.just(0)),
    max_size=12,
)


@settings(max_examples=80, deadline=None)
@given(actions, st.sampled_from([1, 3, 8, 16]))
def test_a_planner_that_dies_at_any_moment_is_replaced_by_one_that_makes_the_same_plans(
    chosen: list[tuple[str, int, int]], snapshot_every: int
) -> None:
    with memory() as log_url:
        job = Job(log_url, snapshot_every)
        for action in [*chosen, ("plan", 3, 0), ("plan", 3, 0)]:
            job.run(action)
        assert job.served == undisturbed(len(job.served), job.decisions)
        if job.log is not None:
            abandon(job.log, job.store)


def test_a_death_at_each_operation_of_a_run_is_survived() -> None:
    script = [
        ("plan", 9, 0),
        ("decide", 3, 1),  # about step 12, of which there will be a snapshot
        ("plan", 6, 0),
        ("release", 2, 0),  # so that the log begins with it
        ("decide", 0, 3),
        ("plan", 9, 0),
        ("reopen", 0, 0),
        ("plan", 9, 0),
        ("release", 1, 0),
        ("plan", 9, 0),
        ("plan", 5, 0),
    ]
    num_deaths = num_compared = doubtful = 0
    for point in range(1000):
        for after_effect in (0, 1):
            with memory() as log_url:
                job = Job(log_url, 4)
                job.run(("dies", point, after_effect))
                for action in script:
                    job.run(action)
                    doubtful += len(job.doubtful)
                assert job.served == undisturbed(len(job.served), job.decisions)
                if job.log is not None:
                    abandon(job.log, job.store)
            num_deaths += job.num_deaths
            num_compared += job.num_compared
        if not job.num_deaths:
            break
    assert num_deaths >= 100
    assert num_compared >= 1000, "plans made again were compared with logged hashes"
    assert doubtful >= 2, "a planner died of storing a decision"


@pytest.mark.chaos
def test_processes_that_are_killed_on_a_local_disk_lose_no_decision_and_plan_alike(tmp_path: Path) -> None:
    acknowledged = tmp_path / "acknowledged"
    acknowledged.touch()
    program = f"from tests.omniload.plan_logging import work; work({str(tmp_path / 'log')!r}, {str(acknowledged)!r})"
    dice = random.Random(3)
    logged: dict[int, Decision] = {}
    for _ in range(4):
        before = acknowledged.stat().st_size
        child = subprocess.Popen([sys.executable, "-c", program], cwd=Path(__file__).parents[2])
        try:
            deadline = time.monotonic() + 60
            while acknowledged.stat().st_size < before + dice.randrange(500, 1500):
                assert child.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.002)
        finally:
            child.kill()
        assert child.wait() == -signal.SIGKILL
        log = reopen(Store(tmp_path / "log"))
        recovery = log.recover(
            sum(line.startswith("planned") for line in acknowledged.read_text().splitlines())
        )
        logged |= {one.step: one for one in recovery.state.decisions}
        log.close()
    lines = [line.split() for line in acknowledged.read_text().splitlines()]
    planned = [words[1] for words in lines if words[0] == "planned"]
    decisions = [
        SkipSteps(step=int(words[1]), count=int(words[2])) for words in lines if words[0] == "decided"
    ]
    assert len(planned) > 50
    promised = {one.step for one in decisions if one.step >= recovery.state.step}
    assert promised <= {one.step for one in recovery.state.decisions}
    # What was decided and not told of, as a process died of telling it, is in force too.
    by_step = {one.step: one for one in decisions} | logged
    assert planned == undisturbed(len(planned), list(by_step.values()))


def test_a_planner_thought_dead_is_stopped_and_harms_nothing_at_whichever_operation_it_wakes_up(
    log_url: str,
) -> None:
    """It sleeps before each of its operations in turn, while another one takes over, and then goes on."""
    seen, asleep = set(), set()
    for point in range(1, 1000):
        place = Store(log_url).sub(str(point)).url
        old_store = FaultyStore(place)
        old, planner = begin(old_store, snapshot_every=4)
        first = len(old_store.operations)
        taken_over: list[tuple[int, tuple[Decision, ...]]] = []

        def take_over(
            number: int,
            at: int = first + point,
            place: str = place,
            taken_over: list[tuple[int, tuple[Decision, ...]]] = taken_over,
        ) -> None:
            if number != at:
                return
            new = reopen(Store(place), snapshot_every=4)
            recovery = new.recover(14)
            successor = new_planner(recovery.state)
            known = max(recovery.hashes, default=13) + 1
            plan_steps(new, successor, max(14, known) - recovery.state.step)
            # About a step that the old planner may have planned, but not logged: now there is another plan of it.
            decision = SkipSteps(step=successor.state.step, count=1)
            new.decided(decision)
            successor.decide(decision)
            plan_steps(new, successor, 2)
            new.release(13)
            new.close()
            taken_over.append((successor.state.step, (*recovery.state.decisions, decision)))

        old_store.before = take_over
        stopped = ""
        try:
            plan_steps(old, planner, 9)
            decision = SkipSteps(step=18, count=2)
            old.decided(decision)
            planner.decide(decision)
            plan_steps(old, planner, 4)
            old.release(12)
            plan_steps(old, planner, 9)
            old.close()
        except LoaderStopped as error:
            stopped = str(error)
        if not taken_over:
            break
        with suppress(LoaderStopped):
            old.close()
        [(step, decisions)] = taken_over
        log = reopen(Store(place))
        recovery = log.recover(14)
        assert set(recovery.state.decisions) == set(decisions)
        assert max(recovery.hashes) == step - 1
        planned = plan_steps(log, new_planner(recovery.state), step + 10 - recovery.state.step)
        log.close()
        assert planned == undisturbed(step + 10, recovery.state.decisions)[recovery.state.step :]
        assert not stopped or "opened again elsewhere, as generation 2; this planner, of" in stopped
        seen.add((bool(stopped), len(decisions)))
        asleep.add(old_store.operations[first + point - 1])
    assert point > 30
    assert asleep >= {"write", "stat", "delete"}
    assert {(True, 1), (True, 2)} <= seen, "the decision of the old planner was in time or was not"


def test_of_many_that_open_a_log_at_once_one_is_in_force(log_url: str) -> None:
    begin(Store(log_url))[0].close()
    outcomes: list[PlanLog | Exception] = []

    def open_one() -> None:
        try:
            outcomes.append(reopen(Store(log_url)))
        except LoaderStopped as error:
            outcomes.append(error)

    threads = [threading.Thread(target=open_one) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    logs = [one for one in outcomes if isinstance(one, PlanLog)]
    assert len(outcomes) == 8
    assert logs
    working = []
    for log in logs:
        try:
            log.decided(SkipSteps(step=5, count=1))
            working.append(log)
        except LoaderStopped:
            pass
    assert [log.generation for log in working] == [9]
    for log in logs:
        with suppress(LoaderStopped):
            log.close()
