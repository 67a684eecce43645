"""The directory of a run: newest, retention, restore."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from checkpoint import CheckpointManager
from checkpoint.engine.coordination import Coordinator
from checkpoint.engine.staging import StagingPool
from checkpoint.errors import AlreadyCommitted, CorruptCheckpoint, MismatchError, NotACheckpoint
from checkpoint.retention import KeepBest, Retention
from checkpoint.schedule import Schedule
from storage import Store
from tests.checkpoint.simulation import run_ranks


def state(value: float) -> dict[str, object]:
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(value)
    return {"model": model, "extra": {"value": value}}


def test_latest_is_the_newest_committed_step(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=None)
    assert manager.latest() is None
    for step in (5, 30, 100_000_000):
        manager.save(step, state(step))
    assert (tmp_path / "step-00000005" / "manifest.json").exists()
    assert manager.steps() == [5, 30, 100_000_000]
    (tmp_path / "step-100000000" / "manifest.json").unlink()
    (tmp_path / "step-00000999").mkdir()
    (tmp_path / "other").mkdir()
    assert manager.latest() == 30


def test_restore_gives_the_step_or_none_and_then_touches_nothing(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    target = state(-1.0)
    assert manager.restore(target) is None
    assert target["extra"] == {"value": -1.0}
    manager.save(1, state(1.0))
    manager.async_save(2, state(2.0)).result()
    assert manager.restore(target) == 2
    assert target["extra"] == {"value": 2.0}
    assert manager.restore(target, step=1) == 1
    assert target["extra"] == {"value": 1.0}


def test_old_steps_go_after_newer_ones_are_committed(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=2)
    for step in range(5):
        manager.async_save(step, state(step))
    manager.wait()
    assert manager.steps() == [3, 4]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]


def test_a_failed_save_does_not_remove_anything(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=1)
    manager.save(1, state(1.0))
    with pytest.raises(AlreadyCommitted):
        manager.save(1, state(1.0))
    assert manager.steps() == [1]
    manager.save(1, state(3.0), overwrite=True)
    target = state(0.0)
    manager.restore(target)
    assert target["extra"] == {"value": 3.0}


def flip(path: Path, position: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def payload(root: Path, step: int) -> Path:
    (path,) = (root / f"step-{step:08d}").glob("data/*/model-00000-000.safetensors")
    return path


@pytest.mark.parametrize("damaged", ["payload", "manifest", "table", "missing", "all three"])
def test_restore_passes_over_what_is_damaged_and_the_next_save_replaces_it(
    tmp_path: Path, damaged: str
) -> None:
    manager = CheckpointManager(tmp_path, keep_last=None)
    for step in (1, 2, 3):
        manager.save(step, state(step))
    if damaged in ("payload", "all three"):
        flip(payload(tmp_path, 3))
    if damaged in ("manifest", "all three"):
        flip(tmp_path / "step-00000003" / "manifest.json", 20)
    if damaged == "table":
        flip(next(tmp_path.glob("step-00000003/data/*/shards.parquet")), 40)
    if damaged == "missing":
        payload(tmp_path, 3).unlink()
    target = state(-1.0)
    manager = CheckpointManager(tmp_path, keep_last=None)
    assert manager.restore(target) == 2
    assert target["extra"] == {"value": 2.0}
    assert bool((target["model"].weight == 2.0).all())  # type: ignore[attr-defined]
    assert manager.latest() == 3, "it is committed, if not whole"
    manager.save(3, state(3.5))
    assert CheckpointManager(tmp_path, keep_last=None).restore(target) == 3
    assert target["extra"] == {"value": 3.5}
    with pytest.raises(AlreadyCommitted):
        manager.save(3, state(4.0))


def test_restore_of_a_step_that_was_asked_for_raises_what_is_wrong_with_it(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(1, state(1.0))
    manager.save(2, state(2.0))
    flip(payload(tmp_path, 2))
    with pytest.raises(CorruptCheckpoint, match="model-00000-000"):
        manager.restore(state(0.0), step=2)
    with pytest.raises(NotACheckpoint):
        manager.restore(state(0.0), step=7)
    flip(payload(tmp_path, 1))
    with pytest.raises(CorruptCheckpoint, match="step-00000002"):
        manager.restore(state(0.0))


def test_what_is_saved_after_going_back_stays_and_older_steps_ahead_of_it_go(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=2, keep_every=100)
    for step in range(50, 451, 50):
        manager.save(step, state(step))
    assert manager.steps() == [100, 200, 300, 400, 450]
    manager = CheckpointManager(tmp_path, keep_last=2, keep_every=100)
    assert manager.restore(state(0.0), step=200) == 200
    manager.save(250, state(250.0))
    assert manager.steps() == [100, 200, 250, 300, 400]
    manager.save(275, state(275.0))
    assert manager.steps() == [100, 200, 250, 275, 300, 400]
    manager.save(280, state(280.0))
    assert manager.steps() == [100, 200, 275, 280, 300, 400], "the last two, and multiples of 100"
    manager.save(300, state(-300.0))
    target = state(0.0)
    assert manager.restore(target, step=300) == 300
    assert target["extra"] == {"value": -300.0}, "what was ahead is replaced without being asked to"
    with pytest.raises(AlreadyCommitted):
        manager.save(300, state(0.0))


def test_a_run_that_restored_nothing_removes_no_steps_ahead_of_its_own(tmp_path: Path) -> None:
    """As one that is begun anew in the directory of another."""
    manager = CheckpointManager(tmp_path, keep_last=None)
    for step in (1, 100, 200):
        manager.save(step, state(step))
    manager = CheckpointManager(tmp_path, keep_last=2)
    for step in (10, 20, 30):
        manager.save(step, state(-step))
    assert manager.steps() == [20, 30, 100, 200]


def test_saves_go_on_after_going_back_within_a_run(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=3, save_every_steps=10)
    for step in range(10, 51, 10):
        assert manager.save_if_due(step, state(step)) is not None
    manager.wait()
    assert manager.restore(state(0.0), step=30) == 30
    assert manager.save_if_due(40, state(-40.0)) is not None
    assert manager.save_if_due(50, state(-50.0)) is not None
    manager.wait()
    assert manager.steps() == [30, 40, 50]
    target = state(0.0)
    assert manager.restore(target) == 50
    assert target["extra"] == {"value": -50.0}


def test_a_damaged_checkpoint_that_was_passed_over_is_not_what_keep_last_keeps(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=None)
    manager.save(10, state(10.0))
    manager.save(20, state(20.0))
    flip(payload(tmp_path, 20))
    manager = CheckpointManager(tmp_path, keep_last=1)
    assert manager.restore(state(0.0)) == 10
    manager.save(15, state(15.0))
    assert manager.steps() == [15]
    target = state(0.0)
    assert CheckpointManager(tmp_path).restore(target) == 15
    assert target["extra"] == {"value": 15.0}


def test_a_failed_save_of_a_damaged_step_may_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = CheckpointManager(tmp_path, keep_last=None)
    manager.save(1, state(1.0))
    manager.save(2, state(2.0))
    flip(payload(tmp_path, 2))
    assert manager.restore(state(0.0)) == 1
    with monkeypatch.context() as broken:
        broken.setattr("checkpoint.engine.save.write_files", Mock(side_effect=OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            manager.async_save(2, state(2.5)).result()
    manager.async_save(2, state(2.5)).result()
    with pytest.raises(AlreadyCommitted):
        manager.save(2, state(3.0))


def test_restore_does_not_pass_over_a_state_that_does_not_fit(tmp_path: Path) -> None:
    """An older step would not fit either, or worse, would."""
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"model": nn.Linear(3, 3)})
    manager.save(2, {"model": nn.Linear(2, 2)})
    with pytest.raises(MismatchError):
        manager.restore({"model": nn.Linear(3, 3)})


def test_restore_accepts_what_load_accepts_and_no_more(tmp_path: Path) -> None:
    """Each difference is refused unless its own argument allows it; the values then arrive."""
    saved = {"weight": torch.tensor([1.5, 2.25], dtype=torch.bfloat16), "old": torch.ones(1)}
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"x": saved})
    allowed: dict[str, Any] = {
        "dtype_policy": "widen",
        "allow_missing": ["x/new"],
        "allow_unexpected": ["x/old"],
    }
    for left_out in allowed:
        target = {"weight": torch.zeros(2), "new": torch.zeros(1)}
        with pytest.raises(MismatchError):
            manager.restore({"x": target}, **{name: allowed[name] for name in allowed.keys() - {left_out}})
        assert not target["weight"].any()
    for arguments in (allowed, {"strict": False, "dtype_policy": "convert"}):
        target = {"weight": torch.zeros(2), "new": torch.full((1,), 7.0)}
        assert manager.restore({"x": target}, **arguments) == 1
        assert target["weight"].tolist() == [1.5, 2.25]
        assert target["new"].item() == 7.0


def test_restore_refuses_an_unknown_policy_before_there_is_anything_to_load(tmp_path: Path) -> None:
    """Else the job that it is meant for would be the first to hear of it, when it resumes."""
    with pytest.raises(ValueError, match="dtype_policy is 'cast': it is one of same, widen, convert"):
        CheckpointManager(tmp_path).restore({"x": {}}, dtype_policy="cast")  # type: ignore[arg-type]


def test_nothing_is_removed_while_the_newest_is_damaged(tmp_path: Path) -> None:
    def damage(step: int, url: str) -> None:
        if step == 3:
            payload(tmp_path, 3).unlink()

    manager = CheckpointManager(tmp_path, keep_last=1, on_commit=damage)
    manager.save(1, state(1.0))
    manager.save(2, state(2.0))
    assert manager.steps() == [2]
    manager.save(3, state(3.0))
    assert manager.steps() == [2, 3]
    assert CheckpointManager(tmp_path).restore(state(0.0)) == 2


def test_what_any_rule_keeps_stays(tmp_path: Path) -> None:
    """The newest, multiples, and the best, of equals the newest; not-a-number is never best."""
    best = KeepBest(metric="loss", count=2)
    manager = CheckpointManager(tmp_path, keep_last=1, keep_every=4, keep_best=best)
    losses = [9.0, float("nan"), 3.0, 8.0, 5.0, 3.0, 7.0, 6.0, 4.0, None]
    for step, loss in enumerate(losses, start=1):
        manager.save(step, state(step), metrics=None if loss is None else {"loss": loss})
    assert manager.steps() == [3, 4, 6, 8, 10]
    greatest = CheckpointManager(tmp_path, keep_last=1, keep_best=KeepBest(metric="loss", mode="max"))
    greatest.save(11, state(11), metrics={"loss": 1.0})
    assert greatest.steps() == [4, 11]


@given(
    st.sets(st.integers(0, 60), min_size=1).map(sorted),
    st.integers(1, 5),
    st.none() | st.integers(1, 9),
    st.none() | st.integers(1, 4),
    st.randoms(use_true_random=False),
)
def test_retention_keeps_the_newest_the_multiples_and_the_best(
    steps: list[int], last: int, every: int | None, count: int | None, dice: Random
) -> None:
    values = {step: dice.choice([None, float("nan"), 0.0, 1.0, 2.0, -1.0]) for step in steps}
    best = None if count is None else KeepBest(metric="m", count=count)
    kept = Retention(last=last, every=every, best=best).kept(steps, lambda step, _: values[step])
    assert kept >= set(steps[-last:])
    assert kept >= {step for step in steps if every and step % every == 0}
    assert kept <= set(steps)
    rest = kept - set(steps[-last:]) - {step for step in steps if every and step % every == 0}
    assert len(rest) <= (count or 0)
    numbers = sorted(value for value in values.values() if value is not None and value == value)
    if count and numbers:
        bound = numbers[:count][-1]
        assert kept >= {step for step, value in values.items() if value is not None and value < bound}
        assert all((values[step] or 0.0) <= bound for step in rest)


def test_saves_are_due_at_multiples(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, save_every_steps=3, keep_last=None)
    handles = [manager.save_if_due(step, state(step), metrics={"loss": 1.0}) for step in range(8)]
    assert [handle is not None for handle in handles] == [step in (3, 6) for step in range(8)]
    manager.wait()
    assert manager.steps() == [3, 6]


@pytest.mark.parametrize("world_size", [1, 3])
def test_saves_are_due_when_the_minutes_of_rank_0_have_passed_on_all_ranks_alike(world_size: int) -> None:
    """Clocks of the other ranks do not matter, and few steps look at it."""
    rounds = []

    def fn(coordinator: Coordinator) -> list[int]:
        now = [0.0]
        coordinator.round = Mock(wraps=coordinator.round)  # type: ignore[method-assign]
        schedule = Schedule(
            every_steps=None, every_minutes=10, coordinator=coordinator, timeout_s=20, clock=lambda: now[0]
        )
        found = []
        for step in range(1, 2001):
            now[0] += 2.0 if coordinator.rank == 0 else 1000.0 * coordinator.rank
            if schedule.due(step, f"step/{step}"):
                found.append(step)
        rounds.append(coordinator.round.call_count)
        return found

    results = run_ranks(world_size, fn)
    assert all(result == results[0] for result in results)
    assert len(results[0]) == 6
    gaps = [right - left for left, right in itertools.pairwise([0, *results[0]])]
    assert all(300 <= gap <= 302 for gap in gaps), gaps
    assert max(rounds) <= 100


def test_minutes_are_noticed_when_steps_become_slow() -> None:
    """The next look is at half of what is left by the pace so far; a slower pace is noticed no later than it passes."""
    coordinator = run_ranks(1, lambda one: one)[0]
    now = [0.0]
    schedule = Schedule(
        every_steps=50, every_minutes=1, coordinator=coordinator, timeout_s=20, clock=lambda: now[0]
    )
    due = []
    for step in range(1, 101):
        now[0] += 0.1 if step < 10 else 15.0
        if schedule.due(step, f"step/{step}"):
            due.append(step)
    assert 50 in due
    assert 100 in due
    assert len(due) > 2, "and for the minutes in between"


def test_the_hook_is_told_of_commits_and_its_errors_fail_no_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told = []

    def hook(step: int, url: str) -> None:
        assert (tmp_path / f"step-{step:08d}" / "manifest.json").exists()
        told.append((step, url))
        raise RuntimeError("of the hook")

    manager = CheckpointManager(tmp_path, on_commit=hook)
    manager.save(1, state(1.0))
    manager.async_save(2, state(2.0)).result()
    assert told == [(step, str(tmp_path / f"step-{step:08d}")) for step in (1, 2)]
    assert "on_commit failed" in caplog.text


class Loader:
    """A loader of data as far as a checkpoint knows it."""

    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_a_loader_and_the_generators_of_random_numbers_go_on_where_they_were(tmp_path: Path) -> None:
    manager, loader = CheckpointManager(tmp_path), Loader()
    loader.at = 17
    manager.async_save(1, {"loader": loader, "extra": {"step": 1}}).result()
    expected = (torch.rand(3).tolist(), random.random(), np.random.rand())
    other = Loader()
    assert CheckpointManager(tmp_path).restore({"loader": other, "extra": {"step": 0}}) == 1
    assert other.at == 17
    assert (torch.rand(3).tolist(), random.random(), np.random.rand()) == expected


def test_the_first_step_makes_ready_for_the_first_save(tmp_path: Path) -> None:
    """It then finds a plan and staging memory, and has to make neither."""
    manager = CheckpointManager(tmp_path, save_every_steps=2)
    saver = manager._session.saver
    saver._pool = StagingPool()
    mine = state(1.0)
    assert manager.save_if_due(1, mine) is None
    known = saver._planner._known[-1]
    first = saver._pool.take(1, timeout_s=20)
    saver._pool.give_back(first)
    assert not list(tmp_path.iterdir())
    assert manager.save_if_due(2, mine).result(20)  # type: ignore[union-attr]
    assert saver._planner._known[-1] is known
    assert [buffer.data_ptr() for buffer in saver._pool._free] == [first.data_ptr()]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"keep_last": 0}, "keep_last is 0"),
        ({"keep_every": 0}, "keep_every is 0"),
        ({"keep_local": -1}, "keep_local is -1"),
        ({"local": Store("memory://manager")}, "as root is"),
        ({"save_every_steps": 0}, "save_every_steps is 0"),
        ({"save_every_minutes": 0.0}, "save_every_minutes is 0.0"),
        ({"save_every_minutes": float("nan")}, "save_every_minutes is nan"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        CheckpointManager("memory://manager", **options)


def test_bad_calls_are_refused() -> None:
    manager = CheckpointManager("memory://manager")
    with pytest.raises(ValueError, match="step is -1"):
        manager.save(-1, {})
    with pytest.raises(ValueError, match=r"metrics\['loss'\] is None: give a number"):
        manager.save(1, {}, metrics={"loss": None})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="give them as metrics="):
        manager.save(1, {}, metrics={"loss": 1.0}, user_metadata={"metrics": {}})
    with pytest.raises(ValueError, match="count is 0"):
        KeepBest(metric="loss", count=0)
    with pytest.raises(ValueError, match="mode is 'least'"):
        KeepBest(metric="loss", mode="least")  # type: ignore[arg-type]
    assert manager.steps() == []
