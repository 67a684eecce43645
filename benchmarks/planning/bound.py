"""How few packs some lengths can possibly be put into."""

from __future__ import annotations

import numpy as np


def fewest_packs(length: np.ndarray, capacity: int) -> int:
    """The bound L2 of Martello and Toth (1990), which no packing beats.

    For every threshold ``t`` up to half the capacity: lengths above ``capacity - t`` have a pack each without company;
    those above half have one each, in which what is left may hold some of the others from ``t`` on.

    Args:
        length: ``int64[n]``, each in 1..capacity.
        capacity: of a pack.
    """
    ordered = np.sort(length)[::-1]
    before = np.concatenate([[0], np.cumsum(ordered)])

    def above(value: np.ndarray) -> np.ndarray:
        """How many lengths are above some values: they come first."""
        return np.searchsorted(-ordered, -value, side="left")

    thresholds = np.append(0, np.unique(ordered[2 * ordered <= capacity]))
    alone, half, counted = above(capacity - thresholds), above(np.array(capacity // 2)), above(thresholds - 1)
    half = np.maximum(half, alone)
    room = (half - alone) * capacity - (before[half] - before[alone])
    overflow = before[np.maximum(counted, half)] - before[half] - room
    return int((half + np.maximum(0, -(-overflow // capacity))).max())
