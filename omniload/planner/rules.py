"""How a mixture wants its steps shaped: what the primitives of a `DGraph` do unless a strategy says otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from omniload.mixture import Mixture
from omniload.planner.costs import AttentionCost, CostModel, checked, cost_model
from omniload.samples.cut import Labels

SLACK_PERCENT = 108
"""Candidates of a step in percent of the tokens it takes: the surplus is what lets packs come out full."""

NO_LIMIT = 2**62

COUNTED = {"tokens": "length", "patches": "patches", "frames": "frames"}
"""The field of `PIECE` that a cap counts; that on ``cost`` counts what no field says."""


def piece_costs(model: CostModel, pieces: np.ndarray) -> np.ndarray:
    """``int64[modules, n]``: what ``PIECE[n]`` cost.

    Raises:
        PlanError: the model gives no costs.
    """
    units = (pieces[field].astype(np.int64) for field in COUNTED.values())
    return checked(model.cost(*units), len(model.modules), len(pieces), model.name)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRules:
    """The shape of a step, and the methods that make it."""

    seq_len: int
    """Tokens of a pack, and of the longest piece."""
    packing: str
    """Name of the way of packing."""
    packs: int | None
    """Packs per step; None if lanes are filled by ``lane_tokens``."""
    lanes: int
    """Lanes per step."""
    lane_tokens: int | None = None
    """Padded tokens that a lane has room for, in place of ``packs``."""
    labels: Labels = "shifted"
    """Convention of the labels, which decides how many targets a part of a document has."""
    balance: str = "lpt"
    """Name of the way of balancing."""
    cost: CostModel = field(default_factory=AttentionCost)
    """What a pack costs each module."""
    cap_names: tuple[str, ...] = ()
    """What is bounded per lane: ``tokens``, ``patches``, ``frames``, ``cost``."""
    cap_values: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """``int64[k]``: those bounds."""
    delay_thresholds: tuple[int, ...] = ()
    """Tokens from which on a piece is an outlier of each level; none if nothing is delayed."""
    max_delay_steps: int = 0
    """Steps that an outlier waits at most."""

    names: tuple[str, ...] = ()
    """Of the sources, for messages."""

    @classmethod
    def of(cls, mixture: Mixture) -> Self:
        """The rules of a mixture.

        Raises:
            MixtureError: its cost function cannot be imported.
        """
        caps = {name: cap for name, cap in mixture.caps if cap is not None}
        return cls(
            seq_len=mixture.seq_len,
            packing=mixture.packing,
            packs=mixture.packs,
            lanes=mixture.lanes,
            lane_tokens=mixture.lane_tokens,
            labels=mixture.labels,
            balance=mixture.balance,
            cost=cost_model(mixture.cost),
            cap_names=tuple(caps),
            cap_values=np.array(list(caps.values()), np.int64),
            delay_thresholds=mixture.delay.thresholds if mixture.delay else (),
            max_delay_steps=mixture.delay.max_steps if mixture.delay else 0,
            names=tuple(mixture.names),
        )

    @property
    def num_packs(self) -> int:
        """Packs that a step takes."""
        assert self.packs is not None, "asked only where packs are counted"
        return self.packs

    @property
    def most_tokens(self) -> int:
        """Tokens that a lane of any length has at most: by default half as much again as it has on average."""
        cap = self.cap("tokens")
        return self.num_packs // self.lanes * self.seq_len * 3 // 2 if cap is None else cap

    def cap(self, name: str) -> int | None:
        """Bound on one thing per lane; None if there is none."""
        return int(self.cap_values[self.cap_names.index(name)]) if name in self.cap_names else None

    def loads(
        self, pieces: np.ndarray, starts: np.ndarray, cost: np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        """What the caps count in groups of pieces.

        Args:
            pieces: ``PIECE[m]``, by group.
            starts: ``int64[groups]``: the first of each.
            cost: ``int64[modules, groups]``; None to leave out the cap on it.

        Returns:
            ``int64[groups]`` by cap, in the order of ``cap_names``.
        """
        loads: dict[str, np.ndarray] = {}
        for name in self.cap_names:
            if name != "cost":
                loads[name] = np.add.reduceat(pieces[COUNTED[name]].astype(np.int64), starts)
            elif cost is not None:
                loads[name] = cost.sum(axis=0)
        return loads

    def over_cap(self, loads: Mapping[str, np.ndarray]) -> str | None:
        """The first lane over a cap and by how much, if there is one: `loads` whose groups are the lanes."""
        for name, of_lane in loads.items():
            cap = self.cap(name)
            if cap is not None and of_lane.max() > cap:
                return f"lane {of_lane.argmax()} has {of_lane.max()} {name}, over caps.{name} {cap}"
        return None

    def enough(self, scale: int = 1) -> tuple[int, int]:
        """How many tokens, or how many pieces, fill ``scale`` steps: always if rows are counted, else nearly always."""
        if (
            self.lane_tokens is not None
        ):  # as much again as all lanes take, so that lengths of a lane are alike
            return scale * 2 * self.lanes * self.lane_tokens, NO_LIMIT
        if self.packing == "none":
            return NO_LIMIT, scale * self.num_packs
        percent = SLACK_PERCENT if self.packing in ("best_fit", "first_fit") else 100
        return scale * -(-percent * self.num_packs * self.seq_len // 100), NO_LIMIT
