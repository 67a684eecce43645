"""Hybrid data parallelism: in one step, long sequences on wide groups of ranks and short ones on a single rank.

After FlexSP (arXiv 2412.01523) and ByteScale (arXiv 2502.21231). A fixed context-parallel degree is chosen for the
longest sequence, and all the short ones are cut up and exchanged for its sake. Here every step has groups of its own:
wide enough for what they hold, and no wider than balance asks for. Who is in which group is derived from the lengths
and costs of the plan, and of the mesh only the number of ranks; integers throughout, so every rank finds the same.
"""

from __future__ import annotations

import bisect
import hashlib
import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from omniload.errors import PlaceError
from omniload.placing.columns import check_ranks, whole_columns
from omniload.placing.filling import fill
from omniload.suggest import nearest_divisors

_EVEN = (105, 100)
"""Groups are joined until the costliest rank is this close to the mean: beyond, exchanging costs more than it saves."""
_FIELDS = ("first", "width", "group", "cost", "tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class HybridGroups:
    """The groups of one step, and what each computes.

    A group is ``width`` neighbouring ranks from ``first`` on, a multiple of ``width``. Its ranks cut the tokens of its
    sequences evenly among them, so that one holds ``ceil(tokens / width)``. A rank in no group has nothing to do.
    """

    num_ranks: int
    """Ranks of the cluster."""
    first: np.ndarray
    """``int64[g]``: first rank of each group, ascending."""
    width: np.ndarray
    """``int64[g]``: ranks of each group."""
    group: np.ndarray
    """``int64[n]``: group of each sequence."""
    cost: np.ndarray
    """``int64[g]``: cost of the sequences of each group, over all of its ranks."""
    tokens: np.ndarray
    """``int64[g]``: tokens of the sequences of each group, over all of its ranks."""

    @property
    def imbalance(self) -> float:
        """Cost of the costliest rank over the mean of all ranks; 1 is perfect."""
        total = int(self.cost.sum())
        return float((self.cost / self.width).max() * self.num_ranks / total) if total else 1.0

    @property
    def exchanged_tokens(self) -> int:
        """Tokens whose keys and values a rank gets from another, summed over ranks, if each group passes all around."""
        return int(np.dot(self.tokens, self.width - 1))

    @property
    def hash(self) -> str:
        """Digest of all fields."""
        return hashlib.blake2b(self.to_bytes(), digest_size=16).hexdigest()

    def to_bytes(self) -> bytes:
        """All fields as little-endian 64-bit integers: ranks, groups, sequences, then the arrays in their order."""
        head = np.array([self.num_ranks, len(self.first), len(self.group)], "<i8")
        return b"".join([head.tobytes(), *(getattr(self, name).astype("<i8").tobytes() for name in _FIELDS)])


def hybrid_groups(
    length: np.ndarray,
    cost: np.ndarray,
    *,
    num_ranks: int,
    capacity: int,
    widths: Sequence[int] | None = None,
) -> HybridGroups:
    """Groups for the sequences of one step, of a cost per rank as equal as can be.

    A sequence gets the narrowest width that its tokens fit in and that keeps its cost per rank within that of the
    busiest rank, for the lowest such bound for which there are ranks enough. Each that needs more than one rank opens a
    group, which takes on some of the longest others if it has less to do than the mean: few tokens to exchange for
    their cost. What is left goes, costliest first, to the group of the lowest cost per rank. Where single sequences
    are too coarse for balance, groups are then joined with their neighbours.

    Args:
        length: ``int64[n]`` tokens of each document or pack.
        cost: ``int64[n]`` cost of each.
        num_ranks: ranks of the cluster.
        capacity: most tokens that one rank can hold. Never exceeded.
        widths: widths a group may have, from 1 on, each a multiple of the one before; powers of two by default.

    Raises:
        PlaceError: no way found to hold all tokens, or an argument that makes no sense.
    """
    length, cost = whole_columns("groups", length=length, cost=cost)
    chain, capacity = _checked(length, num_ranks, capacity, widths)
    found = _own_groups(length, cost, num_ranks, capacity, chain)
    width, group = _alike(length, cost, num_ranks, capacity, chain) if found is None else found
    return _frozen(*_joined(width, group, cost, chain), length, cost)


def uniform_groups(
    length: np.ndarray, cost: np.ndarray, *, num_ranks: int, capacity: int, width: int
) -> HybridGroups:
    """What is usual instead, to compare with: one context-parallel degree for all sequences of the step.

    Args:
        length: ``int64[n]`` tokens of each document or pack.
        cost: ``int64[n]`` cost of each.
        num_ranks: ranks of the cluster.
        capacity: most tokens that one rank can hold. Never exceeded.
        width: that degree; to be as even as `hybrid_groups` it takes the widest of those.

    Raises:
        PlaceError: the degree does not divide the ranks; otherwise as `hybrid_groups`.
    """
    length, cost = whole_columns("groups", length=length, cost=cost)
    check_ranks("groups", num_ranks)
    if width < 1 or num_ranks % width:
        raise PlaceError(
            f"width: {width} does not divide {num_ranks} ranks; nearest that do: {nearest_divisors(num_ranks, width)}"
        )
    _, capacity = _checked(length, num_ranks, capacity, sorted({1, width}))
    return _frozen(*_alike(length, cost, num_ranks, capacity, np.array([width])), length, cost)


def _checked(
    length: np.ndarray, num_ranks: int, capacity: int, widths: Sequence[int] | None
) -> tuple[np.ndarray, int]:
    """``int64[k]`` widths that a group may have, ascending, and the capacity, or what is as good."""
    check_ranks("groups", num_ranks)
    if capacity < 1:
        raise PlaceError(f"groups: capacity is {capacity}; a rank must hold 1 token or more")
    chain = [2**power for power in range(num_ranks.bit_length())] if widths is None else list(widths)
    if chain[:1] != [1] or any(wider <= one or wider % one for one, wider in itertools.pairwise(chain)):
        raise PlaceError(
            f"widths: {chain} must begin with 1 and each be a multiple of the one before, like [1, 2, 4]"
        )
    chain = [width for width in chain if width <= num_ranks]
    tokens, longest = int(length.sum()), int(length.max(initial=0))
    if tokens > num_ranks * capacity:
        raise PlaceError(
            f"groups: the step has {tokens} tokens, but {num_ranks} ranks of {capacity} hold {num_ranks * capacity};"
            f" {-(-tokens // capacity)} ranks or a capacity of {-(-tokens // num_ranks)} would do"
        )
    if longest > chain[-1] * capacity:
        raise PlaceError(
            f"groups: a sequence has {longest} tokens, but the widest group of {chain[-1]} ranks holds"
            f" {chain[-1] * capacity}; allow wider groups, or a capacity of {-(-longest // chain[-1])}"
        )
    capacity = max(min(capacity, tokens), 1)
    if num_ranks * capacity >= 2**63:
        raise PlaceError(f"groups: {num_ranks} ranks of {capacity} tokens do not count in 64 bits")
    return np.array(chain, np.int64), capacity


def _widths_needed(
    length: np.ndarray, cost: np.ndarray, num_ranks: int, capacity: int, chain: np.ndarray
) -> np.ndarray | None:
    """``int64[n]``: the width each sequence needs; None if those that need more than 1 need more ranks than there are.

    For the lowest bound of the cost per rank for which they do not; it is no lower than the mean.
    """
    least = -(-length // capacity)

    def within(bound: int) -> np.ndarray | None:
        level = np.searchsorted(chain, np.maximum(least, -(-cost // bound)))
        if level.max(initial=0) == len(chain):
            return None
        width = chain[level]
        return width if width[width > 1].sum() <= num_ranks else None

    low = max(-(-sum(cost.tolist()) // num_ranks), 1)
    high = max(int(cost.max(initial=0)), low)
    if within(high) is None:
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if within(middle) is not None else (middle + 1, high)
    return within(high)


def _own_groups(
    length: np.ndarray, cost: np.ndarray, num_ranks: int, capacity: int, chain: np.ndarray
) -> tuple[np.ndarray, np.ndarray] | None:
    """A group for each sequence that needs more than one rank, single ranks besides, and the others among them all.

    Returns:
        Width of each group, from rank 0 on, and group of each sequence; None if that does not hold them all.
    """
    needed = _widths_needed(length, cost, num_ranks, capacity, chain)
    if needed is None:
        return None
    wide = np.flatnonzero(needed > 1)
    wide = wide[np.argsort(-needed[wide], kind="stable")]  # so that each begins at a multiple of its width
    width = np.concatenate([needed[wide], np.ones(num_ranks - int(needed[wide].sum()), np.int64)])
    room, load = width * capacity, np.zeros(len(width), np.int64)
    room[: len(wide)] -= length[wide]
    group = np.full(len(length), -1)
    group[wide] = np.arange(len(wide))
    mean = -(-int(cost.sum()) // num_ranks)
    _take_on(group, mean * width[: len(wide)] - cost[wide], room, length, cost)
    np.add.at(load, group[group >= 0], cost[group >= 0])
    rest = np.flatnonzero(group < 0)
    placed = fill(width, room, load, length[rest], cost[rest])
    if placed is None:
        return None
    group[rest] = placed
    return width, group


def _take_on(
    group: np.ndarray, gap: np.ndarray, room: np.ndarray, length: np.ndarray, cost: np.ndarray
) -> None:
    """Give groups that cost less than they might the costliest sequences without one that fill the gap."""
    left = np.flatnonzero(group < 0)
    left = left[np.argsort(cost[left], kind="stable")]
    items, costs = left.tolist(), cost[left].tolist()
    for number, missing in enumerate(gap.tolist()):
        while place := bisect.bisect_right(costs, missing):
            item = items[place - 1]
            if costs[place - 1] == 0 or length[item] > room[number]:
                break
            group[item] = number
            room[number] -= length[item]
            missing -= costs[place - 1]
            del items[place - 1], costs[place - 1]


def _alike(
    length: np.ndarray, cost: np.ndarray, num_ranks: int, capacity: int, chain: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Groups of one width, the narrowest for which all sequences find room; returns as `_own_groups`."""
    narrowest = int(np.searchsorted(chain, -(-int(length.max(initial=0)) // capacity)))
    for level in range(narrowest, len(chain)):
        width = _tiles(num_ranks, chain[: level + 1])
        group = fill(width, width * capacity, np.zeros(len(width), np.int64), length, cost)
        if group is not None:
            return width, group
    percent = 100 * int(length.sum()) // (num_ranks * capacity)
    raise PlaceError(
        f"groups: found no way to hold {len(length)} sequences of {int(length.sum())} tokens on {num_ranks} ranks of"
        f" {capacity}, {percent} % of which they fill; raise the capacity, or take fewer sequences"
    )


def _tiles(num_ranks: int, chain: np.ndarray) -> np.ndarray:
    """Widths that fill the ranks from 0 on: as many as can be of the widest, then of the next."""
    tiles: list[np.ndarray] = []
    for width in chain[::-1].tolist():
        count, num_ranks = divmod(num_ranks, width)
        tiles.append(np.full(count, width))
    return np.concatenate(tiles)


def _joined(
    width: np.ndarray, group: np.ndarray, cost: np.ndarray, chain: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Join the costliest group with all within the next wider, aligned block, while that lowers the highest cost.

    What the parts of a block hold, the block holds, so no rank gets more than its capacity.
    """
    num_ranks, widest = int(width.sum()), int(chain[-1])
    first = np.cumsum(width) - width
    owner = np.repeat(first, width)  # a group is known by its first rank
    wide = dict(zip(first.tolist(), width.tolist(), strict=True))
    load = dict.fromkeys(wide, 0)
    for begin, one in zip(first[group].tolist(), cost.tolist(), strict=True):
        load[begin] += one
    total = sum(load.values())

    def entry(begin: int) -> tuple[int, int]:  # the cost per rank as a whole number, times the widest
        return -load[begin] * (widest // wide[begin]), begin

    heap = [entry(begin) for begin in wide]
    heapq.heapify(heap)
    even, hundred = _EVEN
    while True:
        top = heap[0]
        begin = top[1]
        if begin not in wide or top != entry(begin):  # of a group that has been joined since
            heapq.heappop(heap)
            continue
        wider = next((one for one in chain.tolist() if one > wide[begin]), None)
        if wider is None or -top[0] * num_ranks * hundred <= total * widest * even:
            break
        start = begin // wider * wider
        parts = np.unique(owner[start : start + wider]).tolist()
        joint = sum(load[part] for part in parts)
        if start + wider > num_ranks or joint * (widest // wider) >= -top[0]:
            break
        for part in parts:
            del wide[part], load[part]
        owner[start : start + wider] = start
        wide[start], load[start] = wider, joint
        heapq.heappush(heap, entry(start))
    begins = np.array(sorted(wide), np.int64)
    return np.array([wide[begin] for begin in begins.tolist()]), np.searchsorted(begins, owner[first[group]])


def _frozen(width: np.ndarray, group: np.ndarray, length: np.ndarray, cost: np.ndarray) -> HybridGroups:
    """The groups that hold something, numbered through."""
    used, number = np.unique(group, return_inverse=True)
    sums = np.zeros((2, len(used)), np.int64)
    np.add.at(sums[0], number, cost)
    np.add.at(sums[1], number, length)
    return HybridGroups(
        num_ranks=int(width.sum()),
        first=(np.cumsum(width) - width)[used],
        width=width[used],
        group=number.astype(np.int64),
        cost=sums[0],
        tokens=sums[1],
    )
