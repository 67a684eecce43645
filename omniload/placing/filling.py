"""Sequences into groups of ranks of given widths, within the tokens that each has room for."""

from __future__ import annotations

import heapq

import numpy as np


def fill(
    width: np.ndarray, room: np.ndarray, load: np.ndarray, length: np.ndarray, cost: np.ndarray
) -> np.ndarray | None:
    """A group for each sequence: of the lowest cost per rank, or if some then find no room, the first with room.

    Args:
        width: ``int64[g]`` ranks of each group.
        room: ``int64[g]`` tokens that still fit in each.
        load: ``int64[g]`` cost of what is already in each.
        length: ``int64[n]`` tokens of each sequence.
        cost: ``int64[n]`` cost of each.

    Returns:
        ``int64[n]``: group of each; None if neither way holds all.
    """
    group = _lowest(width, room, load, length, cost)
    return _first(room, length) if group is None else group


def _lowest(
    width: np.ndarray, room: np.ndarray, load: np.ndarray, length: np.ndarray, cost: np.ndarray
) -> np.ndarray | None:
    """The LPT rule of Graham (1969): costliest first, each to the group of the lowest cost per rank that has room.

    Ties go to the narrower group, then to the lower number; among sequences to the longer one, then to the lower
    number. A group that lacks room for one sequence waits aside until one comes along that fits.
    """
    group = np.empty(len(length), np.int64)
    widest = int(width.max())
    left, lengths, costs = room.tolist(), length.tolist(), cost.tolist()
    per_cost = [
        widest // wide for wide in width.tolist()
    ]  # the cost per rank as a whole number: times the widest
    heap = [
        (one * factor, -factor, number)
        for number, (one, factor) in enumerate(zip(load.tolist(), per_cost, strict=True))
    ]
    heapq.heapify(heap)
    aside: list[tuple[int, tuple[int, int, int]]] = []  # by room, the most first
    for item in np.lexsort((-length, -cost)).tolist():
        tokens = lengths[item]
        while aside and -aside[0][0] >= tokens:
            heapq.heappush(heap, heapq.heappop(aside)[1])
        while heap and left[heap[0][2]] < tokens:
            entry = heapq.heappop(heap)
            heapq.heappush(aside, (-left[entry[2]], entry))
        if not heap:
            return None
        scaled, tie, number = heap[0]
        left[number] -= tokens
        group[item] = number
        heapq.heapreplace(heap, (scaled + costs[item] * per_cost[number], tie, number))
    return group


def _first(room: np.ndarray, length: np.ndarray) -> np.ndarray | None:
    """First-fit decreasing: longest first, each to the first group with room."""
    group = np.empty(len(length), np.int64)
    left = room.copy()
    for item in np.argsort(-length, kind="stable").tolist():
        number = int(np.argmax(left >= length[item]))
        if left[number] < length[item]:
            return None
        group[item] = number
        left[number] -= length[item]
    return group
