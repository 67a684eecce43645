"""Time of a step on a pipeline: simulated under the 1F1B schedule, and the closed form that bounds it.

For reports, and for the order in which a rank runs its lanes. Both come after the plan and depend on the mesh; nothing
in a plan does. A microbatch spends one part of its cost in the forward pass and two in the backward pass.
"""

from __future__ import annotations

import itertools
from collections import deque
from functools import lru_cache

import numpy as np

_FORWARD, _BACKWARD = 1, 2
_PARTS = _FORWARD + _BACKWARD
_MOST_EXHAUSTIVE = 7
"""Microbatches of which every order is tried."""
_MOST_PASSES = 20
_MOST_SWAPS = 1024
"""Swaps tried in a pass."""
_COST_BITS = 40


def simulated_time(
    cost: np.ndarray, num_stages: int, *, overhead: float = 0.0, encoder: np.ndarray | None = None
) -> np.ndarray:
    """Time from the first forward to the last backward pass of a step: the 1F1B schedule, pass by pass.

    Stage s of p starts with ``p - 1 - s`` forward passes, then alternates one forward and one backward pass, and ends
    with the backward passes that are left (PipeDream-flush; Narayanan and others, 2021). A pass starts when its stage
    is free and the neighbour it depends on is done; sending costs nothing.

    Args:
        cost: ``[..., microbatches]`` time of each microbatch in one stage, forward and backward, in the order run.
        num_stages: pipeline stages.
        overhead: time per microbatch and stage on top of its cost.
        encoder: of the shape of ``cost``: time in an encoder, which is a stage of its own before the first.

    Returns:
        ``float64[...]``; one step of data-parallel ranks takes the largest.
    """
    backbone = np.asarray(cost, np.float64) + overhead
    stages = [backbone] * num_stages
    if encoder is not None:
        stages.insert(0, np.asarray(encoder, np.float64) + overhead)
    return _finish(np.stack(stages)) / _PARTS


def closed_form_time(cost: np.ndarray, num_stages: int, *, overhead: float = 0.0) -> np.ndarray:
    """``(max + c)(p - 1 + m)``: the time if every microbatch cost as much as the costliest, never below the simulated.

    Args:
        cost: ``[..., m]`` time of each microbatch in one stage, forward and backward.
        num_stages: p, pipeline stages.
        overhead: c, time per microbatch and stage on top of its cost.

    Returns:
        ``float64[...]``.
    """
    cost = np.asarray(cost, np.float64)
    return np.asarray((cost.max(axis=-1) + overhead) * (num_stages - 1 + cost.shape[-1]))


def order_microbatches(cost: np.ndarray, num_stages: int) -> np.ndarray:
    """Order in which a rank runs its microbatches so that the simulated time is short.

    Of few microbatches the shortest of all orders. Else the best of some (as given, ascending, descending, costliest in
    the middle, costliest at both ends), in which pairs are swapped as long as that helps. One of a pair is among the
    first or last ``num_stages``: those in between hide each other.

    Args:
        cost: ``[m]`` time of each microbatch in one stage, not negative.
        num_stages: pipeline stages.

    Returns:
        ``int64[m]`` microbatches in the order to run. Costs are rounded to integers of 40 bits first, so that the order
        is the same everywhere; ties go to the order tried first.
    """
    cost = np.asarray(cost, np.float64)
    num, largest = len(cost), cost.max(initial=0.0)
    if not largest:
        return np.arange(num)
    parts = np.rint(cost * (2.0**_COST_BITS / largest)).astype(np.int64)

    def best_of(orders: np.ndarray) -> tuple[int, np.ndarray]:
        times = _finish(np.broadcast_to(parts[orders], (num_stages, *orders.shape)))
        return int(times.min()), orders[times.argmin()]

    if num <= _MOST_EXHAUSTIVE:
        return best_of(np.array(list(itertools.permutations(range(num)))))[1]
    time, order = best_of(_simple_orders(parts))
    edge = min(num_stages, max(1, _MOST_SWAPS // (2 * num)))
    one, other = np.triu_indices(num, 1)
    near_an_end = (one < edge) | (other >= num - edge)
    one, other = one[near_an_end], other[near_an_end]
    for _ in range(_MOST_PASSES):
        swapped = np.tile(order, (len(one), 1))
        swapped[np.arange(len(one)), one] = order[other]
        swapped[np.arange(len(one)), other] = order[one]
        best_time, best = best_of(swapped)
        if best_time >= time:
            break
        time, order = best_time, best
    return order


def _simple_orders(cost: np.ndarray) -> np.ndarray:
    """As given, ascending, descending, costliest in the middle, costliest at both ends."""
    ascending = np.argsort(cost, kind="stable")
    middle = np.concatenate([ascending[::2], ascending[1::2][::-1]])
    ends = np.concatenate([ascending[::-2], ascending[::-1][1::2][::-1]])
    return np.stack([np.arange(len(cost)), ascending, ascending[::-1], middle, ends])


def _finish(stages: np.ndarray) -> np.ndarray:
    """When the last backward pass ends, in thirds of the unit of cost.

    Args:
        stages: ``[stages, ..., microbatches]`` cost in each stage.
    """
    num_stages, num = len(stages), stages.shape[-1]
    costs = np.ascontiguousarray(np.moveaxis(stages, -1, 1))
    done = np.zeros((2, num_stages, num, *stages.shape[1:-1]), stages.dtype)
    free = np.zeros((num_stages, *stages.shape[1:-1]), stages.dtype)
    for stage, backward, microbatch in _schedule(num_stages, num):
        before = stage + (1 if backward else -1)
        start = free[stage]
        if 0 <= before < num_stages:
            start = np.maximum(start, done[backward, before, microbatch])
        end = start + (_BACKWARD if backward else _FORWARD) * costs[stage, microbatch]
        done[backward, stage, microbatch] = free[stage] = end
    return np.asarray(free.max(axis=0))


@lru_cache(maxsize=16)
def _schedule(num_stages: int, num_microbatches: int) -> tuple[tuple[int, int, int], ...]:
    """All passes as (stage, 0 forward or 1 backward, microbatch), each after those it depends on."""
    todo: list[deque[tuple[int, int]]] = []
    for stage in range(num_stages):
        warm_up = min(num_stages - 1 - stage, num_microbatches)
        steady = num_microbatches - warm_up
        passes = [(0, i) for i in range(warm_up)]
        passes += [one for i in range(steady) for one in ((0, warm_up + i), (1, i))]
        passes += [(1, i) for i in range(steady, num_microbatches)]
        todo.append(deque(passes))
    done: set[tuple[int, int, int]] = set()
    order: list[tuple[int, int, int]] = []
    while any(todo):
        for stage, left in enumerate(todo):
            while left:
                backward, microbatch = left[0]
                before = stage + (1 if backward else -1)
                if 0 <= before < num_stages and (before, backward, microbatch) not in done:
                    break
                left.popleft()
                done.add((stage, backward, microbatch))
                order.append((stage, backward, microbatch))
    return tuple(order)
