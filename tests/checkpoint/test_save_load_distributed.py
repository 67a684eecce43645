"""Real processes, real FSDP2 and tensor parallelism: save on some ranks, load on others, bit for bit."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import checkpoint
from checkpoint.errors import AsyncSaveFailed, CoordinationTimeout, RanksFailed
from storage.errors import NoSpace
from tests.checkpoint.simulation import bits
from tests.checkpoint.watched_store import WatchedStore
from tests.distributed import run_distributed

pytestmark = pytest.mark.slow

# name: (ranks, data-parallel, tensor-parallel)
LAYOUTS = {
    "ddp2": (2, 2, 1),
    "fsdp4": (4, 4, 1),
    "fsdp2xtp2": (4, 2, 2),
    "tp2": (2, 1, 2),
    "fsdp3": (3, 3, 1),
}


class Block(nn.Module):
    """Uneven sizes, parameters that stay plain under tensor parallelism, one of one element, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(7, 13)
        self.down = nn.Linear(13, 7)
        self.again = nn.Linear(7, 7, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("count", torch.arange(5))


def build(layout: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    _, dp, tp = LAYOUTS[layout]
    torch.manual_seed(seed)
    model: nn.Module = nn.Sequential(Block(), Block())
    if layout.startswith("ddp"):
        wrapped: nn.Module = DistributedDataParallel(model, find_unused_parameters=True)
    else:
        mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
        for block in model:
            if tp > 1:
                parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            if dp > 1:
                fully_shard(block, mesh=mesh["dp"])
        wrapped = model
    return wrapped, torch.optim.AdamW(wrapped.parameters(), lr=0.1 * (seed + 1), foreach=False)


def full(value: torch.Tensor) -> bytes:
    return bits((value.full_tensor() if isinstance(value, DTensor) else value).detach())


def contents(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, bytes]:
    found = {}
    for name, value in model.state_dict().items():
        found[name.removeprefix("module.")] = full(value)
    names = {id(value): name.removeprefix("module.") for name, value in model.named_parameters()}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            found[f"{names[id(parameter)]}.{key}"] = full(value)
    return found


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    # Given gradients instead of a backward pass, which PyTorch does not support with uneven tensor parallelism.
    for index, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, 0.25 * (index + 1))
    optimizer.step()
    optimizer.zero_grad()


def save_and_load_case(
    rank: int, world_size: int, root: str, to_save: list[str], target: str, to_load: list[str]
) -> tuple[dict[str, dict[str, bytes]], dict[str, dict[str, bytes]], dict[str, bytes]]:
    """Save in each of some layouts; then load each of some checkpoints into one layout.

    Returns contents by layout saved, contents by layout loaded, and what the rank draws at random after each load.
    """
    saved = {}
    for layout in to_save:
        model, optimizer = build(layout, seed=0)
        step(model, optimizer)
        saved[layout] = contents(model, optimizer)
        state = {"model": model, "optimizer": optimizer, "extra": {"layout": layout}}
        handle = checkpoint.async_save(f"{root}/{layout}", state, step=1, timeout_s=60)
        step(model, optimizer)  # training goes on at once
        assert handle.result(60).step == 1
        assert contents(model, optimizer) != saved[layout]
    loaded, drawn = {}, {}
    for source in to_load:
        model, optimizer = build(target, seed=1)
        state = {"model": model, "optimizer": optimizer, "extra": {"layout": ""}}
        report = checkpoint.load(f"{root}/{source}", state, timeout_s=60)
        assert report.rng_restored == (LAYOUTS[source][0] == world_size)
        assert state["extra"] == {"layout": source}
        assert optimizer.param_groups[0]["lr"] == 0.1
        loaded[source] = contents(model, optimizer)
        drawn[source] = bits(torch.rand(4))
    return saved, loaded, drawn


def test_every_layout_into_more_and_fewer_ranks(tmp_path: Path) -> None:
    saved: dict[str, dict[str, bytes]] = {}
    for world_size, target in ((2, "ddp2"), (4, "fsdp2xtp2"), (3, "fsdp3")):
        to_save = [layout for layout, (ranks, _, _) in LAYOUTS.items() if ranks == world_size]
        to_load = [*saved, *to_save]
        by_rank = run_distributed(save_and_load_case, world_size, str(tmp_path), to_save, target, to_load)
        saved |= by_rank[0][0]
        for saved_here, loaded, _ in by_rank:
            assert saved_here == by_rank[0][0]
            for source in to_load:
                assert loaded[source] == saved[source], (source, target)
        for source in set(to_load) - set(to_save):
            # Another number of ranks: no generator can go on, so each rank gets a stream of its own.
            assert len({drawn[source] for _, _, drawn in by_rank}) == world_size
    assert saved["fsdp3"] == saved["fsdp2xtp2"] == saved["ddp2"]  # the same update everywhere


def failures_case(rank: int, world_size: int, root: str) -> list[str]:
    """Several failures in one spawn: every rank must see each of them, and go on afterwards."""
    seen = []
    model = nn.Linear(3, 3)
    state: dict[str, Any] = {"model": model, "extra": {"a": 1}}

    def full_disk(point: str) -> None:
        if rank == 1 and point.startswith("before data"):
            raise NoSpace("disk", "full")

    place = WatchedStore(f"{root}/full", full_disk)
    # As many large tensors as ranks, so that the rank that fails has something to write.
    state["extra"] = {name: torch.ones(1 << 16) for name in "abc"}
    handle = checkpoint.async_save(place, state, timeout_s=30)
    try:
        handle.result(60)
    except RanksFailed as error:
        seen.append(str(error.members[0]))

    # The same, found out by the next save.
    handle = checkpoint.async_save(place, state, timeout_s=30)
    handle.wait(60)
    try:
        checkpoint.save(f"{root}/next", state, timeout_s=30)
    except (AsyncSaveFailed, RanksFailed) as error:
        seen.append(type(error).__name__)

    # And then all is well, from a thread that uses no collective while the group is busy.
    handle = checkpoint.async_save(f"{root}/good", copy.deepcopy(state), timeout_s=30)
    value = torch.ones(1000)
    for _ in range(20):
        dist.all_reduce(value)
    seen.append(handle.result(60).url)
    return seen


def test_failures_reach_all_ranks_and_the_job_goes_on(tmp_path: Path) -> None:
    results = run_distributed(failures_case, 3, str(tmp_path))
    assert all(result == results[0] for result in results)
    first, second, third = results[0]
    assert first == "rank 1 failed in stage 'write': NoSpace: disk: full"
    assert second == "AsyncSaveFailed"
    assert third.endswith("/good")
    assert sorted(path.name for path in (tmp_path / "good").iterdir()) == ["data", "manifest.json"]
    assert not (tmp_path / "full" / "manifest.json").exists()
    assert not (tmp_path / "next").exists()


def _running_statistics(rank: int, world_size: int, path: str) -> tuple[bool, ...]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 20_000, bias=False), nn.BatchNorm1d(20_000)))
    torch.manual_seed(rank)
    for _ in range(2):
        model(torch.randn(4, 8))
    checkpoint.save(path, {"model": model})
    live = model.module[1]
    stored = checkpoint.open_checkpoint(path)
    return tuple(
        bits(stored[f"model/1.{name}"][...]) == bits(getattr(live, name))
        for name in ("running_mean", "running_var", "weight")
    )


def test_buffers_that_differ_between_replicas_are_stored_as_the_lowest_rank_has_them(tmp_path: Path) -> None:
    """However little else that rank has to write; DDP broadcasts its buffers at the next step."""
    first, second = run_distributed(_running_statistics, 2, str(tmp_path / "c"))
    assert first == (True, True, True)
    assert second == (False, False, True)


def _bad_arguments(rank: int, world_size: int, root: str) -> list[object]:
    """For each call of which one rank has bad arguments, what this rank came to, and whether it was quick."""
    state = {"extra": {"n": 1}}
    manager = checkpoint.CheckpointManager(root, timeout_s=30)
    elsewhere = f"{root}/elsewhere"
    calls: list[tuple[int, Callable[[bool], object]]] = [
        (0, lambda bad: manager.save(1, state, metrics={"loss": None if bad else 1.0})),  # type: ignore[dict-item]
        (1, lambda bad: manager.save(-1 if bad else 2, state)),
        (2, lambda bad: checkpoint.save(elsewhere, state, compression={"": "no"} if bad else None)),
        (0, lambda bad: checkpoint.async_save(elsewhere, state, user_metadata=5 if bad else None)),  # type: ignore[arg-type]
    ]
    found: list[object] = []
    for where, call in calls:
        began = time.monotonic()
        try:
            call(rank == where)
        except RanksFailed as error:
            found.append([(one.rank, one.stage) for one in error.members])
        except (ValueError, TypeError):
            found.append("own")
        assert time.monotonic() - began < 15
    # What only rank 0 has a say in is nothing to fail for.
    ignored = manager.save(3, state, metrics={"loss": 1.0 if rank == 0 else None})  # type: ignore[dict-item]
    return [*found, ignored.step]


def _bad_load_arguments(rank: int, world_size: int, root: str) -> list[object]:
    """As `_bad_arguments`, of loads, with the step that is restored last."""
    state = {"extra": {"n": 1}}
    manager = checkpoint.CheckpointManager(root, timeout_s=30)
    manager.save(1, state)
    where = f"{root}/step-00000001"
    calls: list[Callable[[bool], object]] = [
        lambda bad: checkpoint.load(where, state, dtype_policy="no" if bad else "same"),  # type: ignore[arg-type]
        lambda bad: checkpoint.load("no://where" if bad else where, state),
        lambda bad: checkpoint.load(where, 5 if bad else state),  # type: ignore[arg-type]
        lambda bad: manager.restore(state, dtype_policy="no" if bad else "same"),  # type: ignore[arg-type]
        lambda bad: manager.restore(state, step="1" if bad else 1),  # type: ignore[arg-type]
    ]
    found: list[object] = []
    for call in calls:
        began = time.monotonic()
        try:
            call(rank == 1)
        except RanksFailed as error:
            found.append([(one.rank, one.stage) for one in error.members])
        except Exception:
            found.append("own")
        assert time.monotonic() - began < 15
    return [*found, manager.restore(state)]


def test_bad_arguments_of_one_rank_fail_the_load_on_all_at_once_and_the_next_works(tmp_path: Path) -> None:
    stages = ["open", "open", "open", "latest", "latest"]
    for rank, result in enumerate(run_distributed(_bad_load_arguments, 2, str(tmp_path))):
        assert result == [*("own" if rank == 1 else [(1, stage)] for stage in stages), 1]


def test_bad_arguments_of_one_rank_fail_the_save_on_all_at_once_and_the_next_works(tmp_path: Path) -> None:
    results = run_distributed(_bad_arguments, 3, str(tmp_path))
    for rank, result in enumerate(results):
        expected = ["own" if rank == where else [(where, "plan")] for where in (0, 1, 2)]
        assert result == [*expected, [(0, "plan")], 3]


def _late(rank: int, world_size: int, root: str) -> tuple[list[str], list[int]]:
    manager = checkpoint.CheckpointManager(root, save_every_minutes=1e-9, keep_last=None, timeout_s=2)
    raised = []
    for step in (1, 2):
        if (rank, step) == (0, 1):
            time.sleep(10)  # the other gives up in the meantime, and takes no part in the save that is due
        try:
            manager.save_if_due(step, {"extra": {"n": 1}})
        except CoordinationTimeout as error:
            raised.append(str(error).split(" within")[0])
        dist.barrier()
    manager.wait()
    dist.barrier()
    return raised, manager.steps()


def test_a_rank_that_gave_up_waiting_is_in_step_again_with_the_next_save(tmp_path: Path) -> None:
    assert run_distributed(_late, 2, str(tmp_path)) == [
        (["rank 1 did not finish stage 'plan'"], [2]),
        (["rank 0 gave no outcome of stage 'clock'"], [2]),
    ]
