"""How even the lanes come out, and what each method is for."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniload.planner.balancing import METHODS, Items, lane_sums, two_level
from omniload.planner.balancing.kk import largest_differencing
from omniload.planner.balancing.refine import refine
from omniload.planner.balancing.weights import backbone_weight, least_attainable, module_weights
from tests.omniload.balancing import (
    few_items,
    heavy_tail,
    items_of,
    lane_costs,
    numbers,
    sums_of_every_assignment,
)

CONTEXTS = (4096, 16384, 32768, 131072)


def documents(longest: int, num_lanes: int, docs_per_lane: int) -> Items:
    """Documents of a heavy tail onto lanes of any number, by the cost of attention and what is linear."""
    length = heavy_tail(np.random.default_rng(longest + num_lanes), num_lanes * docs_per_lane, longest)
    return items_of([length * (length + 24576)], num_lanes, length=length)


@pytest.mark.parametrize("longest", CONTEXTS)
@pytest.mark.parametrize("num_lanes", [8, 32, 256])
@pytest.mark.parametrize("method", ["lpt", "kk", "hybrid", "two_level"])
def test_lanes_of_eight_documents_cost_within_half_a_percent_of_what_they_must(
    method: str, num_lanes: int, longest: int
) -> None:
    items = documents(longest, num_lanes, 8)
    mean, largest = items.cost[0].sum() / num_lanes, items.cost[0].max()
    assert lane_costs(items, METHODS[method](items)).max() <= 1.005 * max(mean, largest)
    assert lane_costs(items, METHODS["none"](items)).max() > 1.01 * max(mean, largest), "too easy"


@pytest.mark.parametrize("longest", CONTEXTS)
@pytest.mark.parametrize("method", ["lpt", "kk", "hybrid", "two_level"])
def test_packs_are_even_where_every_lane_gets_eight(method: str, longest: int) -> None:
    """Packs are full, so their costs differ by how long the documents in them are: the longest take a whole one."""
    rng = np.random.default_rng(longest)
    cost = np.empty(512, np.int64)
    for pack in range(512):
        length = heavy_tail(rng, 400, longest)
        length = np.diff(np.minimum(np.concatenate([[0], np.cumsum(length)]), longest))
        cost[pack] = (length * (length + 24576)).sum()
    items = items_of(cost[None], 64, 8)
    # However the j costliest are spread, over i lanes say, those also hold 8 i - j others.
    ascending = np.concatenate([[0], np.cumsum(np.sort(cost))])
    least = max(
        min((ascending[-1] - ascending[-1 - j] + ascending[8 * i - j]) / i for i in range(-(-j // 8), j + 1))
        for j in range(1, 65)
    )
    least = max(least, cost.sum() / 64)
    assert lane_costs(items, METHODS[method](items)).max() <= 1.005 * least


@pytest.mark.parametrize("per_lane", [8, None])
def test_hybrid_evens_out_backbone_and_encoder_where_lpt_does_only_one(per_lane: int | None) -> None:
    rng = np.random.default_rng(0)
    length = heavy_tail(rng, 32 * 8, 4096)
    patches = np.where(rng.random(256) < 0.4, np.minimum(heavy_tail(rng, 256, 4096), length), 0)
    items = items_of([length * (length + 24576), patches * (patches + 6000)], 32, per_lane)
    least = np.maximum(items.cost.sum(axis=1) / 32, items.cost.max(axis=1))
    assert np.all(lane_sums(items.cost, METHODS["hybrid"](items), 32).max(axis=1) <= 1.005 * least)
    assert lane_sums(items.cost, METHODS["lpt"](items), 32)[1].max() > 1.1 * least[1]


def test_hybrid_without_an_encoder_is_as_even_as_lpt() -> None:
    items = documents(4096, 32, 8)
    items = items_of([items.cost[0], 0 * items.cost[0]], 32)
    assert lane_costs(items, METHODS["hybrid"](items)).max() == lane_costs(items, METHODS["lpt"](items)).max()


@settings(max_examples=1000)
@given(
    weights=numbers(12, 50), num_items=st.integers(2, 12), num_lanes=st.integers(2, 4), fixed=st.booleans()
)
def test_differencing_is_the_textbook_algorithm(
    weights: list[int], num_items: int, num_lanes: int, fixed: bool
) -> None:
    num_items = max(num_items, num_lanes)
    num_items -= num_items % num_lanes if fixed else 0
    weights = [weight + 1 for weight in weights[:num_items]]
    size = num_lanes if fixed else 1
    ascending = sorted(weights)
    parts = [
        [0] * (num_lanes - size) + ascending[start : start + size] for start in range(0, num_items, size)
    ]
    while len(parts) > 1:
        parts.sort(key=lambda part: part[0] - part[-1])
        first, second = parts[:2]
        parts = [*parts[2:], sorted(a + b for a, b in zip(first, reversed(second), strict=True))]
    lane = largest_differencing(np.array(weights), num_lanes, num_items // num_lanes if fixed else None)
    count = np.bincount(lane, minlength=num_lanes)
    assert count.min() >= 1
    assert not fixed or count.max() == count.min()
    sums = [sum(weights[item] for item in np.flatnonzero(lane == one)) for one in range(num_lanes)]
    assert sorted(sums) == parts[0]


def test_differencing_divides_what_lpt_and_exchanges_leave_uneven() -> None:
    """Of two ways, Karmarkar-Karp makes of 8, 7, 6, 5, 4 the sums 16 and 14."""
    lane = largest_differencing(np.array([8, 7, 6, 5, 4]), 2, None)
    assert sorted(np.bincount(lane, weights=[8, 7, 6, 5, 4]).tolist()) == [14, 16]


@pytest.mark.parametrize("per_lane", [16, None])
def test_differencing_many_items_a_lanes_worth_at_a_time_is_nearly_even(per_lane: int | None) -> None:
    weight = heavy_tail(np.random.default_rng(0), 16 * 512, 4096)
    lane = largest_differencing(weight, 512, per_lane)
    assert np.bincount(lane, minlength=512).tolist() == [16] * 512
    assert np.bincount(lane, weights=weight).max() <= 1.001 * weight.sum() / 512


@pytest.mark.parametrize("num_groups", [2, 4, 8])
def test_two_levels_move_less_between_groups_than_lpt_and_are_as_even(num_groups: int) -> None:
    items = documents(16384, 64, 12)
    home = np.arange(768) * num_groups // 768
    lane = two_level(items, num_groups=num_groups)
    moved = np.count_nonzero(lane * num_groups // 64 != home)
    anyhow = np.count_nonzero(METHODS["lpt"](items) * num_groups // 64 != home)
    assert moved < anyhow / 3
    assert lane_costs(items, lane).max() <= 1.005 * max(items.cost[0].sum() / 64, items.cost[0].max())


def test_two_levels_with_groups_that_cannot_be_evened_out_apart_do_as_lpt_does() -> None:
    """One group has all that costs anything, in one item per lane."""
    items = items_of([[90, 80, 70, 60, 1, 1, 1, 1]], 4, 2)
    assert lane_costs(items, two_level(items, num_groups=4)).max() == 91


def test_two_levels_take_fewer_groups_where_those_asked_for_cannot_share_the_lanes() -> None:
    items = documents(4096, 6, 8)
    assert np.array_equal(two_level(items, num_groups=5), two_level(items, num_groups=3))


@settings(max_examples=1000)
@given(items=few_items(caps=False))
def test_buckets_are_of_neighbours_in_length_longest_first(items: Items) -> None:
    lane = METHODS["bucketed"](items)
    assert np.all(np.diff(lane[np.argsort(-items.length, kind="stable")]) >= 0)


@settings(max_examples=1000)
@given(costs=numbers(8, 50), num_items=st.integers(1, 8), num_lanes=st.integers(1, 3))
def test_buckets_of_any_number_are_the_runs_whose_costliest_costs_least(
    costs: list[int], num_items: int, num_lanes: int
) -> None:
    costs, num_lanes = [cost + 1 for cost in costs[:num_items]], min(num_lanes, num_items)
    items = items_of([costs], num_lanes, length=np.arange(num_items, 0, -1))
    best = min(
        max(sum(costs[i:j]) for i, j in zip((0, *cuts), (*cuts, num_items), strict=True))
        for cuts in _cuts(num_items, num_lanes - 1)
    )
    assert lane_costs(items, METHODS["bucketed"](items)).max() == best


def test_buckets_hold_a_cap_that_runs_can_hold() -> None:
    items = items_of([[9, 1, 1, 1, 1, 1]], 3, length=[6, 5, 4, 3, 2, 1], load=[[1, 1, 1, 1, 1, 1]], cap=[2])
    assert METHODS["bucketed"](items).tolist() == [0, 0, 1, 1, 2, 2]


def test_none_deals_in_the_order_given() -> None:
    assert METHODS["none"](items_of([[9, 1, 8, 2, 7]], 2)).tolist() == [0, 1, 0, 1, 0]


@settings(max_examples=1000)
@given(items=few_items(), start=st.randoms(use_true_random=False))
def test_refining_makes_no_lane_heavier_than_the_heaviest_and_breaks_no_cap(
    items: Items, start: Random
) -> None:
    n = len(items.length)
    lane = np.arange(n) % items.num_lanes
    start.shuffle(lane)  # type: ignore[arg-type]
    before = lane.copy()
    loads = lane_sums(items.load, lane, items.num_lanes)
    items.cap[:] = np.maximum(items.cap, loads.max(axis=1))
    weight = module_weights(items)
    after = refine(items, lane, weight)
    assert np.array_equal(lane, before)
    heights = [lane_sums(weight, one, items.num_lanes).max() for one in (before, after)]
    assert heights[1] <= heights[0]
    counts = [np.bincount(one, minlength=items.num_lanes) for one in (before, after)]
    assert counts[1].min() >= 1
    assert items.per_lane is None or np.array_equal(counts[0], counts[1])
    assert np.all(lane_sums(items.load, after, items.num_lanes) <= items.cap[:, None])


def test_refining_moves_an_item_where_lanes_may_hold_any_number() -> None:
    weight = np.array([[5, 5, 5, 5]])
    lane = np.array([0, 0, 0, 1])
    assert np.bincount(refine(items_of(weight, 2), lane, weight)).tolist() == [2, 2]


@settings(max_examples=1000)
@given(costs=numbers(8, 50), num_items=st.integers(1, 8), num_lanes=st.integers(1, 3), fixed=st.booleans())
def test_what_is_least_attainable_is_never_bettered(
    costs: list[int], num_items: int, num_lanes: int, fixed: bool
) -> None:
    num_lanes = min(num_lanes, num_items)
    per_lane = num_items // num_lanes if fixed else None
    costs = costs[: num_lanes * per_lane if per_lane else num_items]
    items = items_of([costs], num_lanes, per_lane)
    weight = backbone_weight(items.cost)
    best = sums_of_every_assignment(items, weight).max(axis=1).min()
    assert least_attainable(weight, num_lanes, per_lane) <= best


def _cuts(n: int, count: int) -> list[tuple[int, ...]]:
    if count == 0:
        return [()]
    return [(*before, cut) for cut in range(count, n) for before in _cuts(cut, count - 1)]
