"""Tuples in a state come back as tuples."""

from __future__ import annotations

import random
from collections import namedtuple
from pathlib import Path
from typing import Any

import torch

import checkpoint
from checkpoint.frameworks.trees import like

Pair = namedtuple("Pair", ["a", "b"])


class Drawing:
    """A stateful object whose state is Python's: a tuple with a tuple in it, and nothing else will do."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def state_dict(self) -> dict[str, Any]:
        return {"random": self.random.getstate(), "pair": Pair(1, [2])}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict["pair"] == (1, [2])
        self.random.setstate(state_dict["random"])


def test_a_stateful_object_gets_back_the_tuples_it_gave(tmp_path: Path) -> None:
    saved, loaded = Drawing(1), Drawing(2)
    checkpoint.save(tmp_path / "c", {"drawing": saved})
    checkpoint.load(tmp_path / "c", {"drawing": loaded})
    assert loaded.random.random() == saved.random.random()


def test_tuples_in_a_dict_come_back_where_the_live_one_has_no_list(tmp_path: Path) -> None:
    value: dict[str, Any] = {
        "new": (1, (2, [3])),
        "tensors": (torch.ones(2), (4,)),
        "listed": (5, 6),
        "none": (7,),
    }
    checkpoint.save(tmp_path / "c", {"extra": value})
    live: dict[str, Any] = {"tensors": (torch.zeros(2), (0,)), "listed": [0], "none": None}
    listed = live["listed"]
    checkpoint.load(tmp_path / "c", {"extra": live})
    assert live["new"] == (1, (2, [3]))
    assert live["none"] == (7,)
    assert live["listed"] is listed
    assert listed == [5, 6]
    assert live["tensors"][0].tolist() == [1.0, 1.0]
    assert live["tensors"][1] == (4,)


def test_hyperparameters_that_were_stored_as_lists_become_the_tuples_they_were() -> None:
    """As checkpoints had them once."""
    assert like({"betas": (0.0, 0.0)}, {"betas": [0.9, 0.95]}) == {"betas": (0.9, 0.95)}
