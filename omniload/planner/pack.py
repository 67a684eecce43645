"""Packing: candidates into packs of ``seq_len`` tokens, by best fit decreasing over all of them.

Best fit decreasing uses at most 11/9 of the optimal number of packs plus one (Johnson, 1973). What is left over is
carried to the next step, so the few packs that come out poorly filled are the ones not taken.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

from omniload.kernels import KERNELS

MAX_WAIT_STEPS = 2
"""A piece that waited this many steps puts its pack before fuller ones."""


def best_fit_decreasing(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Put every piece, longest first, into the fullest pack that still holds it.

    Args:
        lengths: ``int64[n]`` tokens per piece, each in 1..capacity.
        capacity: tokens per pack.

    Returns:
        ``order``, ``int64[n]``: the pieces as placed, longest first, ties in the order given; and
        ``pack``, ``int64[n]``: the pack of each piece in that order, packs numbered as opened.
    """
    descending = -lengths.astype(np.int64)
    order = np.argsort(descending, kind="stable")
    pack = np.empty(len(lengths), np.int64)
    if KERNELS is not None:
        KERNELS.best_fit(-descending[order], capacity, pack)
    else:
        best_fit_in_python(lengths[order], capacity, pack)
    return order, pack


def best_fit_in_python(lengths: np.ndarray, capacity: int, pack: np.ndarray) -> None:
    """Put pieces in the order given, each into the fullest pack that still holds it; fill in the pack of each."""
    # Open packs as room << 32 | number, ascending: a binary search finds the tightest, then the oldest.
    open_packs: list[int] = []
    num_packs = 0
    for i, length in enumerate(lengths.tolist()):
        at = bisect_left(open_packs, length << 32)
        if at < len(open_packs):
            entry = open_packs.pop(at)
        else:
            entry = capacity << 32 | num_packs
            num_packs += 1
        pack[i] = entry & 0xFFFFFFFF
        entry -= length << 32
        if entry >> 32:
            insort(open_packs, entry)


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
    tokens = np.zeros(available, np.int64)
    np.add.at(tokens, pack, length)
    oldest = np.full(available, step, np.int64)
    np.minimum.at(oldest, pack, born)
    # Age counts only from the bound on: among packs that may still wait, fullness decides.
    oldest[oldest > step - MAX_WAIT_STEPS] = step
    return np.lexsort((np.arange(available), -tokens, oldest))[:num_packs]
