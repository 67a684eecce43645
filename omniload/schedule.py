"""The schedule of a mixture: weights that change along the run, at once or gradually.

A schedule is a list of stages. From a stage's position on its weights hold, and with ``ramp`` they are approached from
the weights of the stage before, over all the way from its position. Positions are counted in steps, in tokens that
entered the stream, or in passes over the data, and all of one schedule alike. The weights of a step depend on where
the stream stands before it and on nothing else, and ramps are integer arithmetic: the same on every platform.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from omniload.frozen import Frozen
from omniload.suggest import suggest
from omniload.weights import integer_weights

Weights = Mapping[str, float]
"""Weight of each source, by name; relative to each other."""

_PARTS = 2**32
_ONE = 1 << 64
_PI = 0x3243F6A8885A308D3  # in parts of _ONE


class Stage(Frozen):
    """Weights, and where in the run they hold from: at one of ``step``, ``tokens`` and ``epoch``."""

    step: int | None = Field(default=None, ge=0)
    """First step of the stage."""
    tokens: int | None = Field(default=None, ge=0)
    """The stage holds from the first step before which so many tokens entered the stream, of all sources together."""
    epoch: int | None = Field(default=None, ge=0)
    """The stage holds from the first step before which so many passes are complete: over the source ``of``, or over
    every source that has a weight in all stages."""
    of: str | None = None
    """The source whose passes ``epoch`` counts."""
    ramp: Literal["linear", "cosine"] | None = None
    """How the weights come to be these: moving to them from the stage before's all along, in a line or in half a
    cosine. By default they change at once."""
    weights: dict[str, Annotated[float, Field(ge=0)]] | None = None
    """Weight of every source; without it, the sources' own weights hold."""

    @model_validator(mode="after")
    def _one_position(self) -> Self:
        given = [measure for measure in ("step", "tokens", "epoch") if getattr(self, measure) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise ValueError(f"a stage is placed by one of step, tokens and epoch, and here by {found}")
        if self.of is not None and self.epoch is None:
            raise ValueError(f"of: goes with epoch, and this stage is placed by {given[0]}; remove it")
        return self

    @property
    def measure(self) -> str:
        """What its position is counted in."""
        return "step" if self.step is not None else "tokens" if self.tokens is not None else "epoch"

    @property
    def position(self) -> int:
        """Where it holds from."""
        position: int = getattr(self, self.measure)
        return position

    def __str__(self) -> str:
        return f"stage at {self.measure} {self.position}"


def check_order(stages: Sequence[Stage]) -> None:
    """Stages lie one after the other.

    Raises:
        ValueError: they do not.
    """
    for before, after in itertools.pairwise(stages):
        if (before.measure, before.of) != (after.measure, after.of):
            raise ValueError(f"{_placed(after)} follows {_placed(before)}: place all stages alike")
        if after.position <= before.position:
            raise ValueError(
                f"stages must ascend, but {after.measure} {after.position} follows {before.measure}"
                f" {before.position}: reorder them"
            )
    if stages and stages[0].ramp and stages[0].position == 0:
        raise ValueError(f"the {stages[0]} has nothing before it to ramp from; remove its ramp")


def check_reached(stages: Sequence[Stage], own: Weights, passes: Mapping[str, int | None]) -> None:
    """Stages placed by epoch can be reached.

    Args:
        stages: of the schedule.
        own: the sources' own weights.
        passes: most passes over each source before the stream ends or goes on without it; None: no bound.

    Raises:
        ValueError: one is not.
    """
    if not stages or stages[0].measure != "epoch":
        return
    of = stages[0].of
    if of is not None and of not in own:
        raise ValueError(f"schedule, {stages[0]}: no source '{of}'{suggest(of, list(own))}")
    counted = _counted(stages, own)
    if not counted:
        raise ValueError(
            "schedule: no source has a weight in every stage, so there are no passes to count; name one by of:"
        )
    for name in counted:
        most = passes[name]
        if most is not None and stages[-1].position > most:
            raise ValueError(
                f"schedule, {stages[-1]}: never reached, for of source '{name}' at most {most} passes are complete"
                " while the stream goes on; raise its repeat, or count those of another source"
            )


def position_of(
    stages: Sequence[Stage], own: Weights, *, step: int, tokens: int, epochs: Mapping[str, int]
) -> int:
    """Where on the schedule a step lies.

    Args:
        stages: of the schedule.
        own: the sources' own weights.
        step: the step.
        tokens: that entered the stream before it.
        epochs: complete passes over each source before it; none where it is not named.
    """
    measure = stages[0].measure if stages else "step"
    if measure == "epoch":
        return min(epochs.get(name, 0) for name in _counted(stages, own))
    return step if measure == "step" else tokens


def weights_in(stages: Sequence[Stage], own: Weights, position: int) -> Weights:
    """The weights at a position of the schedule.

    Args:
        stages: of the schedule.
        own: the sources' own weights, which hold before the first stage.
        position: in the measure of the stages.
    """
    before, begin = own, 0
    for stage in stages:
        goal = own if stage.weights is None else stage.weights
        if position < stage.position:
            if stage.ramp is None or position == begin:
                break
            way, whole = position - begin, stage.position - begin
            if stage.ramp == "cosine":
                way, whole = half_cosine(way, whole), _PARTS
            return _between(before, goal, way, whole)
        before, begin = goal, stage.position
    return before


def half_cosine(way: int, whole: int) -> int:
    """``(1 - cos(π · way / whole)) / 2`` in parts of 2³², by Taylor's series in integers of 64 bits after the point.

    `math.cos` is that of the platform, and not the same on each in its last bit.
    """
    angle = _PI * way // whole
    square = angle * angle >> 64
    cosine = term = _ONE
    for k in range(2, 40, 2):  # π³⁸ / 38! is below 2⁻⁶⁴
        term = -(term * square >> 64) // (k * (k - 1))
        cosine += term
    return (_ONE - cosine + _PARTS) >> 33


def _between(before: Weights, goal: Weights, way: int, whole: int) -> Weights:
    """Shares of the stream, ``way / whole`` of the way from some to others."""
    names = sorted(before)
    shares = zip(
        names,
        integer_weights([before[name] for name in names]),
        integer_weights([goal[name] for name in names]),
        strict=True,
    )
    return {name: old * (whole - way) + new * way for name, old, new in shares}


def _counted(stages: Sequence[Stage], own: Weights) -> list[str]:
    """Sources whose passes are counted: of several, those of the one that has fewest."""
    if stages[0].of is not None:
        return [stages[0].of]
    all_weights = [own if stage.weights is None else stage.weights for stage in stages]
    if stages[0].position:
        all_weights.append(own)
    return [name for name in sorted(own) if all(weights[name] for weights in all_weights)]


def _placed(stage: Stage) -> str:
    return f"a {stage}" + (f" of {stage.of}" if stage.of else "")
