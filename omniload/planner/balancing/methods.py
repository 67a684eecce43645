"""The methods of balancing: each from items to the lane of each item, within the caps.

Every one decides by integers and stable sorts only, so that the same items get the same lanes on every platform.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from omniload.planner.balancing.bucketed import by_length
from omniload.planner.balancing.caps import check_possible, hold_caps
from omniload.planner.balancing.dealing import dealt
from omniload.planner.balancing.items import Infeasible, Items, lane_sums
from omniload.planner.balancing.kk import largest_differencing
from omniload.planner.balancing.lpt import heaviest_first
from omniload.planner.balancing.refine import refine
from omniload.planner.balancing.two_level import inside_groups
from omniload.planner.balancing.weights import backbone_weight, least_attainable, module_weights

_MOVE_FOR = 256
"""Items move between groups to make lanes cheaper by more than one part in so many, not for less."""


def lpt(items: Items) -> np.ndarray:
    """Balance the backbone: costliest first to the cheapest lane, then exchanges.

    Without caps and given numbers, the costliest lane costs at most 4/3 - 1/(3 num_lanes) of the least possible.

    Args:
        items: what is balanced.

    Returns:
        ``int64[n]`` lane of each item.

    Raises:
        Infeasible: no assignment was found that holds the caps.
    """
    return _numbered(backbone_weight(items.cost), _improved(items, heaviest_first), items.num_lanes)


def kk(items: Items) -> np.ndarray:
    """Balance the backbone: Karmarkar-Karp, then exchanges; or as `lpt` does, if that comes out better.

    Better is the cheaper costliest lane, then the smaller sum of squared costs.

    Args:
        items: what is balanced.

    Returns:
        ``int64[n]`` lane of each item.

    Raises:
        Infeasible: no assignment was found that holds the caps.
    """
    lane = min(_both(items, _differenced, lpt), key=lambda lane: _unevenness(items, lane))
    return _numbered(backbone_weight(items.cost), lane, items.num_lanes)


def bucketed(items: Items) -> np.ndarray:
    """Give each lane items of like length: neighbours, when sorted by length; the longest are in lane 0.

    With a given number per lane the runs of neighbours are of that number, so that little is padding, and lanes whose
    numbers are near cost alike. Else they are the runs of which the costliest costs least. Caps come first: items may
    leave their run for them.

    Args:
        items: what is balanced.

    Returns:
        ``int64[n]`` lane of each item.

    Raises:
        Infeasible: no assignment was found that holds the caps.
    """
    check_possible(items)
    return hold_caps(items, by_length(items, backbone_weight(items.cost)))


def hybrid(items: Items) -> np.ndarray:
    """Balance backbone and encoders at once: each so that its costliest lane costs little more than it must.

    What is made small is the largest ratio, over the modules, of the two.

    Args:
        items: what is balanced.

    Returns:
        ``int64[n]`` lane of each item.

    Raises:
        Infeasible: no assignment was found that holds the caps.
    """
    check_possible(items)
    weight = module_weights(items)
    together = np.maximum((weight // len(weight)).sum(axis=0), 1)
    lane = heaviest_first(together, items.num_lanes, items.per_lane)
    return _numbered(together, refine(items, hold_caps(items, lane), weight), items.num_lanes)


def two_level(items: Items, *, num_groups: int = 8) -> np.ndarray:
    """Balance the backbone, moving little: inside blocks of neighbouring items first, then between the blocks.

    Items that are near each other in the order given come from the same loaders; a block of them goes to a block of
    lanes. Only lanes that then still cost more than they must, by more than one part in 256, exchange items with
    others. If that leaves the costliest lane costlier than with `lpt`, by as much, it is done as `lpt` does.

    Args:
        items: what is balanced.
        num_groups: blocks; fewer where so many cannot share the lanes evenly.

    Returns:
        ``int64[n]`` lane of each item.

    Raises:
        Infeasible: no assignment was found that holds the caps.
    """

    def mostly_inside_groups(items: Items) -> np.ndarray:
        check_possible(items)
        weight = backbone_weight(items.cost)
        least = least_attainable(weight, items.num_lanes, items.per_lane)
        lane = hold_caps(items, inside_groups(items, num_groups, lpt))
        return refine(items, lane, weight[None], enough=least + least // _MOVE_FOR)

    lane, other = _both(items, mostly_inside_groups, lpt)
    (most, _), (most_of_other, _) = _unevenness(items, lane), _unevenness(items, other)
    return lane if most - most_of_other <= most_of_other // _MOVE_FOR else other


def none(items: Items) -> np.ndarray:
    """Deal the items out in the order given, lane after lane.

    Args:
        items: what is dealt.

    Returns:
        ``int64[n]`` lane of each item.

    Raises:
        Infeasible: no assignment was found that holds the caps.
    """
    check_possible(items)
    return hold_caps(items, np.arange(len(items.length)) % items.num_lanes)


def _differenced(items: Items) -> np.ndarray:
    return _improved(items, largest_differencing)


def _improved(items: Items, assign: Callable[[np.ndarray, int, int | None], np.ndarray]) -> np.ndarray:
    """What a way of assigning weights makes of the backbone's, within the caps and after exchanges."""
    check_possible(items)
    weight = backbone_weight(items.cost)
    lane = assign(weight, items.num_lanes, items.per_lane)
    return refine(items, hold_caps(items, lane), weight[None])


def _both(
    items: Items, one: Callable[[Items], np.ndarray], other: Callable[[Items], np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """What two methods answer; twice the same if one of them finds nothing that holds the caps.

    Raises:
        Infeasible: neither finds anything.
    """
    try:
        lane = one(items)
    except Infeasible:
        lane = other(items)
        return lane, lane
    try:
        return lane, other(items)
    except Infeasible:
        return lane, lane


def _numbered(weight: np.ndarray, lane: np.ndarray, num_lanes: int) -> np.ndarray:
    """The same lanes, numbered so that ranks get equal work."""
    numbered: np.ndarray = dealt(lane_sums(weight[None], lane, num_lanes)[0])[lane]
    return numbered


def _unevenness(items: Items, lane: np.ndarray) -> tuple[int, int]:
    costs = lane_sums(items.cost[:1], lane, items.num_lanes)[0].tolist()
    return max(costs), sum(cost * cost for cost in costs)


METHODS: Mapping[str, Callable[[Items], np.ndarray]] = MappingProxyType(
    {"lpt": lpt, "kk": kk, "bucketed": bucketed, "hybrid": hybrid, "two_level": two_level, "none": none}
)
"""The methods by name."""
