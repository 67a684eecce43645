"""Choosing which packs a step takes; the pieces of the others are carried to the next."""

from __future__ import annotations

import numpy as np

MAX_WAIT_STEPS = 2
"""A piece that waited this many steps puts its pack before fuller ones."""


def choose_packs(
    pack: np.ndarray, length: np.ndarray, born: np.ndarray, *, step: int, num_packs: int
) -> np.ndarray | None:
    """Choose the packs of a step: first those that hold a piece that waited too long, then the fullest.

    Args:
        pack: ``int64[n]`` pack of each piece, numbered from 0 without gaps.
        length: ``int64[n]`` tokens of each piece.
        born: ``int64[n]`` step that drew each piece.
        step: the step being planned.
        num_packs: packs to choose.

    Returns:
        ``int64[num_packs]`` of the chosen packs, oldest piece first among the waiting, then by tokens, ties to the
        lower number; None if there are fewer packs.
    """
    available = int(pack.max()) + 1 if len(pack) else 0
    if available < num_packs:
        return None
    tokens = np.bincount(pack, length, available).astype(np.int64)  # a pack's fit a double
    # Age counts only from the bound on: among packs that may still wait, fullness decides.
    oldest = np.full(available, step, np.int64)
    late = np.flatnonzero(born <= step - MAX_WAIT_STEPS)
    np.minimum.at(oldest, pack[late], born[late])
    return np.lexsort((np.arange(available), -tokens, oldest))[:num_packs]
