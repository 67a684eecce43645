"""The directory of a run: newest, retention, restore."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from checkpoint import CheckpointManager
from checkpoint.errors import AlreadyCommitted


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


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="keep_last is 0"):
        CheckpointManager("memory://manager", keep_last=0)
    with pytest.raises(ValueError, match="step is -1"):
        CheckpointManager("memory://manager").save(-1, {})
