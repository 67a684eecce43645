"""Items to balance, and what the best assignment of a few of them is."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import product

import numpy as np
from hypothesis import strategies as st

from omniload.planner.balancing import Items, lane_sums


def items_of(
    cost: Sequence[Sequence[int]] | np.ndarray,
    num_lanes: int,
    per_lane: int | None = None,
    *,
    length: Sequence[int] | np.ndarray | None = None,
    load: Sequence[Sequence[int]] = (),
    cap: Sequence[int] = (),
) -> Items:
    """Items by their costs in each module; as long as they cost in the backbone, if nothing else is said."""
    costs = np.array(cost, np.int64)
    return Items(
        cost=costs,
        length=np.array(costs[0] if length is None else length, np.int64),
        num_lanes=num_lanes,
        per_lane=per_lane,
        load=np.array(load, np.int64).reshape(len(cap), costs.shape[1]),
        cap=np.array(cap, np.int64),
    )


def lane_costs(items: Items, lane: np.ndarray) -> np.ndarray:
    """``int64[lanes]`` cost of each lane in the backbone."""
    return np.asarray(lane_sums(items.cost, lane, items.num_lanes)[0])


def numbers(count: int, largest: int) -> st.SearchStrategy[list[int]]:
    """So many from 0 to ``largest``, made of bytes since lists of integers take hypothesis ten times as long."""
    return st.binary(min_size=2 * count, max_size=2 * count).map(
        lambda data: (np.frombuffer(data, "<u2") % (largest + 1)).tolist()
    )


@st.composite
def few_items(draw: st.DrawFn, *, caps: bool = True, free: bool = True, largest: int = 1000) -> Items:
    """Up to 24 items in up to two modules, under up to two caps, with any number per lane or the same in each."""
    num_lanes = draw(st.integers(1, 6))
    per_lane = draw(st.integers(1, 4))
    fixed = not free or draw(st.booleans())
    n = num_lanes * per_lane if fixed else draw(st.integers(num_lanes, num_lanes * 4))
    rows = numbers(n, largest)
    load = [draw(rows) for _ in range(draw(st.integers(0, 2)) if caps else 0)]
    # From what a lane has on average, with which hardly anything fits, to what every assignment holds.
    cap = [draw(st.integers(-(-sum(row) // num_lanes), max(sum(row), 1))) for row in load]
    return items_of(
        [draw(rows) for _ in range(draw(st.integers(1, 2)))],
        num_lanes,
        per_lane if fixed else None,
        length=draw(rows),
        load=load,
        cap=cap,
    )


@cache
def every_assignment(n: int, num_lanes: int, per_lane: int | None) -> np.ndarray:
    """``int64[assignments, n]``: all that leave no lane empty and, where it is given, have the number per lane."""
    lanes = np.array(list(product(range(num_lanes), repeat=n)), np.int64)
    counts = np.stack([(lanes == lane).sum(axis=1) for lane in range(num_lanes)])
    allowed = counts.min(axis=0) >= 1 if per_lane is None else (counts == per_lane).all(axis=0)
    return np.asarray(lanes[allowed])


def sums_of_every_assignment(items: Items, values: np.ndarray) -> np.ndarray:
    """``int64[assignments, lanes]`` of ``int64[n]``."""
    lanes = every_assignment(len(items.length), items.num_lanes, items.per_lane)
    return np.stack([(lanes == lane) @ values for lane in range(items.num_lanes)], axis=1)


def heavy_tail(rng: np.random.Generator, n: int, longest: int) -> np.ndarray:
    """``int64[n]`` lengths of documents: log-normal, one in seven Pareto, cut at ``longest``."""
    body = np.exp(rng.normal(6.4, 1.2, n))
    tail = (rng.pareto(1.2, n) + 1) * 2000
    return np.clip(np.where(rng.random(n) < 0.15, tail, body), 1, longest).astype(np.int64)
