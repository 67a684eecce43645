"""What the scaler goes by, and what it decides: values that a log holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self, TypeAlias

Reason: TypeAlias = Literal["schedule", "drift", "lag", "crowded"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceLoad:
    """One source in the steps since the last observation."""

    tokens: int
    """Tokens of it that were served."""
    waited_s: float
    """Time that planning or building waited for its readers, also where no client had to wait for that."""
    ahead: float
    """The largest share of the stream's tokens that is scheduled for it, see `Outlook`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """The steps since the last observation."""

    seconds: float
    """Time that they took, above 0."""
    stalled_s: float
    """Part of it in which the trainer waited for a step: of the rank that waited most."""
    sources: Mapping[str, SourceLoad]
    """By name; all of them."""

    def to_json(self) -> dict[str, Any]:
        """JSON-serialisable form."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Inverse of `to_json`."""
        sources = {name: SourceLoad(**load) for name, load in values["sources"].items()}
        return cls(**{**values, "sources": sources})


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingInputs:
    """What a decision went by."""

    stream_tokens_per_s: float
    """What the trainer takes while it does not wait."""
    ahead: float
    """Largest share scheduled."""
    realised: float
    """Share of the tokens served lately."""
    waited: float
    """Part of the time lately that its readers kept the trainer waiting."""
    reader_tokens_per_s: float
    """What one reader gives: as profiled, or less if it turned out to be slower."""

    @property
    def demand_tokens_per_s(self) -> float:
        """What is wanted of the source."""
        return self.stream_tokens_per_s * max(self.ahead, self.realised)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingDecision:
    """Another number of actors that read a source, and nothing else from then on."""

    step: int
    """Step of the observation that led to it."""
    source: str
    """The source."""
    actors_before: int
    """Actors that read it."""
    actors_after: int
    """Actors that shall read it."""
    cpus: float
    """Processors that these keep busy with it."""
    reason: Reason
    """``schedule``: its share by the schedule changed; ``drift``: what is taken of it did; ``lag``: the trainer waited
    for it, though by its profile it should have kept up; ``crowded``: it shared an actor that all its sources together
    keep too busy."""
    inputs: ScalingInputs
    """What it went by."""

    def to_json(self) -> dict[str, Any]:
        """JSON-serialisable form."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Inverse of `to_json`."""
        return cls(**{**values, "inputs": ScalingInputs(**values["inputs"])})
