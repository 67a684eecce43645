"""Whole pieces into packs, longest first: by first fit or by best fit.

Where only tokens count, both use at most 11/9 of the optimal number of packs and a constant more (Johnson, 1973). What
is left over is carried to the next step, so the few packs that come out poorly filled are the ones not taken.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

from omniload.kernels import KERNELS
from omniload.planner.packing.first_fit import first_fit


def first_fit_decreasing(
    length: np.ndarray, capacity: int, *, urgent: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Put every piece, longest first, into the first pack that still holds it.

    Args:
        length: ``integer[n]`` tokens per piece, each in 1..capacity.
        capacity: tokens per pack.
        urgent: ``bool[n]``: pieces that come before all others, as in `best_fit_decreasing`.

    Returns:
        As `best_fit_decreasing`.
    """
    order = _urgent_first(_descending(length), urgent)
    _, pack, _ = first_fit(length[order].astype(np.int64), capacity, np.zeros(len(length), bool))
    return order, pack


def best_fit_decreasing(
    length: np.ndarray,
    capacity: int,
    patches: np.ndarray | None = None,
    patch_capacity: int = 0,
    *,
    urgent: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Put every piece, longest first, into the fullest pack that still holds it.

    With patches, a piece is as long as the larger of its shares of the two capacities, a pack holds it if it has room
    for both, and the fullest is that with the fewest tokens left.

    Args:
        length: ``integer[n]`` tokens per piece, each in 1..capacity.
        capacity: tokens per pack, below 2³¹.
        patches: ``integer[n]`` patches per piece, each in 0..patch_capacity; None if there are none.
        patch_capacity: patches per pack, below 2³¹.
        urgent: ``bool[n]``: pieces that come before all others, longest first among themselves. A small piece that has
            to go with this step then lies in a pack that fills up, and not in one that is opened for it at the end.

    Returns:
        ``order``, ``int64[n]``: the pieces as placed, longest first, ties in the order given; and
        ``pack``, ``int64[n]``: the pack of each piece in that order, packs numbered as opened.
    """
    assert length.max(initial=0) <= capacity, "or it would fit nowhere"
    assert max(capacity, patch_capacity) < 2**31, "or a room and the number of its pack do not fit 64 bits"
    if patches is None or not patches.any():
        order, images = _urgent_first(_descending(length), urgent), None
    else:
        share = np.maximum(length.astype(np.int64) * patch_capacity, patches.astype(np.int64) * capacity)
        order = _urgent_first(np.argsort(-share, kind="stable"), urgent)
        images = patches[order].astype(np.int64)
    tokens, pack = length[order].astype(np.int64), np.empty(len(length), np.int64)
    if KERNELS is not None:
        KERNELS.best_fit(tokens, capacity, images, patch_capacity, pack)
    else:
        best_fit_in_python(tokens, capacity, images, patch_capacity, pack)
    return order, pack


def best_fit_in_python(
    length: np.ndarray, capacity: int, patches: np.ndarray | None, patch_capacity: int, pack: np.ndarray
) -> None:
    """Put pieces in the order given, each into the fullest pack that still holds it; fill in the pack of each."""
    # Open packs as room << 32 | number, ascending: a binary search finds the tightest, then the oldest.
    open_packs: list[int] = []
    patch_room: list[int] = []
    images = [0] * len(length) if patches is None else patches.tolist()
    for i, (tokens, image) in enumerate(zip(length.tolist(), images, strict=True)):
        at = bisect_left(open_packs, tokens << 32)
        while at < len(open_packs) and patch_room[open_packs[at] & 0xFFFFFFFF] < image:
            at += 1
        if at < len(open_packs):
            entry = open_packs.pop(at)
        else:
            entry = capacity << 32 | len(patch_room)
            patch_room.append(patch_capacity)
        number = entry & 0xFFFFFFFF
        pack[i] = number
        patch_room[number] -= image
        entry -= tokens << 32
        if entry >> 32:
            insort(open_packs, entry)


def _urgent_first(order: np.ndarray, urgent: np.ndarray | None) -> np.ndarray:
    if urgent is None or not urgent.any():
        return order
    comes_first = urgent[order]
    return np.concatenate([order[comes_first], order[~comes_first]])


def _descending(length: np.ndarray) -> np.ndarray:
    """Stable order of numbers below 2³², largest first: by halves of 16 bits, which numpy sorts by digits."""
    below = length.max(initial=0) - length.astype(np.int64)
    order = np.argsort((below & 0xFFFF).astype(np.uint16), kind="stable")
    if below.max(initial=0) > 0xFFFF:
        order = order[np.argsort((below >> 16).astype(np.uint16)[order], kind="stable")]
    return order
