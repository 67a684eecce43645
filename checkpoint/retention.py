"""Which checkpoints of a run stay."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class KeepBest:
    """Keep the checkpoints with the best value of a metric that was given when they were saved.

    Attributes:
        metric: Its name.
        count: How many of them.
        mode: Whether the least or the greatest value is best.

    Raises:
        ValueError: A value out of bounds.
    """

    metric: str
    count: int = 1
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"count is {self.count}: keep at least 1 checkpoint, or leave keep_best out")
        if self.mode not in ("min", "max"):
            raise ValueError(f"mode is {self.mode!r}: it must be 'min' or 'max'")


@dataclass(frozen=True, kw_only=True, slots=True)
class Retention:
    """What stays; whatever any of the rules keeps does. The order of saves counts, clocks never do.

    Attributes:
        last: How many of the newest; None keeps all.
        every: Steps that are multiples of this; None adds none.
        best: Those with the best value of a metric; None adds none.

    Raises:
        ValueError: A value out of bounds.
    """

    last: int | None
    every: int | None = None
    best: KeepBest | None = None

    def __post_init__(self) -> None:
        if self.last is not None and self.last < 1:
            raise ValueError(f"keep_last is {self.last}: keep at least 1 checkpoint, or None for all of them")
        if self.every is not None and self.every < 1:
            raise ValueError(f"keep_every is {self.every}: it must be at least 1 step")

    def kept(self, steps: Sequence[int], value_of: Callable[[int, str], float | None]) -> set[int]:
        """The steps that stay; the newest always does.

        Args:
            steps: Committed steps, the newest last.
            value_of: Value of a metric at a step; None if it was not given. Not-a-number is never best.
        """
        if self.last is None:
            return set(steps)
        kept = set(steps[-self.last :])
        if self.every is not None:
            kept |= {step for step in steps if step % self.every == 0}
        if self.best is not None:
            values = [(value_of(step, self.best.metric), step) for step in steps]
            known = [(value, step) for value, step in values if value is not None and not math.isnan(value)]
            sign = 1 if self.best.mode == "min" else -1
            ranked = sorted(known, key=lambda one: (sign * one[0], -one[1]))  # of equals the newest
            kept |= {step for _, step in ranked[: self.best.count]}
        return kept
