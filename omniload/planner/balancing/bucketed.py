"""Buckets of like length: each lane gets items that lie next to each other when sorted by length."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from omniload.planner.balancing.items import Items


def by_length(items: Items, weight: np.ndarray) -> np.ndarray:
    """Cut the items, longest first, into a run for each lane; lane 0 gets the longest.

    With a given number per lane the runs are of that number: lanes of the same microbatch of a pipeline, which are
    neighbours, are then of like length too. With any number, the runs are those whose costliest costs least, and the
    caps are held, if runs can hold them.

    Args:
        items: what is balanced.
        weight: ``int64[n]``, at least 1 each.

    Returns:
        ``int64[n]`` lane of each item.
    """
    n = len(items.length)
    order = np.argsort(-items.length, kind="stable")
    lane_of = np.empty(n, np.int64)
    if items.per_lane is not None:
        lane_of[order] = np.arange(n) // items.per_lane
    else:
        starts = _cheapest_runs(weight[order], _reach(items, order), items.num_lanes)
        lane_of[order] = np.searchsorted(starts, np.arange(n), side="right") - 1
    return lane_of


def _reach(items: Items, order: np.ndarray) -> list[int]:
    """Where a run that starts at an item has to stop for the caps; at the end if runs cannot hold them."""
    n = len(order)
    reach = np.full(n, n)
    for load, cap in zip(items.load[:, order], items.cap, strict=True):
        before = np.concatenate([[0], np.cumsum(load)])
        reach = np.minimum(reach, np.searchsorted(before, before[:-1] + cap, side="right") - 1)
    return reach.tolist()


def _cheapest_runs(weight: np.ndarray, reach: list[int], num_lanes: int) -> list[int]:
    """Where each of so many runs starts, if the costliest is as cheap as can be."""
    total = np.concatenate([[0], np.cumsum(weight)]).tolist()
    n = len(weight)

    def cut(most: int, reach: list[int]) -> list[int] | None:
        starts: list[int] = []
        at = 0
        while at < n:
            if len(starts) == num_lanes:
                return None
            starts.append(at)
            at = min(bisect_right(total, total[at] + most) - 1, reach[at])
        return starts

    if cut(total[-1], reach) is None:
        reach = [n] * n
    low, high = max(int(weight.max()), -(-total[-1] // num_lanes)), total[-1]
    while low < high:
        middle = (low + high) // 2
        if cut(middle, reach) is None:
            low = middle + 1
        else:
            high = middle
    starts = cut(low, reach)
    assert starts is not None
    # Fewer runs may do; the others then start at items that are in no run's beginning, the first of them.
    unused = np.delete(np.arange(n), starts)[: num_lanes - len(starts)]
    return sorted([*starts, *unused.tolist()])
