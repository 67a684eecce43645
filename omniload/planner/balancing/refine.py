"""Local search: items of the heaviest lanes change places with items of others, until the lanes are even."""

from __future__ import annotations

import numpy as np

from omniload.planner.balancing.items import Items, lane_sums
from omniload.planner.balancing.weights import least_attainable

_MOST_ROUNDS = 64
_FEWEST_ROUNDS = 8
_MOST_WORK = 2**18
"""Items times rounds, unless that makes fewer than `_FEWEST_ROUNDS`: so the time grows no faster than the items."""
_EVEN_BITS = 8
"""Lanes that are within one part in two to this of what cannot be helped are even."""
_REACH_OF_MODULES = 4
"""Where several modules count: how many items on either side of the one that suits the heaviest are tried."""
_MOST_TRIED = 2**18
"""Pairs of an item of the heaviest lane and another lane that are tried at most."""
_WORTHWHILE = 16
"""The search ends when for so many heavy lanes not even one took part in an exchange in a round."""
_NEVER = np.int64(2**63 - 1)


def refine(items: Items, lane: np.ndarray, weight: np.ndarray, enough: int | None = None) -> np.ndarray:
    """Even out the lanes: the heaviest only ever gets lighter, and caps that hold go on holding.

    In every round each lane that is too heavy meets one of the lightest, and the two exchange two items, or one moves
    where lanes may hold any number: those that leave the heavier of both lightest. If that is no help to the heaviest
    lane it meets all the others, or as many as there is time for. The search ends when hardly any lane could be helped,
    and at the latest after a number of rounds, each of which takes time in proportion to the items.

    Args:
        items: what is balanced.
        lane: ``int64[n]`` lane of each item, none empty, within the caps.
        weight: ``int64[modules, n]``, the total of each module below 2⁶¹. A lane weighs what it does in the module in
            which it weighs most.
        enough: weight that is not too heavy; by default what no assignment betters by more than one part in two to
            `_EVEN_BITS`.

    Returns:
        ``int64[n]`` lane of each item, none empty, within the caps.
    """
    lane = lane.copy()
    if enough is None:
        least = max(least_attainable(of_module, items.num_lanes, items.per_lane) for of_module in weight)
        enough = least + (least >> _EVEN_BITS)
    ascending = np.argsort(weight, axis=1, kind="stable")
    for _ in range(min(max(_MOST_WORK // len(lane), _FEWEST_ROUNDS), _MOST_ROUNDS)):
        current = _Round(items, lane, weight, ascending)
        heavy = current.heavier_than(enough)
        if not len(heavy):
            break
        helped = current.exchange(heavy, current.lightest_but(heavy)[: len(heavy)])
        if heavy[0] not in helped:
            others = current.lightest_but(np.append(helped, heavy[0]))
            others = others[: max(_MOST_TRIED // np.count_nonzero(lane == heavy[0]), 1)]
            helped = np.append(helped, current.exchange(np.full(len(others), heavy[0]), others))
        if len(helped) <= len(heavy) // _WORTHWHILE:
            break
    return lane


class _Round:
    """One round: exchanges between disjoint pairs of lanes, judged by what the lanes were at its beginning.

    Args:
        items: what is balanced.
        lane: ``int64[n]`` lane of each item, changed by exchanges.
        weight: ``int64[modules, n]``.
        ascending: ``int64[modules, n]`` items by weight.
    """

    def __init__(self, items: Items, lane: np.ndarray, weight: np.ndarray, ascending: np.ndarray) -> None:
        self._items, self._lane, self._weight = items, lane, weight
        self._sums = lane_sums(weight, lane, items.num_lanes)
        self._loads = lane_sums(items.load, lane, items.num_lanes)
        self._height = self._sums.max(axis=0)
        self._module = int(self._sums[:, self._height.argmax()].argmax())
        # Items by lane, and in a lane by weight in the module that makes the heaviest lane so heavy.
        by_weight = ascending[self._module]
        small = np.min_scalar_type(items.num_lanes)  # of few bits, which are sorted in linear time
        self._by_lane = by_weight[np.argsort(lane[by_weight].astype(small), kind="stable")]
        self._bounds = np.searchsorted(lane[self._by_lane], np.arange(items.num_lanes + 1))

    def heavier_than(self, enough: int) -> np.ndarray:
        """Of the heavier half of the lanes those that weigh more, because of the same module; heaviest first."""
        heaviest = np.argsort(-self._height, kind="stable")[: self._items.num_lanes // 2]
        height = self._height[heaviest]
        return np.asarray(heaviest[(height > enough) & (height == self._sums[self._module, heaviest])])

    def lightest_but(self, those: np.ndarray) -> np.ndarray:
        """All other lanes, lightest first."""
        others = np.delete(np.arange(self._items.num_lanes), those)
        return np.asarray(others[np.argsort(self._sums[self._module, others], kind="stable")])

    def exchange(self, heavy: np.ndarray, light: np.ndarray) -> np.ndarray:
        """Let each heavy lane make the best exchange with the light lanes beside it.

        Args:
            heavy: lanes; equal ones lie together.
            light: other lanes, one beside each.

        Returns:
            The lanes that took part.
        """
        if not len(heavy):
            return heavy
        items, sums = self._items, self._sums
        pair, give, take, possible = self._candidates(heavy, light)
        before = np.maximum(self._height[heavy], self._height[light])[pair]
        passed = _differences(self._weight, give, take)
        left, reached = sums[:, heavy][:, pair, None] - passed, sums[:, light][:, pair, None] + passed
        after = np.maximum(left, reached).max(axis=0)
        possible &= after < before[:, None]
        if len(items.cap):
            passed, cap = _differences(items.load, give, take), items.cap[:, None, None]
            possible &= np.all(self._loads[:, heavy][:, pair, None] - passed <= cap, axis=0)
            possible &= np.all(self._loads[:, light][:, pair, None] + passed <= cap, axis=0)
        after = np.where(possible, after, _NEVER)

        best_take = after.argmin(axis=1)
        after = after[np.arange(len(pair)), best_take]
        lane_of_give = heavy[pair]
        firsts = np.flatnonzero(np.diff(lane_of_give, prepend=-1))
        best = np.repeat(np.minimum.reduceat(after, firsts), np.diff(firsts, append=len(pair)))
        chosen = np.flatnonzero((after == best) & (after < _NEVER))
        chosen = chosen[np.diff(lane_of_give[chosen], prepend=-1) != 0]
        given, taken = give[chosen], take[chosen, best_take[chosen]]
        self._lane[given] = light[pair[chosen]]
        self._lane[taken[taken < len(self._lane)]] = heavy[pair[chosen]][taken < len(self._lane)]
        return np.concatenate([heavy[pair[chosen]], light[pair[chosen]]])

    def _candidates(
        self, heavy: np.ndarray, light: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Exchanges that may make pairs of lanes even.

        Returns:
            ``int64[g]`` the pair, and ``int64[g]`` the item that its heavy lane gives; ``int64[g, t]`` items to take
            for it, n being none; ``bool[g, t]`` which of them there are.
        """
        module, bounds, n = self._module, self._bounds, len(self._lane)
        counts = (bounds[1:] - bounds[:-1])[heavy]
        pair = np.repeat(np.arange(len(heavy)), counts)
        give = self._by_lane[np.arange(len(pair)) + (bounds[heavy] - np.cumsum(counts) + counts)[pair]]
        weight = self._weight[module]
        half_gap = (self._sums[module, heavy] - self._sums[module, light]) // 2
        start, stop = bounds[light][pair], bounds[light + 1][pair]
        at = _first_not_below(weight[self._by_lane], weight[give] - half_gap[pair], start, stop)
        reach = 1 if len(self._weight) == 1 else _REACH_OF_MODULES
        near = at[:, None] + np.arange(-reach, reach)
        possible = (near >= start[:, None]) & (near < stop[:, None])
        take = self._by_lane[np.clip(near, 0, n - 1)]
        if (
            self._items.per_lane is None
        ):  # a lane's only item never moves: the other lane would be the heavier
            take = np.concatenate([take, np.full((len(take), 1), n)], axis=1)
            possible = np.concatenate([possible, np.ones((len(take), 1), bool)], axis=1)
        return pair, give, take, possible


def _differences(values: np.ndarray, give: np.ndarray, take: np.ndarray) -> np.ndarray:
    """``int64[k, g, t]``: what an item has more than each that may be taken for it; item n has nothing."""
    padded = np.concatenate([values, np.zeros((len(values), 1), values.dtype)], axis=1)
    differences: np.ndarray = padded[:, give, None] - padded[:, take]
    return differences


def _first_not_below(
    values: np.ndarray, wanted: np.ndarray, start: np.ndarray, stop: np.ndarray
) -> np.ndarray:
    """Search each wanted value in an ascending part of ``values``: where in ``start..stop`` it would be inserted."""
    low, high = start, stop
    for _ in range(int((stop - start).max()).bit_length()):
        middle = (low + high) // 2
        below = (low < high) & (values[np.minimum(middle, len(values) - 1)] < wanted)
        low, high = np.where(below, middle + 1, low), np.where(below, high, middle)
    return low
