"""Auto-partitioning: readers, actors and groups that keep up with a demand, within a budget.

How many readers a source gets follows from its rate. Those of a source that needs several are actors by themselves;
sources that need one share actors. What a budget allows is found by laying out lower and lower rates until one fits. A
layout depends on its rate and not on the budget, so a larger budget never gives a lower rate.

The problem is that of AutoPartition (arXiv 2504.09844): actors per source, workers per actor, memory and processors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self, TypeAlias, get_args

from omniload.errors import PlanError
from omniload.scaling.actors import ActorLimits, ActorSpec, Budget
from omniload.scaling.layout import Layout, Sources
from omniload.scaling.profile import SourceProfile
from omniload.suggest import suggest

Resource: TypeAlias = Literal["cpus", "memory_bytes"]
_RESOURCES: tuple[Resource, ...] = get_args(Resource)
_OCTAVES, _PER_OCTAVE = 20, 16
"""Rates tried: so many halvings of the demand, and steps in each, evenly spaced."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shortfall:
    """A resource of which the demand needs more than there is."""

    resource: Resource
    """Name of the field of `Budget`."""
    needed: float
    """What the demand needs."""
    available: float
    """What the budget has."""
    least: float
    """What one reader for each source needs, however slow."""

    def __str__(self) -> str:
        if self.resource == "cpus":
            return f"{self.needed:.2f} processors are needed, {self.needed - self.available:.2f} more than there are"
        text = f"{_mib(self.needed)} of memory are needed, {_mib(self.needed - self.available)} more than there are"
        if self.least > self.available:
            text += f"; one reader for each source alone takes {_mib(self.least)}"
        return text


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """Who reads what."""

    actors: tuple[ActorSpec, ...]
    """Those that read, then their shadows, if any."""
    tokens_per_s: float
    """What they sustain: the demand, or as much of it as the budget allows."""
    demand_tokens_per_s: float
    """What was asked for."""
    shortfalls: tuple[Shortfall, ...] = ()
    """Why it is less; none if it is not."""

    @property
    def cpus(self) -> float:
        """Processors that all actors take; never more than the budget has."""
        return math.fsum(actor.cpus for actor in self.actors)

    @property
    def memory_bytes(self) -> int:
        """Memory that all actors take, shadows included; more than the budget has only if ``least`` is, at rate 0."""
        return sum(actor.memory_bytes for actor in self.actors)

    def num_actors(self) -> dict[str, int]:
        """Actors that read each source, shadows not counted, by name."""
        return {reader.source: reader.of for actor in self.actors for reader in actor.readers}

    def to_json(self) -> dict[str, Any]:
        """JSON-serialisable form."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Inverse of `to_json`."""
        actors = tuple(ActorSpec.from_json(actor) for actor in values["actors"])
        shortfalls = tuple(Shortfall(**one) for one in values["shortfalls"])
        return cls(**{**values, "actors": actors, "shortfalls": shortfalls})


def partition(
    profiles: Sequence[SourceProfile],
    shares: Mapping[str, float],
    demand_tokens_per_s: float,
    budget: Budget,
    *,
    limits: ActorLimits | None = None,
    shadows: bool = False,
) -> Partition:
    """Choose readers and actors that give ``demand_tokens_per_s``, or as much of it as the budget allows.

    The same arguments give the same partition. Every source is read by one actor, its own or one shared with others, or
    by several. Less than the demand is planned in steps, so that up to 6 % of what a budget might give is left unused.
    If not even one reader for each source fits, that is the partition, at rate 0.

    Args:
        profiles: of all sources.
        shares: of the stream's tokens, by name of source: what is to be kept up with. Those of an `Outlook` that looks
            ahead may add up to more than 1.
        demand_tokens_per_s: tokens of the whole stream.
        budget: what all actors may take together.
        limits: what one may be.
        shadows: whether each actor has another that stands by for it.

    Raises:
        PlanError: there are no profiles, a share is missing or of an unknown source, or a number is none.
    """
    _check(profiles, shares, demand_tokens_per_s)
    sources = Sources.of(profiles, shares, limits or ActorLimits(), shadows=shadows)
    wanted, least = Layout(sources, demand_tokens_per_s), Layout(sources, 0.0)
    rate, chosen = demand_tokens_per_s, wanted
    if wanted.is_over(budget):
        lower = ((rate, Layout(sources, rate)) for rate in _rates_below(demand_tokens_per_s))
        rate, chosen = next((found for found in lower if not found[1].is_over(budget)), (0.0, least))
    return Partition(
        actors=chosen.actors(),
        tokens_per_s=rate,
        demand_tokens_per_s=demand_tokens_per_s,
        shortfalls=tuple(
            Shortfall(
                resource=resource,
                needed=getattr(wanted, resource),
                available=getattr(budget, resource),
                least=getattr(least, resource),
            )
            for resource in _RESOURCES
            if getattr(wanted, resource) > getattr(budget, resource)
        ),
    )


def _rates_below(demand: float) -> Iterator[float]:
    for octave in range(_OCTAVES):
        for step in range(1, _PER_OCTAVE + 1):
            yield demand * (2 * _PER_OCTAVE - step) / (2 * _PER_OCTAVE) / 2**octave


def _check(profiles: Sequence[SourceProfile], shares: Mapping[str, float], demand: float) -> None:
    names = [profile.name for profile in profiles]
    if not names:
        raise PlanError("partition: there are no profiles; give one of each source")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise PlanError(f"partition: source '{twice}' has several profiles; give one of each source")
    for name in shares:
        if name not in names:
            raise PlanError(f"partition: no profile of source '{name}'{suggest(name, names)}")
    for name in names:
        share = shares.get(name)
        if share is None:
            raise PlanError(f"partition: no share for source '{name}'; add it (0 if it is not drawn from)")
        if not 0 <= share < math.inf:
            raise PlanError(f"partition: the share of '{name}' is {share!r}; give a number from 0 on")
    if not 0 < demand < math.inf:
        raise PlanError(f"partition: a demand of {demand!r} tokens/s; give a number above 0")


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"
