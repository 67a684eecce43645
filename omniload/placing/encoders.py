"""Which rank encodes which item, when the encoder runs on all ranks and the backbone on the data-parallel ones."""

from __future__ import annotations

import heapq

import numpy as np

from omniload.placing.columns import check_ranks, whole_columns

_EVEN = (1005, 1000)
"""How far above the mean the busiest rank may be for the sake of items that then stay at home."""


def assign_encoders(cost: np.ndarray, rows: np.ndarray, home: np.ndarray, *, num_ranks: int) -> np.ndarray:
    """A rank to encode each item (an image, a clip) of a step, so that all ranks have as much to do.

    No rank gets more than the LPT rule (Graham 1969) would give the busiest, or than 0.5 % above the mean where that is
    more. Within this bound items stay at home, on the rank that needs their rows, as far as they can: of a few ways to
    do so the one that sends the fewest rows is taken. Integers throughout, so every rank finds the same.

    Args:
        cost: ``int64[n]`` cost of encoding each item.
        rows: ``int64[n]`` rows that the encoder makes of each, to be sent unless it is encoded at home.
        home: ``int64[n]`` rank that needs the rows of each.
        num_ranks: number of ranks that encode.

    Returns:
        ``int64[n]``: rank that encodes each item.

    Raises:
        PlaceError: an argument that makes no sense.
    """
    cost, rows, home = whole_columns("items", cost=cost, rows=rows, home=home)
    check_ranks("items", num_ranks, home)
    nowhere = np.full(len(cost), -1, np.int64)
    spread = _renamed(_spread(cost, nowhere, num_ranks), rows, home, num_ranks)
    mean = int(cost.sum()) // num_ranks
    bound = max(int(_loads(spread, cost, num_ranks).max()), mean * _EVEN[0] // _EVEN[1])
    found = [spread]
    for first in (np.arange(len(cost)), -cost):
        # Costliest first leaves items to spread that are small and so spread well; any order keeps more at home.
        kept = np.where(_filled_at_home(cost, home, first) <= mean, home, -1)
        found.append(_spread(cost, kept, num_ranks))
    found = [one for one in found if _loads(one, cost, num_ranks).max() <= bound]
    found = [_returned(_swapped(one, cost, rows, home), cost, rows, home, num_ranks, bound) for one in found]
    return min(found, key=lambda rank: int(rows[rank != home].sum()))


def _spread(cost: np.ndarray, rank: np.ndarray, num_ranks: int) -> np.ndarray:
    """Items without a rank (-1) to ranks, costliest first, each to the rank with the least to do."""
    rank = rank.copy()
    load = [0] * num_ranks
    for where, one in zip(rank.tolist(), cost.tolist(), strict=True):
        if where >= 0:
            load[where] += one
    heap = [(one, number) for number, one in enumerate(load)]
    heapq.heapify(heap)
    left = np.flatnonzero(rank < 0)
    order = left[np.argsort(-cost[left], kind="stable")]
    for item, one in zip(order.tolist(), cost[order].tolist(), strict=True):
        least, number = heap[0]
        rank[item] = number
        heapq.heapreplace(heap, (least + one, number))
    return rank


def _filled_at_home(cost: np.ndarray, home: np.ndarray, first: np.ndarray) -> np.ndarray:
    """``int64[n]``: cost of an item and all of the same home that go before it, those with the lower ``first``."""
    order = np.lexsort((first, home))
    before = np.cumsum(cost[order]) - cost[order]
    begins = np.searchsorted(home[order], home[order])
    filled = np.empty(len(cost), np.int64)
    filled[order] = before - before[begins] + cost[order]
    return filled


def _renamed(rank: np.ndarray, rows: np.ndarray, home: np.ndarray, num_ranks: int) -> np.ndarray:
    """Ranks swapped as a whole, greedily by the rows that one then has at home; what each has to do stays."""
    pairs, number = np.unique(rank * num_ranks + home, return_inverse=True)
    shared = np.zeros(len(pairs), np.int64)
    np.add.at(shared, number, rows)
    names = np.full(num_ranks, -1, np.int64)
    free = np.ones(num_ranks, bool)
    for pair in pairs[np.argsort(-shared, kind="stable")].tolist():
        old, new = divmod(pair, num_ranks)
        if names[old] < 0 and free[new]:
            names[old], free[new] = new, False
    names[names < 0] = np.flatnonzero(free)
    renamed: np.ndarray = names[rank]
    return renamed


def _swapped(rank: np.ndarray, cost: np.ndarray, rows: np.ndarray, home: np.ndarray) -> np.ndarray:
    """Items of equal cost swapped among their ranks so that the most rows are at home; what each has to do stays."""
    _, kind = np.unique(cost, return_inverse=True)
    # The items of a cost that want a rank, most rows first, against the places that this rank has for that cost.
    want = np.lexsort((-rows, home, kind))
    place = np.lexsort((rank, kind))
    size = int(max(home.max(initial=0), rank.max(initial=0))) + 1
    wanted, offered = kind[want] * size + home[want], kind[place] * size + rank[place]
    nth = np.arange(len(want)) - np.searchsorted(wanted, wanted)
    first, end = np.searchsorted(offered, wanted), np.searchsorted(offered, wanted, "right")
    stays = first + nth < end
    swapped = np.empty_like(rank)
    swapped[want[stays]] = home[want[stays]]
    taken = np.zeros(len(place), bool)
    taken[(first + nth)[stays]] = True
    # The others fill the other places of their cost in order; both are sorted by cost.
    swapped[want[~stays]] = rank[place[~taken]]
    return swapped


def _returned(
    rank: np.ndarray, cost: np.ndarray, rows: np.ndarray, home: np.ndarray, num_ranks: int, bound: int
) -> np.ndarray:
    """Items back home where that has room for them below the bound, those of the most rows first."""
    rank = rank.copy()
    load = _loads(rank, cost, num_ranks).tolist()
    away = np.flatnonzero(rank != home)
    for item in away[np.argsort(-rows[away], kind="stable")].tolist():
        here, there, one = int(rank[item]), int(home[item]), int(cost[item])
        if load[there] + one <= bound:
            load[there] += one
            load[here] -= one
            rank[item] = there
    return rank


def _loads(rank: np.ndarray, cost: np.ndarray, num_ranks: int) -> np.ndarray:
    load = np.zeros(num_ranks, np.int64)
    np.add.at(load, rank, cost)
    return load
