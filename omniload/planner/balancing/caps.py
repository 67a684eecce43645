"""Caps are hard: an assignment over one of them is mended, or given up for one that holds them all."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from omniload.planner.balancing.items import Infeasible, Items, lane_sums
from omniload.planner.balancing.lpt import heaviest_first
from omniload.planner.balancing.refine import refine

_FULL_BITS = 31
"""A lane that is filled to a cap has two to this parts of it."""


def check_possible(items: Items) -> None:
    """Refuse what no assignment can make possible.

    Raises:
        Infeasible: fewer items than lanes, an item alone over a cap, or all items over the caps of all lanes.
    """
    n = len(items.length)
    if n < items.num_lanes:
        raise Infeasible(
            f"{n} items cannot fill {items.num_lanes} lanes: take fewer lanes or more samples in a step",
            cap=None,
            needed=items.num_lanes,
            bound=n,
        )
    for number, (load, cap) in enumerate(zip(items.load, items.cap.tolist(), strict=True)):
        largest = int(load.argmax())
        if load[largest] > cap:
            raise Infeasible(
                f"item {largest} has {load[largest]} of what cap {number} bounds to {cap} per lane: raise the cap, or"
                " cut or drop such samples",
                cap=number,
                needed=int(load[largest]),
                bound=cap,
            )
        total = int(load.sum())
        if total > cap * items.num_lanes:
            raise Infeasible(
                f"the items together have {total} of what cap {number} bounds to {cap} in each of {items.num_lanes}"
                " lanes: raise the cap, or take more lanes or fewer samples in a step",
                cap=number,
                needed=-(-total // items.num_lanes),
                bound=cap,
            )


def within_caps(items: Items, lane: np.ndarray) -> bool:
    """Whether an assignment holds all caps."""
    return bool(np.all(lane_sums(items.load, lane, items.num_lanes) <= items.cap[:, None]))


def hold_caps(items: Items, lane: np.ndarray) -> np.ndarray:
    """Make an assignment hold the caps.

    In turn, until one holds them: the assignment itself; the same with items exchanged; the items largest first, by the
    part they take of the cap that is tightest for them, each to the emptiest lane, and then exchanged; in that order
    each to the first lane it fits in.

    Args:
        items: what is balanced, after `check_possible`.
        lane: ``int64[n]`` lane of each item, none empty.

    Returns:
        ``int64[n]`` lane of each item, none empty.

    Raises:
        Infeasible: none of these holds them.
    """
    if within_caps(items, lane):
        return lane
    part = _parts_of_caps(items)
    tightest = np.maximum(part.max(axis=0), 1)
    uncapped = replace(items, load=items.load[:0], cap=items.cap[:0])
    for start in (lane, heaviest_first(tightest, items.num_lanes, items.per_lane)):
        mended = refine(uncapped, start, part, enough=2**_FULL_BITS)
        if within_caps(items, mended):
            return mended
    fitted = _first_fit(items, np.argsort(-tightest, kind="stable"))
    if fitted is not None:
        return fitted
    over = lane_sums(items.load, mended, items.num_lanes).max(axis=1) - items.cap
    number = int(over.argmax())
    cap, load = int(items.cap[number]), items.load[number]
    raise Infeasible(
        f"found no way to keep {items.num_lanes} lanes within cap {number} of {cap}: the items together have"
        f" {load.sum()} of what it bounds, the largest {load.max()}; raise the cap or take fewer samples in a step",
        cap=number,
        needed=cap + int(over[number]),
        bound=cap,
    )


def _parts_of_caps(items: Items) -> np.ndarray:
    """``int64[caps, n]``: what each item takes of each cap, in parts, rounded up."""
    parts = np.empty_like(items.load)
    for part, load, cap in zip(parts, items.load, items.cap.tolist(), strict=True):
        shift = max(0, cap.bit_length() - _FULL_BITS)
        part[:] = -(-(load >> shift << _FULL_BITS) // max(cap >> shift, 1))
    return parts


def _first_fit(items: Items, order: np.ndarray) -> np.ndarray | None:
    n, num_lanes = len(order), items.num_lanes
    room = np.full(num_lanes, items.per_lane or n)
    left = np.repeat(items.cap[:, None], num_lanes, axis=1)
    lane_of = np.empty(n, np.int64)
    empty = np.ones(num_lanes, bool)
    for placed, item in enumerate(order.tolist()):
        load = items.load[:, item]
        fits = (room > 0) & np.all(left >= load[:, None], axis=0)
        if n - placed == np.count_nonzero(empty):  # each of the rest has a lane to itself
            fits = empty
        lane = int(fits.argmax())
        if not fits[lane]:
            return None
        lane_of[item] = lane
        left[:, lane] -= load
        room[lane] -= 1
        empty[lane] = False
    return lane_of
