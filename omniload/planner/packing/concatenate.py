"""Concatenate and cut: documents end to end, cut where a pack is full. No padding, at the price of cut documents."""

from __future__ import annotations

import numpy as np

from omniload.planner.packing.first_fit import first_fit
from omniload.planner.packing.parts import Packing


def concatenate(length: np.ndarray, capacity: int, *, cuttable: np.ndarray) -> Packing:
    """Lay pieces end to end in the order given, and cut them where a pack is full.

    A piece that may not be cut lies whole in the first pack that has room for it, and what may be cut fills what is
    left before it. Every token is placed; only packs at the end have room left.

    Args:
        length: ``int64[n]`` tokens per piece, at least 1, and at most ``capacity`` of those that are not cut.
        capacity: tokens per pack.
        cuttable: ``bool[n]``: which may be cut.
    """
    ends = np.cumsum(length)
    starts = ends - length
    if cuttable.all():
        assert length.min(initial=1) > 0, "or a piece would be in no pack"
        first = starts // capacity
        counts = (ends - 1) // capacity + 1 - first
        piece = np.repeat(np.arange(len(length)), counts)
        pack = np.arange(len(piece)) + (first - (np.cumsum(counts) - counts))[piece]
        begins = np.maximum(starts[piece], pack * capacity)
        part = np.minimum(ends[piece], (pack + 1) * capacity) - begins
        return Packing(piece=piece, start=begins - starts[piece], length=part, pack=pack)
    piece, pack, part = first_fit(length, capacity, cuttable)
    by_pack = np.argsort(pack, kind="stable")
    start = np.cumsum(part) - part - starts[piece]
    return Packing(piece=piece[by_pack], start=start[by_pack], length=part[by_pack], pack=pack[by_pack])
