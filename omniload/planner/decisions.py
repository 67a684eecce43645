"""Decisions: what is decided while a run goes on and changes its stream from a stated step on.

A stream is a pure function of its mixture, its data and these. A decision never changes a plan that is made; its
kinds::

    SetWeights        mix by other weights, until the next decision on them
    SkipSteps         leave out the data of so many steps, as after a spike of the loss
    SetCoefficients   reckon costs by measured coefficients
    DropSource        go on without a source; the planner's own, where one cannot be read any more

Those of one step take effect in the order given. Each has a JSON form, ``{"step": 12, "kind": "skip", "count": 5}``.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import Any, ClassVar, Self, TypeAlias

from omniload.errors import DecisionError, PlanError
from omniload.planner.costs import CalibratedCost
from omniload.suggest import suggest
from omniload.weights import WEIGHT_UNIT, integer_weights

_STEPS = 2**32


@dataclass(frozen=True, kw_only=True, slots=True)
class _AtStep:
    step: int
    """The first step that it has a say in."""

    def __post_init__(self) -> None:
        if not _is_count(self.step, _STEPS):
            raise DecisionError(f"a decision takes effect at a step from 0 on, and {self.step!r} is none")


@dataclass(frozen=True, kw_only=True, slots=True)
class SetWeights(_AtStep):
    """Mix by other weights from a step on."""

    kind: ClassVar[str] = "weights"
    weights: Mapping[str, float] | None
    """Share of the stream of each source named; the others share what is left as they did before. If all are named,
    weights relative to each other. None: by the schedule again."""

    def __post_init__(self) -> None:
        """Weights are numbers.

        Raises:
            DecisionError: they are not.
        """
        _AtStep.__post_init__(self)
        if self.weights is None:
            return
        if not isinstance(self.weights, Mapping) or not self.weights:
            raise DecisionError(f"weights: a weight by name of source is needed, got {self.weights!r}")
        for name, weight in self.weights.items():
            if not isinstance(name, str) or isinstance(weight, bool) or not isinstance(weight, int | float):
                raise DecisionError(
                    f"weights: a number by name of source is needed, got {weight!r} for {name!r}"
                )
            if not 0 <= weight <= sys.float_info.max:
                raise DecisionError(
                    f"weights: the weight of '{name}' must be finite and not negative, got {weight!r}"
                )
        own = {name: float(weight) for name, weight in self.weights.items()}
        object.__setattr__(self, "weights", own)


@dataclass(frozen=True, kw_only=True, slots=True)
class SkipSteps(_AtStep):
    """Leave out the data of some steps; step numbers go on, so that the step itself trains on what comes after."""

    kind: ClassVar[str] = "skip"
    count: int
    """How many."""

    def __post_init__(self) -> None:
        """Raises DecisionError if there is nothing to leave out."""
        _AtStep.__post_init__(self)
        if not _is_count(self.count, _STEPS) or not self.count:
            raise DecisionError(f"count: a number of steps from 1 on is needed, got {self.count!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SetCoefficients(_AtStep):
    """Reckon the costs of pieces by measured coefficients from a step on."""

    kind: ClassVar[str] = "coefficients"
    coefficients: Mapping[str, int]
    """Those of a `CalibratedCost`, by name."""

    def __post_init__(self) -> None:
        """Coefficients are those that the cost model has.

        Raises:
            DecisionError: they are not.
        """
        _AtStep.__post_init__(self)
        if not isinstance(self.coefficients, Mapping) or not self.coefficients:
            raise DecisionError(f"coefficients: an integer by name is needed, got {self.coefficients!r}")
        try:
            CalibratedCost.from_mapping(self.coefficients)
        except PlanError as error:
            raise DecisionError(str(error)) from None
        object.__setattr__(self, "coefficients", dict(self.coefficients))


@dataclass(frozen=True, kw_only=True, slots=True)
class DropSource(_AtStep):
    """Go on without a source from a step on, for good; what was drawn of it and is in no plan yet is left out."""

    kind: ClassVar[str] = "drop"
    source: str
    """Its name."""
    reason: str
    """Why it cannot be read."""

    def __post_init__(self) -> None:
        """Raises DecisionError if it names no source, or no reason."""
        _AtStep.__post_init__(self)
        if not isinstance(self.source, str) or not isinstance(self.reason, str):
            raise DecisionError(
                f"drop: the name of a source and a reason are needed, got {self.source!r} and {self.reason!r}"
            )


Decision: TypeAlias = SetWeights | SkipSteps | SetCoefficients | DropSource
_KINDS: dict[str, type[Decision]] = {
    one.kind: one for one in (SetWeights, SkipSteps, SetCoefficients, DropSource)
}


def to_json(decision: Decision) -> dict[str, Any]:
    """JSON-serialisable form."""
    values = {field.name: getattr(decision, field.name) for field in fields(decision)}
    return {
        "step": decision.step,
        "kind": decision.kind,
        **{name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()},
    }


def from_json(values: object) -> Decision:
    """Inverse of `to_json`.

    Raises:
        DecisionError: it is no decision.
    """
    given = dict(values) if isinstance(values, Mapping) else {}
    kind = _KINDS.get(str(given.pop("kind", None)))
    if kind is None:
        raise DecisionError(f"a decision has a step and one of the kinds {', '.join(_KINDS)}, got {values!r}")
    if given.keys() != {field.name for field in fields(kind)}:
        names = " and ".join(field.name for field in fields(kind))
        raise DecisionError(f"a decision of kind {kind.kind} has {names}, got {values!r}")
    return kind(**given)


def check_names(decision: Decision, names: Sequence[str]) -> None:
    """A decision fits the sources.

    Raises:
        DecisionError: it names an unknown one, or more than the whole stream.
    """
    if isinstance(decision, DropSource) and decision.source not in names:
        raise DecisionError(f"drop: no source '{decision.source}'{suggest(decision.source, names)}")
    if not isinstance(decision, SetWeights) or decision.weights is None:
        return
    for name in decision.weights:
        if name not in names:
            raise DecisionError(f"weights: no source '{name}'{suggest(name, names)}")
    if len(decision.weights) < len(names) and sum(map(_written, decision.weights.values())) > 1:
        raise DecisionError(
            f"weights: {dict(decision.weights)} are shares of the stream, since not all sources are named, and add up"
            " to more than 1; lower them, or name every source"
        )


def digest_of(decisions: Iterable[Decision]) -> str:
    """Digest of a log of decisions; ranks of one job have equal ones."""
    text = json.dumps([to_json(decision) for decision in decisions], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class Decided:
    """What is in force by decisions."""

    weights: tuple[int, ...] | None = None
    """Parts of `WEIGHT_UNIT` of each source, in the order of `Mixture.names`; None: the schedule's are."""
    coefficients: Mapping[str, int] | None = None
    """Of the costs; None: the mixture's cost model is in force."""
    dropped: tuple[int, ...] = ()
    """Numbers of the sources that the stream goes on without, ascending."""

    def after(self, decisions: Sequence[Decision], names: Sequence[str], scheduled: Sequence[float]) -> Self:
        """What is in force once the decisions of a step took effect.

        Args:
            decisions: in the order given.
            names: of the sources.
            scheduled: weights of the schedule at that step, in the order of ``names``.

        Raises:
            DecisionError: they leave no source a weight.
        """
        weights: Sequence[float | Fraction] | None = self.weights
        coefficients, dropped = self.coefficients, set(self.dropped)
        for decision in decisions:
            if isinstance(decision, SetWeights):
                before = scheduled if weights is None else weights
                weights = None if decision.weights is None else _changed(decision.weights, names, before)
            elif isinstance(decision, SetCoefficients):
                coefficients = decision.coefficients
            elif isinstance(decision, DropSource):
                dropped.add(names.index(decision.source))
        now = replace(self, weights=None, coefficients=coefficients, dropped=tuple(sorted(dropped)))
        if weights is None:
            return now
        if not any(weights):
            raise DecisionError(
                f"the weights decided for step {decisions[-1].step} leave no source a weight; decide on them again,"
                " naming a source that shall have one"
            )
        return replace(now, weights=tuple(integer_weights(weights)))

    def to_json(self) -> dict[str, Any]:
        """JSON-serialisable form."""
        return {
            "weights": None if self.weights is None else list(self.weights),
            "coefficients": None if self.coefficients is None else dict(self.coefficients),
            "dropped": list(self.dropped),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any], num_sources: int) -> Self:
        """Inverse of `to_json`.

        Raises:
            ValueError: a part is not there, or is none that it can be.
        """
        weights, coefficients, dropped = values["weights"], values["coefficients"], values.get("dropped", [])
        if weights is not None and (
            len(weights) != num_sources
            or not all(_is_count(weight, WEIGHT_UNIT + 1) for weight in weights)
            or sum(weights) != WEIGHT_UNIT
        ):
            raise ValueError(f"{weights!r} are no weights of {num_sources} sources")
        if coefficients is not None:
            coefficients = SetCoefficients(step=0, coefficients=coefficients).coefficients
        if not all(_is_count(source, num_sources) for source in dropped):
            raise ValueError(f"{dropped!r} are no numbers of {num_sources} sources")
        return cls(
            weights=None if weights is None else tuple(weights),
            coefficients=coefficients,
            dropped=tuple(dropped),
        )


def _changed(
    changes: Mapping[str, float], names: Sequence[str], before: Sequence[float | Fraction]
) -> list[Fraction]:
    """Weights of all sources, of which some are given as shares and the others keep their proportion."""
    shares = {name: _written(weight) for name, weight in changes.items()}
    kept = [
        Fraction(0) if name in shares else Fraction(weight)
        for name, weight in zip(names, before, strict=True)
    ]
    total, left = sum(kept), 1 - sum(shares.values())
    return [
        shares[name] if name in shares else weight * left / (total or 1)
        for name, weight in zip(names, kept, strict=True)
    ]


def _written(weight: float) -> Fraction:
    """The number as it is written, not the binary fraction nearest to it: 0.1 and 0.9 add up to 1."""
    return Fraction(str(weight))


def _is_count(value: object, below: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < below
