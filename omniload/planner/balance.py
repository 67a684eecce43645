"""Balancing: packs onto lanes so that the lanes cost as much as each other."""

from __future__ import annotations

import heapq

import numpy as np


def longest_processing_time(cost: np.ndarray, num_lanes: int) -> np.ndarray:
    """Give every lane the same number of packs: costliest pack first, each to the cheapest lane with room.

    The LPT rule of Graham (1969) under a cardinality constraint, which keeps the shapes of all lanes equal.

    Args:
        cost: ``int64[packs]``, ``packs`` a multiple of ``num_lanes``.
        num_lanes: number of lanes.

    Returns:
        ``int64[num_lanes, packs / num_lanes]`` of packs by lane, in the order assigned; ties go to the pack and
        the lane of the lower number.
    """
    assert len(cost) % num_lanes == 0, "the mixture guarantees that lanes divide packs"
    room = len(cost) // num_lanes
    lanes: list[list[int]] = [[] for _ in range(num_lanes)]
    heap = [(0, lane) for lane in range(num_lanes)]
    costs = cost.tolist()
    for pack in np.argsort(-cost, kind="stable").tolist():
        load, lane = heap[0]
        lanes[lane].append(pack)
        if len(lanes[lane]) < room:
            heapq.heapreplace(heap, (load + costs[pack], lane))
        else:
            heapq.heappop(heap)
    return np.array(lanes, np.int64).reshape(num_lanes, room)
