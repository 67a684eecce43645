"""Numbering lanes so that ranks, which are dealt them in turn, get equal work."""

from __future__ import annotations

import numpy as np

from omniload.planner.factors import prime_factors

_ALIKE = 256
_FEW_GROUPS = 32
"""Up to this many groups, a loop over each of them is faster than one over all at once."""


def dealt(weight: np.ndarray) -> np.ndarray:
    """Number lanes so that those of every remainder modulo 2, 4, 8, … weigh alike together.

    Rank r of n runs the lanes that are r modulo n. Where one document costs more than a lane should, its lane is heavy
    whatever is done; here its rank's other lanes are lighter for it, whatever the number of ranks.

    The lanes are halved, then each half, and so on: neighbours by weight are parted, those that differ most first, each
    time the heavier to the half that is lighter so far. Factors of their number other than two come last, and are dealt
    with alike. Lanes that differ by less than one part in `_ALIKE` keep their numbers.

    Args:
        weight: ``int64[lanes]``, the sum below 2⁶².

    Returns:
        ``int64[lanes]``: the new number of each lane.
    """
    num_lanes = len(weight)
    if int(weight.max() - weight.min()) <= int(weight.sum()) // (num_lanes * _ALIKE):
        return np.arange(num_lanes)
    groups = np.argsort(-weight, kind="stable")[None]  # [groups, lanes], heaviest first
    for factor in prime_factors(num_lanes):
        heavy = weight[groups].reshape(len(groups), -1, factor)
        spread = heavy[:, :, 0] - heavy[:, :, -1]
        # Indexed by hand: np.take_along_axis costs more than all the rest here.
        group, run = np.arange(len(groups))[:, None], np.arange(heavy.shape[1])[None, :, None]
        order = np.argsort(-spread, axis=1, kind="stable")
        lanes = groups.reshape(heavy.shape)[group, order]  # [groups, runs, factor]
        heavy = heavy[group, order]
        if factor == 2 and len(groups) <= _FEW_GROUPS:
            part = _by_signs(heavy[:, :, 0] - heavy[:, :, 1])
        else:
            part = _by_sums(heavy)
        # Part j of group g becomes group j * groups + g, so that remainders of the numbers tell the groups.
        parts = lanes[group[:, :, None], run, np.argsort(part, axis=2, kind="stable")]
        groups = parts.transpose(2, 0, 1).reshape(factor * len(groups), -1)
        falling = np.argsort(-weight[groups], axis=1, kind="stable")
        groups = groups[np.arange(len(groups))[:, None], falling]
    number = np.empty(num_lanes, np.int64)
    number[groups[:, 0]] = np.arange(num_lanes)
    return number


def _by_signs(difference: np.ndarray) -> np.ndarray:
    """As `_by_sums`, of runs of two, from ``int64[groups, runs]``: the heavier's weight less the lighter's."""
    first_is_lighter = np.empty(difference.shape, bool)
    for group, row in enumerate(difference.tolist()):
        ahead, signs = 0, []
        for one in row:
            signs.append(ahead <= 0)
            ahead += one if ahead <= 0 else -one
        first_is_lighter[group] = signs
    return np.stack([~first_is_lighter, first_is_lighter], axis=2).astype(np.int64)


def _by_sums(heavy: np.ndarray) -> np.ndarray:
    """``int64[groups, runs, factor]``: the part of each lane, if the heaviest of each run goes to the lightest part.

    Args:
        heavy: ``int64[groups, runs, factor]`` weights, runs in the order to be assigned, each heaviest first.
    """
    groups, runs, factor = heavy.shape
    sums = np.zeros((groups, factor), np.int64)
    part = np.empty(heavy.shape, np.int64)
    for run in range(runs):
        part[:, run] = np.argsort(sums, axis=1, kind="stable")
        added = np.empty_like(sums)
        np.put_along_axis(added, part[:, run], heavy[:, run], axis=1)
        sums += added
    return part
