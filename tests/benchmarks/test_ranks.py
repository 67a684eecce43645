"""The rank processes of the checkpoint benchmarks."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from benchmarks.checkpointing.ranks import RankPool


def build(value: int) -> torch.Tensor:
    return torch.tensor([value + dist.get_rank()])


def total(held: torch.Tensor) -> int:
    dist.all_reduce(held)
    return int(held)


def fail_on_one(held: torch.Tensor) -> None:
    if dist.get_rank() == 1:
        raise ValueError("no")
    dist.barrier()


def die(held: torch.Tensor) -> None:
    os._exit(3)


def test_ranks_keep_their_object_between_calls_and_answer_in_order():
    with RankPool(2, build, 10) as pool:
        assert pool.call(total) == [21, 21]
        assert pool.call(total) == [42, 42]
        assert pool.cpu_seconds() > 0
        with pytest.raises(RuntimeError, match=r"(?s)rank 1 failed in 'fail_on_one'.*ValueError: no"):
            pool.call(fail_on_one)


def test_a_rank_that_dies_is_named():
    with (
        RankPool(1, build, 0) as pool,
        pytest.raises(RuntimeError, match="rank 0 died in 'die'"),
    ):
        pool.call(die)
