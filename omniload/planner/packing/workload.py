"""Packs of equal work instead of equal length, one per lane: WLB-LLM (arXiv 2503.17924), algorithm 1.

A long document costs more per token than short ones, so packs of equal length cost unequal amounts. Here a pack is as
long as it takes to cost what the others cost, up to a hard bound.
"""

from __future__ import annotations

import heapq
import itertools
import operator
from collections.abc import Sequence

import numpy as np

from omniload.kernels import KERNELS
from omniload.planner.factors import prime_factors
from omniload.planner.packing.even_out import even_out
from omniload.planner.packing.parts import Packing

MOST_GROUPS = 16
"""Groups of lanes that are evened out among each other first."""
_MOST_ASIDE = 8
"""Times that packs are put aside, per document and pack."""


def workload(
    length: np.ndarray,
    cost: np.ndarray,
    *,
    num_packs: int,
    capacity: int,
    carried: np.ndarray,
    patches: np.ndarray | None = None,
    patch_capacity: int = 0,
) -> Packing:
    """Put the carried documents and then the others, costliest first, into the cheapest pack that still holds them.

    Afterwards documents are exchanged between packs so long as that makes the costliest cheaper.

    Args:
        length: ``int64[n]`` tokens per document, each in 1..capacity.
        cost: ``int64[n]`` of each, at least 0; their sum is below 2⁶².
        num_packs: packs to fill.
        capacity: most tokens of a pack.
        carried: ``bool[n]``: documents that were not placed in an earlier step.
        patches: ``int64[n]`` patches per document, each in 0..patch_capacity; None if there are none.
        patch_capacity: most patches of a pack.

    Returns:
        The packs; a document that fits in none of them is not placed. As many hold a document as can: all
        ``num_packs``, if there are as many documents.
    """
    order = np.lexsort((-cost, ~carried))
    load, cap, chosen = length[None], np.array([capacity]), None
    if patches is None or not patches.any():
        chosen = place_by_tokens(length[order], cost[order], num_packs, capacity)
    else:
        load, cap = np.stack([length, patches]), np.array([capacity, patch_capacity])
    if chosen is None:
        chosen = place(load[:, order], cost[order], num_packs, cap)
    placed, pack = order[chosen >= 0], chosen[chosen >= 0]
    pack = even_out(pack, cost[placed], load[:, placed], num_packs=num_packs, cap=cap)
    by_pack = np.argsort(pack, kind="stable")
    piece = placed[by_pack]
    return Packing(piece=piece, start=np.zeros_like(piece), length=length[piece], pack=pack[by_pack])


def workload_by_rank(
    length: np.ndarray,
    cost: np.ndarray,
    *,
    num_packs: int,
    capacity: int,
    carried: np.ndarray,
    patches: np.ndarray | None = None,
    patch_capacity: int = 0,
) -> Packing:
    """As `workload`, into packs that are lanes, of which rank r of n runs those that are r modulo n.

    Where a document costs more than a lane should, the lanes of its rank cost too much together if all other lanes cost
    the same. So documents are halved evenly, then each half, and so on, to at most `MOST_GROUPS` groups of lanes, those
    of equal remainder, and evened out inside of these. That makes ranks even if their number divides that of the
    groups. Factors of the number of lanes other than two come after it, and their parts are made alike.
    """

    def inside(documents: np.ndarray, into: int, lanes_of_pack: int) -> Packing:
        return workload(
            length[documents],
            cost[documents],
            num_packs=into,
            capacity=capacity * lanes_of_pack,
            carried=carried[documents],
            patches=None if patches is None else patches[documents],
            patch_capacity=patch_capacity * lanes_of_pack,
        )

    def placed(documents: np.ndarray, lanes: int, factors: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Documents, and the lane of each, from 0."""
        if factors:
            share = lanes // factors[0]
            split = inside(documents, factors[0], share)
            members = [documents[split.piece[split.pack == part]] for part in range(factors[0])]
            if sum(map(len, members)) >= lanes:
                _fill_up(members, cost, share)
                parts = [placed(member, share, factors[1:]) for member in members]
                return (
                    np.concatenate([part for part, _ in parts]),
                    np.concatenate([lane * factors[0] + number for number, (_, lane) in enumerate(parts)]),
                )
        packing = inside(documents, lanes, 1)
        return documents[packing.piece], packing.pack

    piece, lane = placed(np.arange(len(length)), num_packs, _splits(num_packs))
    by_lane = np.argsort(lane, kind="stable")
    piece = piece[by_lane]
    return Packing(piece=piece, start=np.zeros_like(piece), length=length[piece], pack=lane[by_lane])


def _splits(lanes: int) -> list[int]:
    """Into how many parts lanes are split, and each part again; several lanes are left in the last parts."""
    groups = itertools.accumulate(prime_factors(lanes), operator.mul)
    return [
        factor
        for factor, count in zip(prime_factors(lanes), groups, strict=True)
        if count <= MOST_GROUPS and count < lanes
    ]


def _fill_up(members: list[np.ndarray], cost: np.ndarray, least: int) -> None:
    """Let every part have so many documents, of the cheapest that others can spare; together they have enough."""
    for part in range(len(members)):
        while (lacking := least - len(members[part])) > 0:
            donor = max(range(len(members)), key=lambda other: len(members[other]))
            spared = min(lacking, len(members[donor]) - least)
            falling = members[donor][np.argsort(-cost[members[donor]], kind="stable")]
            members[donor] = falling[: len(falling) - spared]
            members[part] = np.concatenate([members[part], falling[len(falling) - spared :]])


def place(load: np.ndarray, cost: np.ndarray, num_packs: int, cap: np.ndarray) -> np.ndarray:
    """Put documents in the order given, each into the cheapest pack that still holds it.

    Of packs that cost the same, that with fewer documents comes first, so that none stays empty; then the lower number.

    Args:
        load: ``int64[k, n]``: what the k caps count, of each document at most the cap.
        cost: ``int64[n]``.
        num_packs: packs there are.
        cap: ``int64[k]``: most of each load in a pack.

    Returns:
        ``int64[n]``: the pack of each document, -1 if it fits in none.
    """
    if KERNELS is None:
        return place_in_python(load, cost, num_packs, cap)
    pack = np.empty(len(cost), np.int64)
    packs = np.zeros((num_packs, len(cap) + 2), np.int64)
    KERNELS.place(np.ascontiguousarray(load), np.ascontiguousarray(cost), cap, packs, pack)
    return pack


def place_in_python(load: np.ndarray, cost: np.ndarray, num_packs: int, cap: np.ndarray) -> np.ndarray:
    """As `place`."""
    total, count = np.zeros(num_packs, np.int64), np.zeros(num_packs, np.int64)
    room = np.repeat(cap[:, None], num_packs, axis=1)
    pack = np.full(len(cost), -1)
    for i, work in enumerate(cost.tolist()):
        fitting = np.flatnonzero((room >= load[:, i, None]).all(axis=0))
        if len(fitting):
            costs = total[fitting]
            cheapest = fitting[costs == costs.min()]
            pack[i] = chosen = cheapest[count[cheapest].argmin()]
            total[chosen] += work
            count[chosen] += 1
            room[:, chosen] -= load[:, i]
    return pack


def place_by_tokens(length: np.ndarray, cost: np.ndarray, num_packs: int, capacity: int) -> np.ndarray | None:
    """As `place`, if only tokens are bounded: in O(log packs) per document that is not longer than the one before.

    Where long and short documents alternate and packs are full, most packs would be put aside for each long one; None
    then, `place` takes less time.
    """
    room = [capacity] * num_packs
    packs = [(0, 0, number) for number in range(num_packs)]  # heap of cost, documents and number
    # Those with less room than a document had need of, by room; they wait for shorter ones.
    short: list[tuple[int, tuple[int, int, int]]] = []
    pack: list[int] = []
    most_aside = _MOST_ASIDE * (len(length) + num_packs)
    for tokens, work in zip(length.tolist(), cost.tolist(), strict=True):
        while short and -short[0][0] >= tokens:
            heapq.heappush(packs, heapq.heappop(short)[1])
        while packs and room[packs[0][2]] < tokens:
            one = heapq.heappop(packs)
            heapq.heappush(short, (-room[one[2]], one))
            most_aside -= 1
        if most_aside < 0:
            return None
        if packs:
            total, count, number = packs[0]
            room[number] -= tokens
            heapq.heapreplace(packs, (total + work, count + 1, number))
            pack.append(number)
        else:
            pack.append(-1)
    return np.array(pack, np.int64)
