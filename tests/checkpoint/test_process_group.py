"""Saves and loads by some of the ranks of a job."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import checkpoint
from tests.distributed import run_distributed


def by_two_of_three(rank: int, world_size: int, path: str) -> str:
    group = dist.new_group([1, 2])
    state = {"extra": {"w": torch.full((3,), 7.0), "rank": "same"}}
    if rank == 0:
        with pytest.raises(ValueError, match="rank 0 is not in it") as raised:
            checkpoint.save(path, state, process_group=group)
        return str(raised.value)
    checkpoint.save(path, state, process_group=group)
    state["extra"]["w"].zero_()
    checkpoint.load(path, state, process_group=group)
    return str(state["extra"]["w"].tolist())


def test_the_ranks_of_a_group_save_and_load_and_another_is_refused_in_one_line(tmp_path: Path) -> None:
    refused, *loaded = run_distributed(by_two_of_three, 3, str(tmp_path / "c"))
    assert "\n" not in refused
    assert loaded == ["[7.0, 7.0, 7.0]"] * 2
