"""Strategies that only benchmarks use: baselines, and one that times its stages."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from omniload.planner.balancing import Items
from omniload.planner.graph import DGraph
from omniload.planner.plan import Plan
from omniload.planner.plan_bytes import plan_to_bytes

T = TypeVar("T")


def random_order(graph: DGraph) -> Plan:
    """Packs as the mixture wants them, onto lanes in an order that knows nothing of them."""
    order = np.random.default_rng(graph.step).permutation(graph.rules.num_packs)

    def dealt(items: Items) -> np.ndarray:
        lane: np.ndarray = order % items.num_lanes
        return lane

    return graph.mix().cost().pack().balance(dealt).plan()


def by_tokens(graph: DGraph) -> Plan:
    """Lanes of equal numbers of tokens, blind to what attention costs."""
    return graph.mix().cost("tokens").pack().balance("lpt").plan()


class StageClock:
    """A strategy that does as the mixture wants, and notes how long each stage took.

    ``cost`` is what packs cost, once; it is a part of ``balance`` too. ``freeze`` is the making of the plan, its hash
    and its bytes.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget the steps planned."""
        self.seconds: dict[str, list[float]] = {}
        """By stage, of every step planned."""
        self.num_bytes: list[int] = []
        """Size of every plan."""
        self.num_samples: list[int] = []
        """Pieces of every plan."""

    def __call__(self, graph: DGraph) -> Plan:
        """Plan a step."""
        self._time("mix", graph.mix)
        self._time("pack", graph.cost().pack)
        self._time("cost", graph.pack_costs)
        self._time("balance", graph.balance)
        plan, num_bytes = self._time("freeze", lambda: _frozen(graph))
        self.num_bytes.append(num_bytes)
        self.num_samples.append(len(plan.pieces))
        return plan

    def _time(self, stage: str, run: Callable[[], T]) -> T:
        start = time.perf_counter()
        outcome = run()
        self.seconds.setdefault(stage, []).append(time.perf_counter() - start)
        return outcome


def _frozen(graph: DGraph) -> tuple[Plan, int]:
    plan = graph.plan()
    return plan, len(plan_to_bytes(plan))  # which hold the hash


timed = StageClock()
"""The one that a mixture's ``strategy`` can name."""
