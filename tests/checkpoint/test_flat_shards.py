"""Tensors that were flattened and cut by somebody else: saved without communication, loaded into any other cut."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import checkpoint
from checkpoint import FlatShard, flat_shards
from checkpoint.engine.load import Loader
from checkpoint.engine.match import LoadOptions
from checkpoint.engine.save import Saver
from checkpoint.frameworks.state import capture, finish, targets
from storage import Store
from tests.checkpoint.simulation import OPTIONS, bits, random_bits, run_ranks, shapes

_numbers = itertools.count()


def partitions(tensors: list[torch.Tensor], num_ranks: int, align: int) -> list[torch.Tensor]:
    """All tensors end to end, padded, in equal parts: what each rank holds under ZeRO-1 and -2."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    size = -(-len(flat) // (num_ranks * align)) * align
    padded = torch.cat([flat, torch.full((num_ranks * size - len(flat),), torch.nan)])
    return list(padded.split(size)) if size else [padded] * num_ranks


@settings(max_examples=60, deadline=None)
@given(
    st.lists(shapes, min_size=1, max_size=5),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 8),
    st.booleans(),
)
def test_partitions_load_into_any_other_cut(
    wanted: list[tuple[int, ...]], saving: int, loading: int, align: int, one_by_one: bool
) -> None:
    """Also those of ZeRO-3, which cuts every tensor by itself; padding is neither saved nor touched."""
    tensors = [random_bits(shape, torch.float32, seed=index) for index, shape in enumerate(wanted)]
    names = [f"t{index}" for index in range(len(tensors))]
    shapes_of = dict(zip(names, wanted, strict=True))
    store = Store(f"memory://flat/{next(_numbers)}")

    def cut(rank: int, num_ranks: int, each: bool, values: list[torch.Tensor]) -> dict[str, FlatShard]:
        if not each:
            part = partitions(values, num_ranks, align)[rank].clone()
            return flat_shards(part, shapes_of, start=rank * part.numel())
        found: dict[str, FlatShard] = {}
        for name, value in zip(names, values, strict=True):
            part = partitions([value], num_ranks, align)[rank].clone()
            found |= flat_shards(part, {name: shapes_of[name]}, start=rank * part.numel())
        return found

    def saved(coordinator):  # type: ignore[no-untyped-def]
        mine = {"master": cut(coordinator.rank, saving, one_by_one, tensors)}
        Saver(coordinator).save(store, lambda: capture(mine), OPTIONS, background=False).result(20)

    def loaded(coordinator):  # type: ignore[no-untyped-def]
        blank = [torch.full_like(tensor, torch.nan) for tensor in tensors]
        mine = {"master": cut(coordinator.rank, loading, not one_by_one, blank)}
        Loader(coordinator).load(
            store,
            ["master"],
            lambda stored: targets(mine, stored),
            lambda stored, found, _: finish(mine, stored, found),
            LoadOptions(timeout_s=20),
        )
        return mine["master"]

    run_ranks(saving, saved)
    parts = run_ranks(loading, loaded)
    for name, tensor in zip(names, tensors, strict=True):
        # Together, in order of rank, they are the tensor.
        held = [part[name] for part in parts]
        assert b"".join(bits(one.memory) for one in held) == bits(tensor)
        starts = [one.start for one in held if one.memory.numel()]
        assert starts == sorted(starts)


def test_whole_tensors_are_what_others_see(tmp_path: Path) -> None:
    memory = torch.arange(20.0)
    shards = flat_shards(memory, {"a": (2, 3), "b": (), "c": (3, 4)}, start=0)
    checkpoint.save(tmp_path / "one", {"master": shards, "list": [shards["a"], 1]})
    saved = checkpoint.open_checkpoint(tmp_path / "one")
    assert saved["master/a"][:].equal(memory[:6].view(2, 3))
    assert saved["master/c"][:].equal(memory[7:19].view(3, 4))
    assert saved["list/0"][:].equal(memory[:6].view(2, 3))
    whole = {"a": torch.zeros(2, 3), "b": torch.zeros(()), "c": torch.zeros(3, 4)}
    checkpoint.load(tmp_path / "one", {"master": whole})
    assert whole["c"].equal(memory[7:19].view(3, 4))
    memory.zero_()
    checkpoint.load(tmp_path / "one", {"list": [shards["a"], 0], "master": shards})
    assert memory.equal(torch.cat([torch.arange(19.0), torch.zeros(1)])), "in place, without the padding"


def test_memory_that_is_not_of_the_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match=r"memory has shape \[2, 2\]"):
        FlatShard(memory=torch.zeros(2, 2), shape=(2, 2), start=0)
    for start in (-1, 2):
        with pytest.raises(ValueError, match=r"reaches beyond a tensor of shape \[2, 2\]"):
            FlatShard(memory=torch.zeros(3), shape=(2, 2), start=start)


def test_memory_beyond_all_tensors_is_padding() -> None:
    shards = flat_shards(torch.zeros(5), {"a": (2, 2), "b": (3,)}, start=100)
    assert all(one.memory.numel() == one.start == 0 for one in shards.values())
    assert math.prod(shards["a"].shape) == 4
