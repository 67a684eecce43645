"""A failed call keeps nothing: what it had made, and the state it was given, are freed without collecting garbage."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import pytest
import torch

import checkpoint
from checkpoint import CheckpointManager
from checkpoint.boxes import Box
from checkpoint.errors import CheckpointError
from checkpoint.frameworks import optimizers
from storage import Store
from tests.checkpoint.simulation import load_simulated, save_simulated


@contextmanager
def no_circles() -> Iterator[None]:
    """Fail if what is done in here leaves errors or frames that only a collection would free."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield
        gc.collect()
        held = [one for one in gc.garbage if isinstance(one, BaseException | FrameType)]
        names = [one.f_code.co_qualname if isinstance(one, FrameType) else repr(one) for one in held]
        assert not names
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def flip_payload(root: Path) -> None:
    (path,) = root.glob("data/*/model-00000-000.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def state(size: int = 300_000) -> dict[str, object]:
    return {"model": {"small": torch.zeros(3), "weight": torch.ones(size)}}


@pytest.mark.parametrize("fault", ["corrupt", "of another shape", "not there"])
def test_a_failed_load_lets_go_of_the_state(tmp_path: Path, fault: str) -> None:
    checkpoint.save(tmp_path / "one", state())
    if fault == "corrupt":
        flip_payload(tmp_path / "one")
    target = state(300_001 if fault == "of another shape" else 300_000)
    with no_circles(), suppress(CheckpointError):
        checkpoint.load(tmp_path / ("two" if fault == "not there" else "one"), target)
        pytest.fail("it was loaded")


@pytest.mark.parametrize("fault", ["of no dtype to store", "committed already", "nowhere"])
def test_a_failed_save_lets_go_of_the_state(tmp_path: Path, fault: str) -> None:
    checkpoint.save(tmp_path / "one", state())
    (tmp_path / "file").touch()
    source = state()
    if fault == "of no dtype to store":
        source = {"model": {"weight": torch.empty(3, dtype=torch.bits8)}}
    with no_circles(), suppress(CheckpointError, OSError):
        checkpoint.save(tmp_path / ("file/two" if fault == "nowhere" else "one"), source)
        pytest.fail("it was saved")


@pytest.mark.parametrize("fault", ["corrupt", "of another shape"])
def test_ranks_that_fail_together_let_go_of_their_states(tmp_path: Path, fault: str) -> None:
    tensors = {"small": torch.zeros(3), "weight": torch.ones(300_000)}
    layouts = {key: [[Box.whole(one.shape)]] * 2 for key, one in tensors.items()}
    store = Store(tmp_path)
    save_simulated(store, 2, tensors, layouts)
    if fault == "corrupt":
        flip_payload(tmp_path)
    else:
        tensors["weight"] = torch.ones(300_001)
        layouts["weight"] = [[Box.whole((300_001,))]] * 2
    with no_circles(), suppress(BaseExceptionGroup):
        load_simulated(store, 2, tensors, layouts)
        pytest.fail("it was loaded")


def test_optimizer_state_made_for_a_damaged_checkpoint_is_gone_before_that_for_the_one_before_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained() -> dict[str, object]:
        model = torch.nn.Linear(500, 600)
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}

    manager = CheckpointManager(tmp_path, keep_last=None)
    one = trained()
    for param in one["model"].parameters():  # type: ignore[attr-defined]
        param.grad = torch.ones_like(param)
    one["optimizer"].step()  # type: ignore[attr-defined]
    for step in (1, 2):
        manager.save(step, one)
    flip_payload(tmp_path / "step-00000002")

    allocate, made, alive = optimizers._allocate, [], []

    def watched(*args: object) -> torch.Tensor:
        alive.append(sum(one() is not None for one in made))
        tensor = allocate(*args)  # type: ignore[arg-type]
        made.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(optimizers, "_allocate", watched)
    gc.collect()
    gc.disable()
    try:
        assert manager.restore(trained()) == 1
    finally:
        gc.enable()
    num_made = len(made) // 2
    assert alive == [*range(num_made), *range(num_made)]
