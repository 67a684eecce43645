"""Cheap sources into shared actors: as few as first fit finds, then as even as they come."""

from __future__ import annotations

import numpy as np


def grouped(load: np.ndarray) -> list[list[int]]:
    """Put items into groups that none of their loads overfills.

    First fit, largest first, says how many groups; they are then filled anew, each item into the one that it leaves
    least full (LPT; Graham, 1969, with the fullest of several loads in the place of the time), if none is overfilled by
    that.

    Args:
        load: ``float64[n, loads]``, parts of what a group has room for; an item above 1 has a group to itself.

    Returns:
        Indices of the items of each group, ascending; by the first of them.
    """
    size = load.max(axis=1, initial=0.0)
    alone = [[i] for i in np.flatnonzero(size > 1).tolist()]
    order = [i for i in np.argsort(-size, kind="stable").tolist() if size[i] <= 1]
    groups = _first_fit(load, order)
    even = _evened(load, order, len(groups))
    if all(load[group].sum(axis=0).max() <= 1 for group in even):
        groups = even
    return sorted(sorted(group) for group in alone + groups)


def _first_fit(load: np.ndarray, order: list[int]) -> list[list[int]]:
    groups: list[list[int]] = []
    filled = np.zeros((len(order), load.shape[1]))
    for i in order:
        where = int(np.argmax((filled + load[i] <= 1).all(axis=1)))  # an empty one has room
        if where == len(groups):
            groups.append([])
        groups[where].append(i)
        filled[where] += load[i]
    return groups


def _evened(load: np.ndarray, order: list[int], count: int) -> list[list[int]]:
    groups: list[list[int]] = [[] for _ in range(count)]
    filled = np.zeros((count, load.shape[1]))
    for i in order:
        where = int(np.argmin((filled + load[i]).max(axis=1)))
        groups[where].append(i)
        filled[where] += load[i]
    return [group for group in groups if group]
