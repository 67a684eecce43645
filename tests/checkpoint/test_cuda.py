"""State on a GPU: staged through pinned memory, saved, loaded, and independent of what training does meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import checkpoint
from checkpoint.engine.staging import StagingPool
from checkpoint.frameworks.rng import capture_rng, restore_rng

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.float8_e4m3fn]


def tensors(seed: int, device: str = "cuda") -> dict[str, torch.Tensor]:
    """Of every dtype; contiguous, transposed, strided, empty, of one element."""
    generator = torch.Generator("cpu").manual_seed(seed)
    made = {}
    for dtype in DTYPES:
        base = torch.randint(0, 2, (37, 65), generator=generator).to(dtype)
        name = str(dtype).removeprefix("torch.")
        made[f"{name}/flat"] = base.to(device)
        made[f"{name}/transposed"] = base.to(device).t()
        made[f"{name}/strided"] = base.to(device)[::3, 1::2]
        made[f"{name}/empty"] = base.to(device)[:0]
        made[f"{name}/one"] = base.to(device)[3, 4]
    return made


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Bit for bit."""
    return one.keys() == other.keys() and all(
        torch.equal(one[key].contiguous().view(torch.uint8), other[key].contiguous().view(torch.uint8))
        if one[key].numel()
        else one[key].shape == other[key].shape
        for key in one
    )


def test_state_on_a_gpu_comes_back_bit_for_bit(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a", {"extra": tensors(0)})
    target = tensors(1)
    checkpoint.load(tmp_path / "a", {"extra": target})
    assert same(target, tensors(0))
    assert all(tensor.is_cuda for tensor in target.values())


def test_what_a_gpu_saved_a_cpu_loads_and_the_other_way_round(tmp_path: Path) -> None:
    for source, destination in (("cuda", "cpu"), ("cpu", "cuda")):
        checkpoint.save(tmp_path / source, {"extra": tensors(0, source)})
        target = tensors(1, destination)
        checkpoint.load(tmp_path / source, {"extra": target})
        assert same(target, tensors(0, destination))


def test_an_asynchronous_save_keeps_the_values_it_was_called_with(tmp_path: Path) -> None:
    """Though kernels that were queued before still run, and others overwrite the tensors right after."""
    weight = torch.zeros(64 << 20, device="cuda")
    handles = []
    for step in range(4):
        for _ in range(20):
            weight.add_(1)
        handles.append(checkpoint.async_save(tmp_path / str(step), {"extra": {"weight": weight}}, step=step))
        for _ in range(20):
            weight.mul_(1)
    for step, handle in enumerate(handles):
        handle.result()
        target = torch.empty_like(weight)
        checkpoint.load(tmp_path / str(step), {"extra": {"weight": target}})
        assert (target == 20 * (step + 1)).all()


def test_a_save_on_another_stream_sees_what_that_stream_has_done(tmp_path: Path) -> None:
    weight = torch.zeros(64 << 20, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(50):
            weight.add_(1)
        handle = checkpoint.async_save(tmp_path / "a", {"extra": {"weight": weight}})
        weight.zero_()
    handle.result()
    target = torch.empty_like(weight)
    checkpoint.load(tmp_path / "a", {"extra": {"weight": target}})
    assert (target == 50).all()


def test_staging_memory_is_pinned_and_kept() -> None:
    pool = StagingPool()
    first = pool.take(1 << 20, timeout_s=1)
    assert first.is_pinned()
    place = first.data_ptr()
    pool.give_back(first)
    assert pool.take(1 << 19, timeout_s=1).data_ptr() == place


def test_training_goes_on_exactly_from_a_loaded_state(tmp_path: Path) -> None:
    def new() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.2), nn.Linear(64, 64)).cuda()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            loss = model(torch.randn(8, 64, device="cuda")).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    model, optimizer = new()
    train(model, optimizer, 3)
    checkpoint.save(tmp_path / "a", {"model": model, "optimizer": optimizer}, step=3)
    expected = train(model, optimizer, 3)
    assert len(set(expected)) == 3
    model, optimizer = new()
    checkpoint.load(tmp_path / "a", {"model": model, "optimizer": optimizer})
    assert train(model, optimizer, 3) == expected


def test_the_generator_of_a_gpu_goes_on_where_it_was() -> None:
    torch.rand(5, device="cuda")
    stored = capture_rng()
    expected = torch.rand(5, device="cuda")
    torch.rand(5, device="cuda")
    restore_rng(stored)
    assert torch.equal(torch.rand(5, device="cuda"), expected)
