"""How even the lanes and the ranks of a job are, and what it costs that they are not: for reports, after the plan."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean
from typing import Self

import numpy as np

from omniload.mixture import ROWS_OF_ANY_LENGTH
from omniload.placing import ClientPlaceTree
from omniload.planner import Plan
from omniload.planner.balancing import METHODS, Infeasible, Items, lane_sums
from omniload.planner.pipeline import simulated_time
from omniload.planner.rules import StepRules, piece_costs
from omniload.sources.order import Feistel, key64

PLANNED, RANDOM, TOKENS = "as planned", "random order", "token count"


@dataclass(frozen=True, kw_only=True, slots=True)
class Evenness:
    """How even some steps are, whose packs were given to lanes in one way."""

    over_lanes: float
    """Cost of the costliest lane by that of a lane on average, on average over the steps; 1 is even."""
    over_ranks: float
    """The same of data-parallel ranks, each with its lanes."""
    worst: float
    """The largest of a step, over ranks."""
    by_module: tuple[float, ...]
    """``over_ranks`` of the backbone and of each encoder by itself."""
    time: float
    """Simulated time of all steps under 1F1B, in the unit of the cost model."""

    @classmethod
    def of_step(cls, costs: np.ndarray, tree: ClientPlaceTree) -> Self:
        """One step.

        Args:
            costs: ``int64[modules, lanes]``.
            tree: who runs which lane.
        """
        # Lane l is of rank l modulo dp_size: [modules, dp, lanes of a rank].
        ranks = costs.astype(np.float64).reshape(len(costs), -1, tree.dp_size).swapaxes(1, 2)
        over_ranks = _unevenness(ranks.sum(axis=(0, 2)))
        return cls(
            over_lanes=_unevenness(ranks.sum(axis=0)),
            over_ranks=over_ranks,
            worst=over_ranks,
            by_module=tuple(_unevenness(module) for module in ranks.sum(axis=2)),
            time=step_time(ranks, tree.num_buckets("pp")),
        )

    @classmethod
    def of_steps(cls, steps: Sequence[Self]) -> Self:
        """Several steps together, at least one."""
        return cls(
            over_lanes=fmean(step.over_lanes for step in steps),
            over_ranks=fmean(step.over_ranks for step in steps),
            worst=max(step.worst for step in steps),
            by_module=tuple(map(fmean, zip(*(step.by_module for step in steps), strict=True))),
            time=sum(step.time for step in steps),
        )


def least_unevenness(cost: np.ndarray, num_ranks: int) -> float:
    """What the costliest of some ranks costs by the mean at least, as no piece is cut to balance.

    Args:
        cost: ``int64[modules, n]`` of the pieces of a step.
        num_ranks: data-parallel ranks.
    """
    total = cost.sum(axis=0, dtype=np.float64)
    return max(1.0, float(total.max() * num_ranks / total.sum())) if total.any() else 1.0


def step_time(cost: np.ndarray, num_stages: int) -> float:
    """Simulated time of a step under 1F1B: of the rank that takes longest.

    Args:
        cost: ``[modules, dp, microbatches]``; the stages share the backbone evenly, the encoders are one before them.
        num_stages: pipeline stages.
    """
    encoder = cost[1:].sum(axis=0) if len(cost) > 1 else None
    return float(simulated_time(cost[0] / num_stages, num_stages, encoder=encoder).max())


def _unevenness(cost: np.ndarray) -> float:
    """Largest by mean; 1 if all are 0."""
    return float(cost.max() / cost.mean()) if cost.any() else 1.0


def ways_to_balance(plan: Plan, rules: StepRules) -> dict[str, np.ndarray]:
    """What lanes would cost if the packs of a plan had been given to them in other ways.

    Where packing has decided the lanes there is no other way.

    Returns:
        By way ``int64[modules, lanes]``: `PLANNED`; `RANDOM`, packs in an order that knows nothing of them; `TOKENS`,
        by their tokens alone; and each of `METHODS` that finds a way under the caps.
    """
    cost = np.add.reduceat(piece_costs(rules.cost, plan.pieces), plan.offsets[:-1], axis=1)
    ways = {PLANNED: np.add.reduceat(cost, plan.lane_offsets[:-1], axis=1)}
    per_lane = plan.num_packs // plan.num_lanes
    if rules.packing in ROWS_OF_ANY_LENGTH or (np.diff(plan.lane_offsets) != per_lane).any():
        return ways
    # A plan lists packs by lane, and methods may look at the order: so they get another one.
    order = Feistel(plan.num_packs, key64(plan.step, "order of packs")).of(np.arange(plan.num_packs))
    loads = rules.loads(plan.pieces, plan.offsets[:-1], cost).values()
    load = np.array(list(loads), np.int64).reshape(len(loads), plan.num_packs)[:, order]
    cost = cost[:, order]
    length = np.add.reduceat(plan.pieces["length"].astype(np.int64), plan.offsets[:-1])[order]

    def items(of: np.ndarray) -> Items:
        return Items(
            cost=of,
            length=length,
            num_lanes=plan.num_lanes,
            per_lane=per_lane,
            load=load,
            cap=rules.cap_values,
        )

    ways[RANDOM] = lane_sums(cost, np.arange(plan.num_packs) % plan.num_lanes, plan.num_lanes)
    tried = {TOKENS: (METHODS["lpt"], length[None])}
    tried |= {name: (method, cost) for name, method in METHODS.items() if name != "none"}
    for name, (method, weighed) in tried.items():
        with suppress(Infeasible):
            ways[name] = lane_sums(cost, method(items(weighed)), plan.num_lanes)
    return ways
