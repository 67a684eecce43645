"""Time of a step on a pipeline: the simulation against a plain recursion, its closed form, and the order of lanes."""

from __future__ import annotations

from functools import cache
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniload.planner.pipeline import closed_form_time, order_microbatches, simulated_time
from tests.omniload.balancing import numbers

shapes = st.tuples(st.integers(1, 5), st.integers(1, 6))


def time_by_recursion(stages: list[list[int]]) -> int:
    """Three times the time of 1F1B: a pass begins after the pass before it in its stage, and its neighbour's."""
    num_stages, num = len(stages), len(stages[0])

    def passes(stage: int) -> list[tuple[str, int]]:
        forward, backward = [("f", i) for i in range(num)], [("b", i) for i in range(num)]
        warm_up = num_stages - 1 - stage
        order = forward[:warm_up]
        for i in range(num):
            order += [*forward[warm_up + i :][:1], backward[i]]
        return order

    @cache
    def end(stage: int, kind: str, i: int) -> int:
        order = passes(stage)
        at = order.index((kind, i))
        begin = end(stage, *order[at - 1]) if at else 0
        if kind == "f" and stage > 0:
            begin = max(begin, end(stage - 1, "f", i))
        if kind == "b" and stage < num_stages - 1:
            begin = max(begin, end(stage + 1, "b", i))
        return begin + stages[stage][i] * (1 if kind == "f" else 2)

    return max(end(stage, "b", num - 1) for stage in range(num_stages))


@settings(max_examples=1000)
@given(shape=shapes, costs=numbers(6, 1000), encoder=numbers(6, 1000), overhead=st.integers(0, 50))
def test_the_simulation_is_the_longest_chain_of_passes(
    shape: tuple[int, int], costs: list[int], encoder: list[int], overhead: int
) -> None:
    num_stages, num = shape
    cost, first = 3 * np.array(costs[:num]), 3 * np.array(encoder[:num])
    stages = [(cost + 3 * overhead).tolist()] * num_stages
    assert 3 * simulated_time(cost, num_stages, overhead=3 * overhead) == time_by_recursion(stages)
    stages.insert(0, (first + 3 * overhead).tolist())
    with_encoder = simulated_time(cost, num_stages, overhead=3 * overhead, encoder=first)
    assert 3 * with_encoder == time_by_recursion(stages)


@settings(max_examples=1000)
@given(shape=shapes, costs=numbers(6, 1000), overhead=st.integers(0, 50))
def test_the_closed_form_is_reached_by_equal_microbatches_and_never_exceeded(
    shape: tuple[int, int], costs: list[int], overhead: int
) -> None:
    num_stages, num = shape
    cost = 3 * np.array(costs[:num])
    bound = closed_form_time(cost, num_stages, overhead=3 * overhead)
    assert bound == (cost.max() + 3 * overhead) * (num_stages - 1 + num)
    assert simulated_time(cost, num_stages, overhead=3 * overhead) <= bound
    equal = np.full(num, cost.max())
    assert simulated_time(equal, num_stages, overhead=3 * overhead) == bound


def test_all_data_parallel_ranks_are_simulated_at_once() -> None:
    cost = np.random.default_rng(0).integers(1, 100, (7, 12))
    together = simulated_time(cost, 4)
    assert together.shape == (7,)
    assert together.tolist() == [simulated_time(row, 4) for row in cost]


def test_one_stage_takes_the_sum() -> None:
    assert simulated_time(np.array([3, 6, 9]), 1) == 18


@settings(max_examples=1000)
@given(costs=numbers(10, 1000), num=st.integers(1, 10), num_stages=st.integers(1, 6))
def test_the_order_has_each_microbatch_once_and_is_no_slower_than_the_one_given(
    costs: list[int], num: int, num_stages: int
) -> None:
    cost = np.array(costs[: num - 1 if num == 7 else num])  # all orders of seven take long
    order = order_microbatches(cost, num_stages)
    assert sorted(order.tolist()) == list(range(len(cost)))
    assert simulated_time(cost[order], num_stages) <= simulated_time(cost, num_stages) * (1 + 1e-9)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("num", [5, 7, 8])
def test_the_order_is_the_best_of_few_and_near_it_of_more(num: int, num_stages: int) -> None:
    orders = np.array(list(permutations(range(num))))
    saved = []
    for seed in range(3):
        cost = 3 * np.rint(1000 * np.exp(np.random.default_rng(seed).normal(0, 1, num)))
        times = simulated_time(cost[orders], num_stages)
        found = simulated_time(cost[order_microbatches(cost, num_stages)], num_stages)
        assert found <= times.min() * (1 + 1e-9 if num <= 7 else 1.05)
        saved.append(times.mean() / found)
    assert num_stages == 1 or max(saved) > 1.02, "the order hardly mattered"


def test_the_order_of_many_microbatches_comes_near_to_the_work_of_one_stage() -> None:
    cost = np.exp(np.random.default_rng(0).normal(0, 1, 64))
    order = order_microbatches(cost, 8)
    assert simulated_time(cost[order], 8) < 0.7 * simulated_time(cost, 8)
    assert np.array_equal(order, order_microbatches(cost * 2.0**40, 8))


@pytest.mark.parametrize("cost", [[], [0.0, 0.0, 0.0], [5.0]])
def test_an_order_there_is_no_choice_of_is_the_one_given(cost: list[float]) -> None:
    assert order_microbatches(np.array(cost), 4).tolist() == list(range(len(cost)))
