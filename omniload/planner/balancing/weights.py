"""Costs as integers whose sums over any set of items fit 64 bits, and what lanes weigh at the least."""

from __future__ import annotations

import numpy as np

from omniload.planner.balancing.items import Items

_BITS = 61
"""The weights of all items together stay below two to this."""
_SCALE_BITS = 10
"""Modules are brought to the same scale to one part in two to this."""


def backbone_weight(cost: np.ndarray) -> np.ndarray:
    """Weigh items by their cost in the backbone: the cost itself, unless sums of it might not fit.

    Args:
        cost: ``int64[modules, n]``.

    Returns:
        ``int64[n]``, at least 1 each: an item without cost takes a place in a lane all the same, and no lane is left
        empty because nothing seems to weigh anything.
    """
    weight: np.ndarray = np.maximum(_without_last_bits(cost[0], _BITS), 1)
    return weight


def module_weights(items: Items) -> np.ndarray:
    """Weigh items in every module, on a scale on which the modules' heaviest lanes weigh the same if they must.

    Returns:
        ``int64[m, n]`` of the modules that cost anything; of the backbone alone if no other does.
    """
    costly = items.cost[1:][items.cost[1:].any(axis=1)]
    if not len(costly):
        return backbone_weight(items.cost)[None]
    bits = _BITS - 1 - _SCALE_BITS - items.num_lanes.bit_length()
    weights = []
    for cost in [items.cost[0], *costly]:
        weight = _without_last_bits(cost, bits)
        least = least_attainable(weight, items.num_lanes, items.per_lane)
        weights.append(weight * (2 ** (_BITS - 1) // (max(least, 1) * items.num_lanes)))
    return np.stack(weights)


def least_attainable(weight: np.ndarray, num_lanes: int, per_lane: int | None) -> int:
    """Bound from below what the heaviest lane weighs in any assignment.

    The mean; the heaviest item with the lightest that have to join it; and, for every j, the j + 1 lightest of the
    ``j * num_lanes + 1`` heaviest items, so many of which must be in one lane.

    Args:
        weight: ``int64[n]``, the sum below 2⁶².
        num_lanes: lanes, no more than items.
        per_lane: items of every lane; None: any number.
    """
    n = len(weight)
    before = np.concatenate([[0], np.cumsum(-np.sort(-weight))])  # weight of so many heaviest
    j = np.arange((n - 1) // num_lanes + 1)
    together = before[j * num_lanes + 1] - before[j * num_lanes - j]
    joining = int(before[-1] - before[n - per_lane + 1]) if per_lane else 0
    return max(-(-int(before[-1]) // num_lanes), int(before[1]) + joining, int(together.max()))


def _without_last_bits(cost: np.ndarray, bits: int) -> np.ndarray:
    """Costs without as many of their last bits as it takes for their sum to stay below two to ``bits``."""
    largest = int(cost.max(initial=0))
    return cost >> max(0, largest.bit_length() + len(cost).bit_length() - bits)
