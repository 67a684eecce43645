"""Ranks are dealt lanes in turn: their work is even too, also where one document makes a lane too costly."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniload.planner.balancing import METHODS
from omniload.planner.balancing.dealing import dealt
from omniload.planner.packing import workload, workload_by_rank
from tests.omniload.balancing import items_of


def over_ranks(lane_cost: np.ndarray, num_ranks: int) -> float:
    """Cost of the costliest rank by the mean."""
    of_rank = lane_cost.reshape(-1, num_ranks).sum(axis=0)
    return float(of_rank.max() / of_rank.mean())


def lane_costs(cost: np.ndarray, lane: np.ndarray, num_lanes: int) -> np.ndarray:
    return np.bincount(lane, cost, num_lanes)


@settings(max_examples=1000)
@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=60))
def test_every_lane_gets_one_number(weights: list[int]) -> None:
    number = dealt(np.array(weights, np.int64))
    assert sorted(number.tolist()) == list(range(len(weights)))


@settings(max_examples=1000)
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=32))
def test_the_halves_differ_by_no_more_than_the_heaviest_lane(weights: list[int]) -> None:
    doubled = np.array(weights + weights[::-1], np.int64)
    halves = np.bincount(dealt(doubled) % 2, doubled, 2)
    assert abs(halves[0] - halves[1]) <= doubled.max()


@pytest.mark.parametrize("num_lanes", [64, 4096])
def test_one_heavy_lane_in_eight_leaves_ranks_even(num_lanes: int) -> None:
    random = np.random.default_rng(num_lanes)
    weight = random.integers(900, 1100, num_lanes)
    weight[random.permutation(num_lanes)[: num_lanes // 8]] *= 4
    numbered = np.empty_like(weight)
    numbered[dealt(weight)] = weight
    as_they_are = max(over_ranks(weight, ranks) for ranks in (2, 4, 8))
    assert as_they_are > 1.02, "it would not be even otherwise"
    assert max(over_ranks(numbered, ranks) for ranks in (2, 4, 8)) - 1 < (as_they_are - 1) / 4


@pytest.mark.parametrize("method", ["lpt", "kk", "hybrid"])
def test_methods_number_their_lanes_for_ranks(method: str) -> None:
    cost = np.full(128, 1000)
    cost[:8] = 9000  # each more than a lane of two items should cost
    items = items_of(cost[None], num_lanes=64, per_lane=2)
    lane = METHODS[method](items)
    of_lane = lane_costs(cost, lane, 64)
    assert of_lane.max() > 3 * of_lane.mean(), "a heavy lane, whatever is done"
    for ranks in (2, 4, 8):
        assert over_ranks(of_lane, ranks) == 1


def documents(num_lanes: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Short documents and a few that cost more than a lane should."""
    random = np.random.default_rng(seed)
    length = np.concatenate([random.integers(50, 150, num_lanes * 40), np.full(num_lanes // 16 + 1, 4000)])
    return length, length * (length + 1000)


@pytest.mark.parametrize("num_lanes", [12, 24, 64])
def test_workloads_are_even_over_ranks_where_a_document_is_more_than_a_lane(num_lanes: int) -> None:
    length, cost = documents(num_lanes, num_lanes)
    keys = {"num_packs": num_lanes, "capacity": 9000, "carried": np.zeros(len(length), bool)}
    flat, nested = workload(length, cost, **keys), workload_by_rank(length, cost, **keys)
    assert sorted(nested.piece.tolist()) == list(range(len(length)))
    of_lane = lane_costs(cost[nested.piece], nested.pack, num_lanes)
    assert of_lane.max() / of_lane.mean() > 1.2
    groups = 16 if num_lanes == 64 else 8 if num_lanes == 24 else 4
    uneven = []
    for ranks in (2, 4, 8, 16):
        # Each other lane of the rank with the costliest document has a document too.
        least = cost.max() + (num_lanes // ranks - 1) * cost.min()
        bound = max(1.0, least * ranks / cost.sum())
        if groups % ranks == 0:
            assert over_ranks(of_lane, ranks) < 1.005 * bound
            uneven.append(over_ranks(lane_costs(cost[flat.piece], flat.pack, num_lanes), ranks) / bound)
    assert max(uneven) > 1.01, "it would not be even otherwise"


@settings(max_examples=1000)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=60),
    num_packs=st.integers(1, 40),
    capacity=st.integers(30, 60),
    data=st.data(),
)
def test_workloads_by_rank_place_each_document_once_within_the_bounds(
    lengths: list[int], num_packs: int, capacity: int, data: st.DataObject
) -> None:
    length = np.array(lengths, np.int64)
    patches = np.array(
        data.draw(st.lists(st.integers(0, 9), min_size=len(length), max_size=len(length))), np.int64
    )
    carried = np.arange(len(length)) < data.draw(st.integers(0, len(length)))
    packing = workload_by_rank(
        length,
        length * length,
        num_packs=num_packs,
        capacity=capacity,
        carried=carried,
        patches=patches,
        patch_capacity=20,
    )
    assert len(set(packing.piece.tolist())) == len(packing.piece)
    assert np.array_equal(packing.length, length[packing.piece])
    assert np.bincount(packing.pack, packing.length).max() <= capacity
    assert np.bincount(packing.pack, patches[packing.piece]).max() <= 20
    if len(length) >= num_packs:
        assert np.unique(packing.pack).tolist() == list(range(num_packs)), "no lane is empty"
