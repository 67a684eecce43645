"""Who writes what several ranks hold: largest first, each box by the holder with the fewest bytes so far."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from checkpoint.ragged import ranges, starts

Ints = npt.NDArray[np.int64]

_NO_LOAD: Final = np.iinfo(np.int64).max  # of a holder that is not there: never the least loaded

# Loads are compared in units of this. So counters and the like of one set of holders, beside equal shards, lie together
# in one file, and who needs all of them reads them at once.
_UNIT_BYTES: Final = 64 << 10


def choose_writers(
    num_bytes: Ints,
    first: Ints,
    rank: Ints,
    num_ranks: int,
    by_lowest: npt.NDArray[np.bool_] | None = None,
) -> Ints:
    """Choose one holder of each box (longest processing time first).

    Boxes with the same holders are dealt out by falling size, each to the holder that has the fewest bytes to write
    at that time, the lowest rank if several have. So a rank that writes a shared box never ends with more bytes than
    any other holder of the last one it took, by more than the size of that box.

    It is a step for each box of the *longest* list, not for each box: all sets of holders that have no rank in common
    (the replica groups of one mesh axis) take their next box at once.

    Args:
        num_bytes: Size of each box; ``[n]``.
        first: Holders of box ``i`` are the rows ``first[i]`` to ``first[i + 1]``; ``[n + 1]``.
        rank: Rank of each row, ascending within a box.
        num_ranks: Number of ranks.
        by_lowest: Which boxes the lowest of their holders writes in any case; ``[n]``.

    Returns:
        The chosen row of each box; ``[n]``.
    """
    chosen = first[:-1].copy()
    num_holders = np.diff(first)
    load = np.zeros(num_ranks + 1, dtype=np.int64)
    alone = num_holders == 1
    if by_lowest is not None:
        alone |= by_lowest
    np.add.at(load, rank[chosen[alone]], num_bytes[alone])
    load[-1] = _NO_LOAD

    shared = np.flatnonzero(~alone)
    shared = shared[np.argsort(-num_bytes[shared], kind="stable")]
    set_of = _numbered_sets(first, rank, shared)
    by_set = shared[np.argsort(set_of, kind="stable")]  # the boxes of each set, by falling size
    num_boxes = np.bincount(set_of)
    set_first = starts(num_boxes)
    for family in _families(first, rank, by_set[set_first[:-1]], num_ranks):
        # Sets with more boxes first, so that those which still have one in a given step are the first few.
        family = family[np.argsort(-num_boxes[family], kind="stable")]
        begin, count = set_first[family], num_boxes[family]
        holders = _holders(first, rank, by_set[begin], num_ranks)
        loads = load[holders]
        for step in range(int(count[0])):
            active = int(np.searchsorted(-count, -step))
            boxes = by_set[begin[:active] + step]
            column = (loads[:active] // _UNIT_BYTES).argmin(axis=1)
            loads[np.arange(active), column] += num_bytes[boxes]
            chosen[boxes] = first[boxes] + column
        load[holders] = loads
        load[-1] = _NO_LOAD
    return chosen


def _numbered_sets(first: Ints, rank: Ints, boxes: Ints) -> Ints:
    """The number of the set of holders of each box, equal where the sets are, from 0 in order of appearance."""
    # A sum of pseudo-random numbers of the holders tells sets apart; that it did is checked below.
    mixed = (rank.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    sums = np.concatenate([[np.uint64(0)], np.cumsum(mixed ^ (mixed >> np.uint64(32)))])
    codes = sums[first[boxes + 1]] - sums[first[boxes]]
    _, representative, inverse = np.unique(codes, return_index=True, return_inverse=True)
    appearance = np.argsort(np.argsort(representative))
    like = boxes[representative[inverse]]
    num_holders = first[boxes + 1] - first[boxes]
    assert np.array_equal(num_holders, first[like + 1] - first[like]), "sets of holders were confused"
    rows = ranges(first[boxes], num_holders)
    assert np.array_equal(rank[rows], rank[ranges(first[like], num_holders)]), "sets of holders were confused"
    numbers: Ints = appearance[inverse]
    return numbers


def _families(first: Ints, rank: Ints, boxes: Ints, num_ranks: int) -> list[Ints]:
    """Sort sets of holders into families that have no rank in common; numbers of sets.

    Args:
        first: As of :func:`choose_writers`.
        rank: Likewise.
        boxes: The largest box of each set. Sets that come first are in the families that come first.
        num_ranks: Number of ranks.
    """
    families: list[tuple[list[int], npt.NDArray[np.bool_]]] = []
    for number, box in enumerate(boxes.tolist()):
        holders = rank[first[box] : first[box + 1]]
        free = (one for one in families if not one[1][holders].any())
        members, taken = next(free, ([], np.zeros(num_ranks, dtype=bool)))
        if not members:
            families.append((members, taken))
        members.append(number)
        taken[holders] = True
    return [np.asarray(members, dtype=np.int64) for members, _ in families]


def _holders(first: Ints, rank: Ints, boxes: Ints, num_ranks: int) -> Ints:
    """Holders of each box, ``[len(boxes), most holders]``, filled up with ``num_ranks``."""
    count = first[boxes + 1] - first[boxes]
    holders = np.full((len(boxes), int(count.max())), num_ranks, dtype=np.int64)
    column = np.arange(holders.shape[1])
    holders[column < count[:, None]] = rank[ranges(first[boxes], count)]
    return holders
