"""What the plan log promises to who calls it."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from omniload.errors import DecisionError, LoaderStopped, LoaderTimeout, PlanError, StateError
from omniload.planner import SourceState, StreamState
from omniload.planner.decisions import SetWeights, SkipSteps
from omniload.runtime.plan_log import PlanLog
from storage import StorageError, Store, Transient
from tests.omniload.plan_logging import (
    NAMES,
    ROWS,
    FaultyStore,
    abandon,
    begin,
    new_planner,
    next_plan,
    plan_steps,
    reopen,
    undisturbed,
)
from tests.storage.seaweed import S3Server


def test_a_decision_is_durable_when_the_call_returns_and_hashes_may_not_be(log_url: str) -> None:
    store = FaultyStore(log_url)
    log, planner = begin(store)
    plan_steps(log, planner, 3)
    decision = SetWeights(step=5, weights={"a": 0.1})
    log.decided(decision)
    abandon(log, store)
    log = reopen(Store(log_url))
    recovery = log.recover(3)
    log.close()
    assert recovery.state.decisions == (decision,)
    assert recovery.hashes == {}


def test_decisions_that_the_start_state_holds_are_in_the_log(log_url: str) -> None:
    planner = new_planner(StreamState.initial(3))
    decision = SkipSteps(step=4, count=1)
    planner.decide(decision)
    PlanLog.begin(Store(log_url), NAMES, planner.state).close()
    log = reopen(Store(log_url))
    state = log.recover(0).state
    log.close()
    assert state.decisions == (decision,)


def test_a_decision_about_a_step_that_is_planned_is_refused(log_url: str) -> None:
    log, planner = begin(Store(log_url))
    plan_steps(log, planner, 9)
    with pytest.raises(DecisionError, match=r"step 8 is planned already, .* the earliest .* is 9"):
        log.decided(SkipSteps(step=8, count=1))
    with pytest.raises(DecisionError, match="no source 'x'"):
        log.decided(SetWeights(step=9, weights={"x": 1}))
    log.decided(SkipSteps(step=9, count=1))
    log.close()
    log = reopen(Store(log_url))
    assert log.recover(0).state.decisions == (SkipSteps(step=9, count=1),)
    with pytest.raises(DecisionError, match="step 8 is planned already"):
        log.decided(SkipSteps(step=8, count=1))
    log.close()


def test_a_plan_that_is_made_again_otherwise_is_noticed(log_url: str) -> None:
    log, planner = begin(Store(log_url))
    plan_steps(log, planner, 8)
    log.close()
    log = reopen(Store(log_url))
    others = new_planner(log.recover(5).state, [[[9]] * 60, *ROWS[1:]])  # source a has other rows
    plan = next_plan(others)
    for notice in (lambda: log.check(plan), lambda: log.planned(0, plan.hash, others.state)):
        with pytest.raises(
            PlanError, match=r"step 0: the plan made again has the hash \w+, the logged one"
        ) as raised:
            notice()
        assert "\n" not in str(raised.value)
    log.close()


def test_what_every_rank_is_done_with_is_removed_and_the_rest_is_not(log_url: str) -> None:
    log, planner = begin(Store(log_url), snapshot_every=8)
    most = 0
    for _ in range(40):
        plan_steps(log, planner, 8)
        log.decided(SkipSteps(step=planner.state.step + 1, count=1))
        planner.decide(SkipSteps(step=planner.state.step + 1, count=1))
        log.release(planner.state.step - 12)
        most = max(most, len(Store(log_url).list()))
    assert most <= 20, "3 intervals of 3 objects, heads and the claim"
    log.close()
    log = reopen(Store(log_url))
    for step in (308, 315, 320):
        assert log.recover(step).state.step == step // 8 * 8
    assert set(log.recover(308).hashes) == set(range(304, 320))
    with pytest.raises(
        StateError, match="step 295 cannot be planned again, as the plan log begins at step 296"
    ):
        log.recover(295)
    log.close()


def test_one_place_holds_one_log(log_url: str) -> None:
    assert PlanLog.open(Store(log_url), NAMES) is None
    assert Store(log_url).list() == []
    log, _ = begin(Store(log_url), fingerprint="this")
    with pytest.raises(StateError, match="a plan log is here already; open it"):
        begin(Store(log_url))
    with pytest.raises(StateError, match="of 3 sources, the mixture has 2, and they are not the same"):
        PlanLog.open(Store(log_url), ["a", "b"])
    with pytest.raises(StateError, match="of another stream: its mixture or its data were others"):
        PlanLog.open(Store(log_url), NAMES, fingerprint="that")
    log.decided(SkipSteps(step=0, count=1))  # whoever was refused did not take it over
    log.close()


def test_what_else_lies_there_stays(log_url: str) -> None:
    Store(log_url).write("README", b"mine")
    log, planner = begin(Store(log_url), snapshot_every=1)
    for _ in range(3):
        plan_steps(log, planner, 2)
        log.release(planner.state.step)
    log.close()
    reopen(Store(log_url)).close()
    assert Store(log_url).read("README") == b"mine"


def test_an_outage_is_reported_by_every_later_call_but_release(log_url: str) -> None:
    store = FaultyStore(log_url)
    log, planner = begin(store)
    store.die()
    with pytest.raises(Transient, match="the process is gone"):
        log.decided(SkipSteps(step=3, count=1))
    plan = next_plan(planner)
    for call in (
        lambda: log.decided(SkipSteps(step=3, count=1)),
        lambda: log.planned(0, plan.hash, planner.state),
        lambda: log.check(plan),
        lambda: log.recover(0),
        log.close,
    ):
        with pytest.raises(Transient, match="the process is gone"):
            call()
    log.release(3)
    log.close()


def test_what_fails_behind_is_reported_by_the_next_call(log_url: str) -> None:
    store = FaultyStore(log_url)
    log, planner = begin(store)
    failed = threading.Event()
    store.before = lambda _: failed.set()
    store.die()
    plan_steps(log, planner, 8)
    assert failed.wait(60)
    with pytest.raises(Transient):
        plan_steps(log, planner, 1000)
    with suppress(StorageError):
        log.close()


def test_storage_that_hangs_holds_up_neither_planning_nor_anybody_for_ever(log_url: str) -> None:
    store, others = FaultyStore(log_url), set(threading.enumerate())
    log, planner = begin(store, timeout_s=0.2)
    [thread] = set(threading.enumerate()) - others
    hanging = threading.Event()
    store.before = lambda _: hanging.wait(60) or None
    plan_steps(log, planner, 100)  # written behind
    log.release(50)
    with pytest.raises(LoaderTimeout, match=r"plan log: not written within 0\.2 s; open it again"):
        log.decided(SkipSteps(step=200, count=1))
    with pytest.raises(LoaderTimeout, match="not written within"):
        log.decided(SkipSteps(step=201, count=1))
    with pytest.raises(LoaderTimeout):
        log.close()
    hanging.set()
    thread.join(60)
    log = reopen(Store(log_url))
    assert log.recover(0).state.decisions == (), "what nobody waits for any more is not written late"
    log.close()


def test_planning_is_held_up_by_slow_storage_for_so_long_and_then_stopped(log_url: str) -> None:
    store = FaultyStore(log_url)
    log, planner = begin(store, timeout_s=0.2)
    hanging = threading.Event()
    store.before = lambda _: hanging.wait(60) or None
    with pytest.raises(LoaderTimeout, match="32 writes are waiting and none was done within"):
        plan_steps(log, planner, 400)
    hanging.set()
    log.close()
    log = reopen(Store(log_url))
    recovery = log.recover(0)
    log.close()
    assert len(recovery.hashes) >= 256
    assert list(recovery.hashes.values()) == undisturbed(400)[: len(recovery.hashes)]


def test_a_closed_log_says_so(log_url: str) -> None:
    log, planner = begin(Store(log_url))
    log.close()
    log.close()
    for call in (
        lambda: log.recover(0),
        lambda: log.decided(SkipSteps(step=3, count=1)),
        lambda: plan_steps(log, planner, 1),
    ):
        with pytest.raises(LoaderStopped, match="the plan log is closed; open it again"):
            call()


def test_a_decision_made_while_the_log_is_closed_is_durable_or_refused(log_url: str) -> None:
    log, _ = begin(Store(log_url))
    returned, refused = [], []
    busy = threading.Event()

    def decide() -> None:
        for step in range(1, 10_000):
            try:
                log.decided(SkipSteps(step=step, count=1))
            except LoaderStopped:
                refused.append(step)
                return
            returned.append(step)
            if len(returned) > 20:
                busy.set()

    threads = [threading.Thread(target=decide) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert busy.wait(60)
    log.close()
    for thread in threads:
        thread.join(60)
    assert len(refused) == 4
    log = reopen(Store(log_url))
    found = sorted(decision.step for decision in log.recover(0).state.decisions)
    log.close()
    for step in returned:
        found.remove(step)
    assert set(found) <= set(refused), "of those refused some may have been written"


def test_a_step_costs_18_bytes_and_a_source_in_a_snapshot_128_at_most(log_url: str) -> None:
    log, planner = begin(Store(log_url))
    plan_steps(log, planner, 256)
    log.close()
    sizes = [one.size for one in Store(log_url).list() if "-hashes-" in one.path]
    assert sum(sizes) == 256 * 18

    names = [f"source-{i}" for i in range(300)]
    counts = np.random.default_rng(1).integers(0, 2**40, (300, 7)).tolist()
    state = StreamState.initial(300)
    sources = tuple(
        SourceState(
            rows=a, read_tokens=b, truncated_tokens=c, emitted_samples=d, skipped_tokens=e, failures=f
        )
        for a, b, c, d, e, f, _ in counts
    )
    many = Store(log_url).sub("many")
    PlanLog.begin(
        many,
        names,
        StreamState(step=0, sources=sources, deficits=tuple(one[6] for one in counts), carried=state.carried),
    ).close()
    [size] = [one.size for one in many.list() if "-snapshot-" in one.path]
    assert size <= 300 * 128


@pytest.mark.parametrize("kind", ["local", "s3"])
def test_a_log_elsewhere_is_the_same(tmp_path: Path, s3: S3Server, kind: str) -> None:
    place = str(tmp_path / "log") if kind == "local" else f"s3://{s3.bucket}/{tmp_path.name}"
    store = Store(place, {} if kind == "local" else s3.storage_options)
    log, planner = begin(store)
    plan_steps(log, planner, 200)
    log.recover(0)  # waits for what is being written
    successor = reopen(store)
    with pytest.raises(LoaderStopped, match="this planner, of generation 1, must not go on"):
        log.decided(SkipSteps(step=300, count=1))
    recovery = successor.recover(150)
    successor.close()
    with pytest.raises(LoaderStopped):
        log.close()
    assert recovery.state.step == 128
    assert [*recovery.hashes.values()] == undisturbed(200)[128:]
