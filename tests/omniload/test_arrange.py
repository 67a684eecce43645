"""Which candidates a step takes and where they go, for each way of arranging them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniload.errors import MixtureError
from omniload.mixture import Mixture
from omniload.pieces import PIECE
from omniload.planner.graph import DGraph, NotEnough
from omniload.planner.packing import MAX_WAIT_STEPS
from omniload.planner.plan import Plan
from omniload.planner.rules import StepRules
from omniload.planner.strategies import declared

SEQ_LEN = 16
STEP = 9


def mixture(**keys: Any) -> Mixture:
    return Mixture.load({"seq_len": SEQ_LEN, "sources": {"a": {"path": "x", "weight": 1}}, **keys})


def candidates(lengths: list[int], born: list[int] | None = None) -> np.ndarray:
    pieces = np.zeros(len(lengths), PIECE)
    pieces["length"] = lengths
    pieces["row"] = np.arange(len(lengths))
    pieces["born"] = STEP if born is None else born
    return pieces


def arrange(pieces: np.ndarray, spec: Mixture, step: int) -> Plan | None:
    """The step that these candidates fill; None if they are too few."""

    def nothing_more(*_: object) -> np.ndarray:
        return np.zeros(0, PIECE)

    try:
        return declared(DGraph(step=step, rules=StepRules.of(spec), carried=pieces, draw=nothing_more))
    except NotEnough:
        return None


def taken_by(plan: Plan) -> np.ndarray:
    """The candidates that a step takes, in the order they lie in."""
    return plan.pieces["row"].astype(np.int64)


MIXTURES = {
    "best_fit": mixture(packs=6, lanes=3),
    "samples": mixture(packing="none", packs=6, lanes=3),
    "budget": mixture(packing="none", lane_tokens=40, lanes=3),
}


@pytest.mark.parametrize("way", MIXTURES)
@given(lengths=st.lists(st.integers(1, SEQ_LEN), max_size=120))
def test_a_step_takes_no_piece_twice_and_fills_every_lane(way: str, lengths: list[int]) -> None:
    spec, pieces = MIXTURES[way], candidates(lengths)
    found = arrange(pieces, spec, STEP)
    if found is None:
        tokens, pieces_wanted = StepRules.of(spec).enough()
        assert way == "budget" or (sum(lengths) < tokens and len(lengths) < pieces_wanted)
        return
    taken = taken_by(found)
    assert len(set(taken.tolist())) == len(taken) == found.offsets[-1]
    assert len(found.lane_offsets) == spec.lanes + 1
    assert (np.diff(found.lane_offsets) > 0).all()
    assert found.lane_offsets[-1] == len(found.offsets) - 1
    tokens = np.add.reduceat(pieces["length"][taken], found.offsets[:-1])
    assert tokens.max() <= SEQ_LEN
    if way != "budget":
        assert set(np.diff(found.lane_offsets)) == {2}


@given(lengths=st.lists(st.integers(1, SEQ_LEN), min_size=6, max_size=60))
def test_without_packing_the_oldest_samples_go_first_sorted_by_length(lengths: list[int]) -> None:
    found = arrange(candidates(lengths), MIXTURES["samples"], STEP)
    assert found is not None
    assert sorted(taken_by(found).tolist()) == list(range(6))
    placed = [lengths[i] for i in taken_by(found)]
    assert placed == sorted(placed, reverse=True)


@given(lengths=st.lists(st.integers(1, SEQ_LEN), max_size=120))
def test_no_lane_exceeds_its_budget_and_none_could_take_one_more(lengths: list[int]) -> None:
    pieces = candidates(lengths)
    found = arrange(pieces, MIXTURES["budget"], STEP)
    for lane in range(0 if found is None else 3):
        assert found is not None
        rows = taken_by(found)[found.lane_offsets[lane] : found.lane_offsets[lane + 1]]
        padded = len(rows) * int(pieces["length"][rows].max())
        assert padded <= 40
        shortest = pieces["length"][rows].min()
        waiting = np.delete(pieces["length"], taken_by(found))
        if (waiting < shortest).any():
            assert padded + pieces["length"][rows].max() > 40


def test_within_a_budget_a_piece_that_waited_too_long_goes_before_fuller_lanes() -> None:
    lengths = [16] * 8 + [3]
    young = arrange(candidates(lengths), MIXTURES["budget"], STEP)
    old = arrange(candidates(lengths, [STEP] * 8 + [STEP - MAX_WAIT_STEPS]), MIXTURES["budget"], STEP)
    assert young is not None
    assert old is not None
    assert 8 not in taken_by(young)
    assert taken_by(old)[0] == 8 or 8 in taken_by(old)[: old.lane_offsets[1]]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "'packs' is missing"),
        ({"packs": 2, "lane_tokens": 64}, "remove it, or set packing: none"),
        ({"packs": 2, "packing": "none", "lane_tokens": 64}, "remove one of them"),
        ({"packing": "none", "lane_tokens": 8}, "no room for a sample of seq_len 16"),
    ],
)
def test_a_size_that_is_missing_or_said_twice_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(MixtureError, match=message):
        mixture(**keys)
