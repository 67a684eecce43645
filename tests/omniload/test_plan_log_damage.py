"""What is damaged in a plan log is noticed, and done without where it can be."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniload.errors import StateError
from omniload.planner import StreamState
from omniload.planner.decisions import SetWeights, SkipSteps
from storage import Store
from tests.omniload.plan_logging import (
    NAMES,
    FaultyStore,
    abandon,
    begin,
    memory,
    new_planner,
    plan_steps,
    reopen,
    undisturbed,
)

DECISIONS = [
    SkipSteps(step=24, count=1),
    SetWeights(step=75, weights={"a": 0.1}),
    SkipSteps(step=80, count=2),
]


@functools.cache
def good_log() -> dict[str, bytes]:
    """The objects of a log of three generations that ended in different ways, by path."""
    with memory() as log_url:
        store = FaultyStore(log_url)
        log, planner = begin(store, snapshot_every=8)
        plan_steps(log, planner, 20)
        log.decided(DECISIONS[0])
        planner.decide(DECISIONS[0])
        plan_steps(log, planner, 15)
        abandon(log, store)
        for decision, last in zip(DECISIONS[1:], (67, 71), strict=True):
            log = reopen(Store(log_url), snapshot_every=8)
            planner = new_planner(log.recover(33).state)
            plan_steps(log, planner, 5)
            log.decided(decision)
            planner.decide(decision)
            log.release(17)
            plan_steps(log, planner, last - planner.state.step)
            log.close()
        return {one.path: Store(log_url).read(one.path) for one in Store(log_url).list()}


def newest(kind: str) -> str:
    """The path of the last object of a kind."""
    return max(path for path in good_log() if f"-{kind}-" in path)


@functools.cache
def good_states() -> list[dict[str, Any]]:
    """The stream before each step of that log."""
    planner, states = new_planner(StreamState.initial(3)), []
    for decision in DECISIONS:
        planner.decide(decision)
    for _ in range(72):
        states.append(planner.state.to_json(NAMES))
        planner.next()
    return states


def recovers_rightly(objects: dict[str, bytes]) -> bool:
    """Whether a log is recovered; if it is, then rightly, else the error is one line that names the store."""
    with memory() as log_url:
        for path, data in objects.items():
            Store(log_url).write(path, data)
        log, problem = None, ""
        try:
            log = reopen(Store(log_url))
            recovery = log.recover(60)
        except StateError as error:
            problem = str(error)
        finally:
            if log is not None:
                log.close()
        if problem:
            assert "\n" not in problem
            assert problem.startswith(log_url)
            return False
        assert recovery.state.to_json(NAMES) == good_states()[recovery.state.step]
        hashes = undisturbed(71, DECISIONS)
        assert all(hashes[step] == plan_hash for step, plan_hash in recovery.hashes.items())
        return True


def test_the_log_to_be_damaged_is_recovered_when_it_is_not() -> None:
    assert recovers_rightly(good_log())
    for kind in ("head", "snapshot", "decision", "hashes"):
        assert newest(kind)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_damaged_object_is_never_taken_for_a_good_one(data: st.DataObject) -> None:
    objects = good_log()
    path = data.draw(st.sampled_from(sorted(objects)))
    content = objects[path]
    how = data.draw(st.sampled_from(["cut", "flip", "extend", "swap"]))
    if how == "cut":
        damaged = content[: data.draw(st.integers(0, len(content) - 1))]
    elif how == "flip":
        at, bit = data.draw(st.integers(0, len(content) - 1)), data.draw(st.integers(0, 7))
        damaged = content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]
    elif how == "extend":
        damaged = content + data.draw(st.binary(min_size=1, max_size=20))
    else:
        damaged = objects[data.draw(st.sampled_from(sorted(objects)))]
    recovers_rightly({**objects, path: damaged})


def test_an_object_that_is_gone_is_missed_but_the_last() -> None:
    paths = [path for path in good_log() if not path.startswith("claims")]
    assert len(paths) > 10
    assert max(paths) == newest("hashes"), "what comes last is not missed, and needs not be"
    for path in paths:
        rest = {one: data for one, data in good_log().items() if one != path}
        assert recovers_rightly(rest) == (path == max(paths)), path


@pytest.mark.parametrize(
    ("kind", "recovered"), [("head", False), ("decision", False), ("hashes", True), ("snapshot", True)]
)
def test_what_cannot_be_done_without_is_named_and_the_rest_is_done_without(
    log_url: str, kind: str, recovered: bool, caplog: pytest.LogCaptureFixture
) -> None:
    path = newest(kind)
    for one, data in good_log().items():
        Store(log_url).write(one, data[:-1] if one == path else data)
    if not recovered:
        with pytest.raises(StateError, match=f"{path}: this part of the plan log is damaged: its digest"):
            reopen(Store(log_url))
        return
    log = reopen(Store(log_url))
    recovery = log.recover(68)
    log.close()
    assert path in caplog.text
    assert recovery.state.step == (56 if kind == "snapshot" else 64)


def test_a_log_of_which_every_snapshot_is_damaged_says_so_each_time(log_url: str) -> None:
    for one, data in good_log().items():
        Store(log_url).write(one, b"" if "-snapshot-" in one else data)
    log = reopen(Store(log_url))
    for _ in range(2):
        with pytest.raises(
            StateError, match=r"-snapshot-\d+: this part of the plan log is damaged: it is empty"
        ):
            log.recover(68)
    log.close()


def test_a_damaged_snapshot_is_stored_again_when_its_step_is_planned_again(log_url: str) -> None:
    for one, data in good_log().items():
        Store(log_url).write(one, data[:-1] if one == newest("snapshot") else data)
    log = reopen(Store(log_url), snapshot_every=8)
    plan_steps(log, new_planner(log.recover(68).state), 10)
    assert log.recover(68).state.step == 64
    log.close()
