"""Exchanging documents between packs until they cost the same, within bounds: a bounded local search."""

from __future__ import annotations

import numpy as np

_MOST_ROUNDS = 64
_NEAR_ENOUGH = 2048
"""Packs that cost at most one part in so many more than the mean are left alone."""
_TRIED = np.arange(-2, 2)
"""Documents tried in exchange for one, by how many are cheaper than what would be ideal."""


def even_out(
    pack: np.ndarray, cost: np.ndarray, load: np.ndarray, *, num_packs: int, cap: np.ndarray
) -> np.ndarray:
    """Make the costliest pack cheaper, by moving a document to a cheaper pack or exchanging it for a cheaper one.

    In every round the costliest packs are paired with the cheapest, and each pair makes the one exchange that brings
    the two closest. So no pack comes to cost more than the costliest did, and none loses its last document.

    Args:
        pack: ``int64[n]`` pack of each document.
        cost: ``int64[n]`` of each; their sum is below 2⁶².
        load: ``int64[k, n]``: what the k caps count.
        num_packs: packs there are.
        cap: ``int64[k]``: most of each load in a pack; the packs given keep it.

    Returns:
        ``int64[n]``: the pack of each document.
    """
    pack = pack.copy()
    limit = int(cost.sum()) // num_packs
    limit += limit // _NEAR_ENOUGH
    skipped = 0
    for _ in range(_MOST_ROUNDS):
        total = _sums(pack, cost, num_packs)
        falling = np.argsort(-total, kind="stable")
        # A pack of one document costs what that costs.
        high = falling[((total > limit) & (np.bincount(pack, minlength=num_packs) > 1))[falling]]
        low = falling[::-1][(total < limit)[falling[::-1]]]
        num_pairs = min(len(high), len(low))
        if not num_pairs or skipped >= len(low):
            break
        pairs = np.stack([high[:num_pairs], np.roll(low, -skipped)[:num_pairs]])
        given, taken = _best_exchanges(pairs, pack, cost, load, total, cap)
        # Where no pair has an exchange to make, the next may.
        skipped = 0 if len(given) else skipped + num_pairs
        to = pairs[1, _inverse(pairs[0], num_packs)[pack[given]]]
        swapped = taken >= 0
        pack[taken[swapped]] = pack[given[swapped]]
        pack[given] = to
    return pack


def _best_exchanges(
    pairs: np.ndarray,
    pack: np.ndarray,
    cost: np.ndarray,
    load: np.ndarray,
    total: np.ndarray,
    cap: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Of each pair that has one, the exchange that brings its packs closest: the documents given and taken, or -1."""
    num_packs = len(total)
    high, low = pairs
    pair_if_high, pair_if_low = _inverse(high, num_packs)[pack], _inverse(low, num_packs)[pack]
    gap = total[high] - total[low]
    # What may be taken, by pair and cost; of each pair also nothing, which costs nothing.
    theirs = np.flatnonzero(pair_if_low >= 0)
    document = np.concatenate([theirs, np.full(len(high), -1)])
    price = np.concatenate([cost[theirs], np.zeros(len(high), np.int64)])
    of_pair = np.concatenate([pair_if_low[theirs], np.arange(len(high))])
    order = np.lexsort((document, price, of_pair))
    document, price, of_pair = document[order], price[order], of_pair[order]
    # What may be given, and the place in that order of what would make both packs equal, or costs just more.
    ours = np.flatnonzero(pair_if_high >= 0)
    pair = pair_if_high[ours]
    prices = np.unique(price)
    # Ranks of prices, so that a pair and a price fit one number.
    keys = of_pair * (len(prices) + 1) + np.searchsorted(prices, price)
    ideal = np.searchsorted(prices, cost[ours] - gap[pair] // 2)
    at = np.searchsorted(keys, pair * (len(prices) + 1) + ideal)[:, None] + _TRIED
    inside = (at >= 0) & (at < len(keys))
    at = np.where(inside, at, 0)
    given, pair = np.broadcast_to(ours[:, None], at.shape), np.broadcast_to(pair[:, None], at.shape)
    taken, difference = document[at], cost[given] - price[at]
    may = inside & (of_pair[at] == pair) & (difference > 0) & (difference < gap[pair])
    may &= (taken >= 0) | (np.bincount(pack, minlength=num_packs)[high] > 1)[pair]
    for amount, most in zip(load, cap.tolist(), strict=True):
        of_pack = _sums(pack, amount, num_packs)
        more = amount[given] - np.where(taken >= 0, amount[taken], 0)
        may &= (of_pack[low][pair] + more <= most) & (of_pack[high][pair] - more <= most)
    given, taken, pair = given[may], taken[may], pair[may]
    apart = abs(2 * difference[may] - gap[pair])
    best = np.lexsort((taken, given, apart, pair))
    best = best[np.diff(pair[best], prepend=-1) > 0]  # the first of each pair
    return given[best], taken[best]


def _sums(pack: np.ndarray, amount: np.ndarray, num_packs: int) -> np.ndarray:
    """``int64[num_packs]``, exactly; `numpy.bincount` adds up floats."""
    sums = np.zeros(num_packs, np.int64)
    np.add.at(sums, pack, amount)
    return sums


def _inverse(packs: np.ndarray, num_packs: int) -> np.ndarray:
    """``int64[num_packs]``: where each pack is in ``packs``, -1 if nowhere."""
    where = np.full(num_packs, -1)
    where[packs] = np.arange(len(packs))
    return where
