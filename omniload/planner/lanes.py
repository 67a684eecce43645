"""Which packs a step takes, and which lane each goes to."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np

from omniload.errors import PlanError
from omniload.planner.arrange import Packs
from omniload.planner.balancing import METHODS, Infeasible, Items, lane_sums, two_level
from omniload.planner.rules import StepRules
from omniload.suggest import suggest

Balancer: TypeAlias = Callable[[Items], np.ndarray]
"""Says the lane of each pack, ``int64[n]``."""


class CapsUnmet(PlanError):
    """No choice of the packs that there are fits the caps; with more of them one might."""


def balancer_of(method: str | Balancer, levels: int | None = None) -> tuple[str, Balancer]:
    """A method of balancing by its name, or the user's own.

    Args:
        method: which.
        levels: groups that ``two_level`` balances by themselves.

    Raises:
        PlanError: there is none of that name, or it has no levels.
    """
    if levels is not None:
        if method != "two_level" or levels < 1:
            raise PlanError(f"balance: levels: {levels} groups, from 1 on, are of 'two_level'; remove it")
        return method, functools.partial(two_level, num_groups=levels)
    if callable(method):
        return getattr(method, "__name__", "a function"), method
    if method not in METHODS:
        raise PlanError(f"balance: there is no '{method}'{suggest(method, list(METHODS))}")
    return method, METHODS[method]


def choose_and_balance(
    packs: Packs,
    cost: np.ndarray,
    loads: Mapping[str, np.ndarray],
    rules: StepRules,
    balancer: Balancer,
    where: str,
) -> np.ndarray:
    """Take the preferred packs, or the next ones where caps forbid those, and give each lane as many.

    Args:
        packs: at least as many as a step takes.
        cost: ``int64[modules, packs]``.
        loads: ``int64[packs]`` by cap: what it counts.
        rules: how many packs and lanes, and the caps.
        balancer: says the lanes.
        where: for messages.

    Returns:
        ``int64[num_packs]``: the packs in the order of their lanes.

    Raises:
        PlanError: no choice of packs fits the caps, or the balancer finds no lanes or breaks a rule.
    """
    num_packs, tokens = rules.num_packs, packs.tokens()
    load = np.array(list(loads.values()), np.int64).reshape(len(loads), packs.num_packs)
    chosen, spare = packs.ranked[:num_packs], packs.ranked[num_packs:].tolist()
    while True:
        items = Items(
            cost=cost[:, chosen],
            length=tokens[chosen],
            num_lanes=rules.lanes,
            per_lane=num_packs // rules.lanes,
            load=load[:, chosen],
            cap=rules.cap_values,
        )
        try:
            lane = _checked(balancer(items), items, where, rules)
        except Infeasible as error:
            over = error.cap
            if over is None:
                raise PlanError(f"{where}: {error}") from None
            # A pack that weighs much on that cap makes room for one that weighs less.
            for given_up in _heaviest(items.load[over], int(rules.cap_values[over])):
                lighter = (i for i, one in enumerate(spare) if load[over][one] < items.load[over][given_up])
                at = next(lighter, None)
                if at is not None:
                    break
            else:
                name, cap = rules.cap_names[over], int(rules.cap_values[over])
                reason = str(error).replace(f"cap {over}", f"caps.{name}")
                raise CapsUnmet(
                    f"{where}: caps.{name} {cap} a lane cannot hold {num_packs} packs on {rules.lanes} lanes"
                    f" ({reason}); raise it, or lower packs"
                ) from None
            chosen = np.concatenate([np.delete(chosen, given_up), [spare.pop(at)]])
        else:
            return np.asarray(chosen[np.argsort(lane, kind="stable")])


def _heaviest(load: np.ndarray, cap: int) -> list[int]:
    """Which of the chosen packs to give up: not the first if it can stay, for it may have waited longest."""
    if load[0] > cap or len(load) == 1:
        return [int(load.argmax())]
    return [int(load[1:].argmax()) + 1, 0]


def _checked(lane: np.ndarray, items: Items, where: str, rules: StepRules) -> np.ndarray:
    """The answer of a balancer.

    Raises:
        PlanError: it breaks a rule.
    """
    lane = np.asarray(lane)
    num_items = len(items.length)
    if lane.shape != (num_items,) or lane.dtype.kind not in "iu":
        raise PlanError(
            f"{where}: gave {lane.dtype}{list(lane.shape)}; return the lane of each pack, int64[{num_items}]"
        )
    if not 0 <= lane.min() <= lane.max() < items.num_lanes:
        raise PlanError(
            f"{where}: gave lanes {lane.min()} … {lane.max()}; there are 0 … {items.num_lanes - 1}"
        )
    count = np.bincount(lane, minlength=items.num_lanes)
    if (count != items.per_lane).any():
        wrong = int(np.flatnonzero(count != items.per_lane)[0])
        raise PlanError(f"{where}: gave lane {wrong} {count[wrong]} packs; give every lane {items.per_lane}")
    over = rules.over_cap(
        dict(zip(rules.cap_names, lane_sums(items.load, lane, items.num_lanes), strict=True))
    )
    if over is not None:
        raise PlanError(f"{where}: {over}")
    return lane.astype(np.int64)
