"""What is balanced, and what it means that it cannot be."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from omniload.errors import PlanError


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Items:
    """Packs, or documents, that go onto lanes.

    All values are ``int64`` and not negative. What is summed over the items of a lane stays below 2⁶².
    """

    cost: np.ndarray
    """``int64[modules, n]``: module 0 is the backbone, the others are encoders; relative to each other within a
    module."""
    length: np.ndarray
    """``int64[n]`` tokens."""
    num_lanes: int
    """Lanes, each of which gets at least one item."""
    per_lane: int | None
    """Items of every lane, ``n == num_lanes * per_lane``; None: any number from 1."""
    load: np.ndarray
    """``int64[caps, n]``: what the caps count, like tokens, patches or cost; there may be no caps."""
    cap: np.ndarray
    """``int64[caps]``: hard bounds of the sums of ``load`` in a lane."""

    def __post_init__(self) -> None:
        n = len(self.length)
        arrays = (self.cost, self.length, self.load, self.cap)
        assert all(array.dtype == np.int64 for array in arrays), "integers decide"
        assert self.cost.shape == (max(len(self.cost), 1), n), "costs by module and item"
        assert self.load.shape == (len(self.cap), n), "loads by cap and item"
        assert self.num_lanes >= 1
        assert self.per_lane is None or n == self.num_lanes * self.per_lane, "lanes divide the items"


class Infeasible(PlanError):
    """No assignment was found that holds the caps.

    Args:
        message: one line.
        cap: number of the cap that is too low; None if there are fewer items than lanes.
        needed: what it had to be at least, as far as is known: the largest item, the load of a lane on average, or
            what is too much where the search gave up.
        bound: what it is.
    """

    def __init__(self, message: str, *, cap: int | None, needed: int, bound: int) -> None:
        super().__init__(message)
        self.cap = cap
        self.needed = needed
        self.bound = bound


def lane_sums(values: np.ndarray, lane: np.ndarray, num_lanes: int) -> np.ndarray:
    """Sum the values of the items of each lane, exactly.

    Args:
        values: ``int64[k, n]``.
        lane: ``int64[n]`` lane of each item.
        num_lanes: lanes.

    Returns:
        ``int64[k, num_lanes]``.
    """
    sums = np.zeros((len(values), num_lanes), np.int64)
    for row, of_row in zip(sums, values, strict=True):
        np.add.at(row, lane, of_row)
    return sums
