"""Two levels: even lanes inside groups of items that are near each other, then between the groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from omniload.planner.balancing.items import Items


def inside_groups(items: Items, most_groups: int, balance: Callable[[Items], np.ndarray]) -> np.ndarray:
    """Divide items and lanes into groups, in the order given, and balance each group by itself, without caps.

    Args:
        items: what is balanced.
        most_groups: groups; fewer if these cannot share the lanes evenly.
        balance: the method inside a group.

    Returns:
        ``int64[n]`` lane of each item.
    """
    n, num_lanes = len(items.length), items.num_lanes
    groups = max(count for count in range(1, min(most_groups, num_lanes) + 1) if num_lanes % count == 0)
    lanes_of_group = num_lanes // groups
    lane_of = np.empty(n, np.int64)
    for group in range(groups):
        part = slice(group * n // groups, (group + 1) * n // groups)
        inside = replace(
            items,
            cost=items.cost[:, part],
            length=items.length[part],
            num_lanes=lanes_of_group,
            load=items.load[:0, part],
            cap=items.cap[:0],
        )
        lane_of[part] = group * lanes_of_group + balance(inside)
    return lane_of
