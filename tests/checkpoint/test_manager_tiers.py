"""A fast local tier in front of the durable root: drained in the background, and never the last good one removed."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import checkpoint
from checkpoint import CheckpointManager
from checkpoint.errors import AlreadyCommitted
from checkpoint.places import committed_steps
from storage import NoSpace, Store
from tests.distributed import run_distributed


def state(value: float) -> dict[str, Any]:
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(value)
    return {"model": model, "extra": {"value": value}}


def restored(root: Path | Store, **options: Any) -> tuple[int | None, float]:
    target = state(-1.0)
    with managed(root, **options) as manager:
        step = manager.restore(target)
    value = float(target["extra"]["value"])
    assert bool((target["model"].weight == value).all())
    return step, value


@contextmanager
def managed(root: Path | Store, **options: Any) -> Iterator[CheckpointManager]:
    manager = CheckpointManager(root, **options)
    try:
        yield manager
    finally:
        manager.close()


def payload(root: Path, step: int) -> Path:
    (path,) = (root / f"step-{step:08d}").glob("data/*/model-00000-000.safetensors")
    return path


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "root", tmp_path / "local"


class Shut(Store):
    """A root that takes no payload until it is opened, and for which it may be full."""

    opened: threading.Event
    full: bool

    @classmethod
    def at(cls, root: Path) -> Shut:
        shut = cls(root)
        shut.opened, shut.full = threading.Event(), False
        return shut

    def sub(self, path: str) -> Store:
        below = super().sub(path)
        below.__class__ = Shut
        assert isinstance(below, Shut)
        below.__dict__.update(opened=self.opened)
        below.__dict__["whole"] = self.__dict__.get("whole", self)
        return below

    def writer(self, path: str, header_bytes: int = 0) -> Any:
        assert self.opened.wait(30)
        if self.__dict__.get("whole", self).full:
            raise NoSpace(path, "full")
        return super().writer(path, header_bytes)


def test_saves_go_to_local_and_are_drained(places: tuple[Path, Path]) -> None:
    root, local = places
    told = []
    with managed(root, local=local, keep_last=2, on_commit=lambda *one: told.append(one)) as manager:
        for step in range(1, 5):
            manager.async_save(step, state(step)).result()
        manager.wait()
        assert manager.steps() == [3, 4]
    assert committed_steps(Store(root)) == [3, 4]
    assert committed_steps(Store(local)) == [4]
    assert (4, str(local / "step-00000004")) in told
    assert told[-1] == (4, str(root / "step-00000004"))
    assert told.index((4, str(local / "step-00000004"))) < told.index(told[-1])
    assert restored(root) == (4, 4.0)


def test_what_is_at_local_only_is_the_newest_and_is_drained_by_the_next_manager(
    places: tuple[Path, Path],
) -> None:
    root, local = places
    shut = Shut.at(root)
    manager = CheckpointManager(shut, local=local)
    manager.save(1, state(1.0))
    assert committed_steps(Store(root)) == []
    assert manager.latest() == 1
    target = state(0.0)
    assert manager.restore(target) == 1
    shut.full = True
    shut.opened.set()
    manager.close()
    with managed(root, local=local) as again:
        assert again.restore(target) == 1
        again.wait()
    assert committed_steps(Store(root)) == [1]


def test_a_drain_that_failed_is_reported_and_tried_again_with_the_next_save(
    places: tuple[Path, Path],
) -> None:
    root, local = places
    shut = Shut.at(root)
    shut.full = True
    shut.opened.set()
    with managed(shut, local=local) as manager:
        manager.save(1, state(1.0))
        with pytest.raises(ExceptionGroup, match="not drained") as caught:
            manager.wait()
        assert isinstance(caught.value.exceptions[0], NoSpace)
        assert manager.latest() == 1
        shut.full = False
        manager.save(2, state(2.0))
        manager.wait()
    assert committed_steps(Store(root)) == [1, 2]


def test_the_last_good_one_stays_at_the_root_however_far_ahead_local_is(places: tuple[Path, Path]) -> None:
    """And of those that wait to be drained, the ones that newer ones have made needless are left out."""
    root, local = places
    with managed(root, local=local, keep_last=1) as manager:
        manager.save(1, state(1.0))
        manager.wait()
    shut = Shut.at(root)
    with managed(shut, local=local, keep_last=1, keep_local=0) as manager:
        for step in range(2, 7):
            manager.save(step, state(step))
            assert committed_steps(Store(root)) == [1], "only that one is durable so far"
        waiting = committed_steps(Store(local))
        assert waiting[-1] == 6
        assert 2 in waiting, "it was on its way already"
        assert not {3, 4, 5} & set(waiting)
        shut.opened.set()
        manager.wait()
    assert committed_steps(Store(root)) == [6]
    assert committed_steps(Store(local)) == []
    assert restored(root) == (6, 6.0)


def test_a_local_copy_that_is_damaged_is_never_passed_on_nor_is_the_root_cleared_for_it(
    places: tuple[Path, Path],
) -> None:
    root, local = places
    with managed(root, local=local, keep_last=1) as manager:
        manager.save(1, state(1.0))
        manager.wait()
    shut = Shut.at(root)
    manager = CheckpointManager(shut, local=local, keep_last=1)
    manager.save(2, state(2.0))
    flip(payload(local, 2))
    shut.opened.set()
    with pytest.raises(ExceptionGroup, match="not drained"):
        manager.wait()
    manager.close()
    assert committed_steps(Store(root)) == [1]
    assert restored(root, local=local) == (1, 1.0)


def test_a_damaged_copy_is_made_up_for_by_the_other_one(places: tuple[Path, Path]) -> None:
    root, local = places
    with managed(root, local=local) as manager:
        for step in (1, 2):
            manager.save(step, state(step))
        manager.wait()
    flip(payload(local, 2))
    assert restored(root, local=local) == (2, 2.0)
    flip(payload(root, 2))
    assert restored(root, local=local) == (1, 1.0)


def test_a_step_that_is_at_the_root_is_refused_or_replaced_there(places: tuple[Path, Path]) -> None:
    root, local = places
    with managed(root, local=local, keep_local=1) as manager:
        manager.save(1, state(1.0))
        manager.wait()
        with pytest.raises(AlreadyCommitted):
            manager.save(1, state(1.5))
        assert restored(root) == (1, 1.0)
        manager.save(1, state(2.0), overwrite=True)
        manager.wait()
    assert restored(root) == (1, 2.0)
    assert restored(root, local=local) == (1, 2.0)
    with managed(root, local=local) as again, pytest.raises(AlreadyCommitted):
        again.save(1, state(3.0))


def test_a_step_that_is_replaced_while_its_old_copy_is_drained_is_the_new_one(
    places: tuple[Path, Path],
) -> None:
    """As after a restart: a process that ended has left the step at local only."""
    root, local = places
    checkpoint.save(local / "step-00000001", state(1.0), step=1)
    shut = Shut.at(root)
    manager = CheckpointManager(shut, local=local)
    opener = threading.Timer(0.5, shut.opened.set)
    opener.start()
    manager.save(1, state(2.0), overwrite=True)
    manager.wait()
    manager.close()
    assert restored(root) == restored(root, local=local) == (1, 2.0)


def test_a_local_copy_of_what_was_replaced_at_the_root_is_not_taken_for_it(places: tuple[Path, Path]) -> None:
    """As a process that is killed right after it has replaced a step leaves it."""
    root, local = places
    with managed(root, local=local) as manager:
        manager.save(1, state(1.0))
        manager.wait()
        shutil.copytree(local, f"{local}-before")
        manager.save(1, state(2.0), overwrite=True)
        manager.wait()
    shutil.rmtree(local)
    shutil.move(f"{local}-before", local)
    assert restored(root, local=local) == (1, 2.0)
    with managed(root, local=local, keep_last=1) as manager:
        manager.wait()
        manager.save(2, state(3.0))
        manager.wait()
    assert committed_steps(Store(root)) == committed_steps(Store(local)) == [2]


def test_what_was_passed_over_is_replaced_at_the_root(places: tuple[Path, Path]) -> None:
    root, local = places
    with managed(root, local=local, keep_local=0) as manager:
        for step in (1, 2):
            manager.save(step, state(step))
        manager.wait()
    flip(payload(root, 2))
    target = state(0.0)
    with managed(root, local=local) as manager:
        assert manager.restore(target) == 1
        manager.save(2, state(2.5))
        manager.save(3, state(3.0))
        manager.wait()
    assert committed_steps(Store(root)) == [1, 2, 3]
    assert manager.restore(target, step=2) == 2
    assert target["extra"] == {"value": 2.5}


def _ranks(rank: int, world_size: int, root: str, local: str) -> tuple[list[int], int | None, str]:
    refused = ""
    try:
        CheckpointManager(root, local=f"{local}-{rank}", timeout_s=30)
    except ValueError as error:
        refused = str(error)
    target = state(0.0)
    with CheckpointManager(root, local=local, keep_last=2, save_every_steps=2, timeout_s=30) as manager:
        for step in range(1, 9):
            manager.save_if_due(step, state(step))
        manager.wait()
        torch.distributed.barrier()
        found = manager.restore(target)
        torch.distributed.barrier()
        if rank == 1:
            flip(next(Path(local, "step-00000008").glob("data/*/model-*.safetensors")))
            flip(next(Path(root, "step-00000008").glob("data/*/model-*.safetensors")))
        torch.distributed.barrier()
        found_before = manager.restore(target)
        assert target["extra"] == {"value": float(found_before or 0)}
    assert found == 8
    return manager.steps(), found_before, refused


def test_ranks_share_a_local_tier_and_pass_over_damage_alike(places: tuple[Path, Path]) -> None:
    root, local = map(str, places)
    results = run_distributed(_ranks, 2, root, local)
    for steps, step, refused in results:
        assert steps == [6, 8]
        assert step == 6
        assert "another directory on ranks 1 than on rank 0" in refused
