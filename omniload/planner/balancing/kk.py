"""Karmarkar-Karp: keep differencing the two most uneven parts of an assignment, until one is left."""

from __future__ import annotations

import heapq
import itertools

import numpy as np

_MOST_DIFFERENCES = 2**20
"""Items times lanes above which items of like weight are differenced a lane's worth at a time."""


def largest_differencing(weight: np.ndarray, num_lanes: int, per_lane: int | None) -> np.ndarray:
    """Assign by the largest differencing method of Karmarkar and Karp (1982), for any number of lanes.

    A part assigns some items to the lanes. The two parts of the largest difference between their heaviest and lightest
    lane become one, the heaviest lane of one with the lightest of the other, and so on, until one part has all items.
    At first every item is a part. Where each lane gets the same number, every ``num_lanes`` items of like weight are
    one, an item to a lane, which keeps the numbers equal (balanced largest differencing, Michiels and others, 2003).
    So it is also where items times lanes are too many, for the first way takes their product in time.

    Args:
        weight: ``int64[n]``, at least 1 each, no fewer than lanes.
        num_lanes: lanes.
        per_lane: items of every lane; None: any number.

    Returns:
        ``int64[n]`` lane of each item; no lane is empty.
    """
    by_weight = np.argsort(weight, kind="stable")
    single = per_lane is None and len(weight) * num_lanes <= _MOST_DIFFERENCES
    size = 1 if single else num_lanes
    # A part is the items of its lanes, lightest lane first; -1 fills up the lightest part, and lanes without an item.
    missing = -len(weight) % size
    first = np.concatenate([np.full(missing, -1), by_weight]).reshape(-1, size)
    first = np.concatenate([np.full((len(first), num_lanes - size), -1), first], axis=1)
    sums = np.where(first >= 0, weight[first], 0)
    parts = list(sums)
    heap = [(int(part[0] - part[-1]), number) for number, part in enumerate(parts)]
    heapq.heapify(heap)
    joined: list[tuple[int, int, np.ndarray]] = []
    while len(heap) > 1:
        _, one = heapq.heappop(heap)
        _, other = heapq.heappop(heap)
        together = parts[one] + parts[other][::-1]
        order = np.argsort(together, kind="stable")
        joined.append((one, other, order))
        parts.append(together[order])
        heapq.heappush(heap, (int(parts[-1][0] - parts[-1][-1]), len(parts) - 1))
    return _lanes(first, joined, len(weight))


def _lanes(first: np.ndarray, joined: list[tuple[int, int, np.ndarray]], n: int) -> np.ndarray:
    """Follow the lanes of the last part back to the parts it was made of, down to the items."""
    num_lanes = first.shape[1]
    lane_at = {len(first) + len(joined) - 1: np.arange(num_lanes)}
    for number, (one, other, order) in zip(
        itertools.count(len(first) + len(joined) - 1, -1), reversed(joined)
    ):
        lanes = np.empty(num_lanes, np.int64)
        lanes[order] = lane_at.pop(number)
        lane_at[one], lane_at[other] = lanes, lanes[::-1]
    lane_of = np.empty(n, np.int64)
    for number, items in enumerate(first):
        lane_of[items[items >= 0]] = lane_at[number][items >= 0]
    return lane_of
