"""Longest processing time first: each item, heaviest first, to the lane that weighs least so far."""

from __future__ import annotations

import heapq

import numpy as np


def heaviest_first(weight: np.ndarray, num_lanes: int, per_lane: int | None) -> np.ndarray:
    """Assign by the rule of Graham (1969), to lanes that have room where their number of items is given.

    Ties go to the item and the lane of the lower number.

    Args:
        weight: ``int64[n]``, at least 1 each, no fewer than lanes.
        num_lanes: lanes.
        per_lane: items of every lane; None: any number, and the heaviest lane weighs at most 4/3 - 1/(3 num_lanes) of
            what it must.

    Returns:
        ``int64[n]`` lane of each item; no lane is empty.
    """
    order = np.argsort(-weight, kind="stable")
    weights = weight[order].tolist()
    room = per_lane or len(weights)
    # The heaviest go to a lane each. Lanes are kept as weight << bits | lane, one integer that compares as the two.
    bits = num_lanes.bit_length()
    lowest_bits = (1 << bits) - 1
    heap = [heavy << bits | lane for lane, heavy in enumerate(weights[:num_lanes])]
    heap.sort()
    lanes = list(range(num_lanes))
    count = [1] * num_lanes
    for light in weights[num_lanes:]:
        entry = heap[0]
        lane = entry & lowest_bits
        lanes.append(lane)
        count[lane] += 1
        if count[lane] < room:
            heapq.heapreplace(heap, entry + (light << bits))
        else:
            heapq.heappop(heap)
    lane_of = np.empty(len(weight), np.int64)
    lane_of[order] = lanes
    return lane_of
