"""Who reads what, with how much: readers, the actors that host them, and what bounds both."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from omniload.errors import PlanError


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """What all actors of a job may take together."""

    cpus: float
    """Processors."""
    memory_bytes: int
    """Host memory."""

    def __post_init__(self) -> None:
        """Raises PlanError if there is nothing to take."""
        for name in ("cpus", "memory_bytes"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise PlanError(f"budget: {name} is {value!r}, and a number above 0 is needed; raise it")


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorLimits:
    """What one actor may be. Not a part of the budget: an actor must fit one machine whatever the job has."""

    workers: int = 4
    """Most threads that read; decoding and tokenising release the interpreter lock, but not all else does."""
    memory_bytes: int = 8 << 30
    """Most memory; a reader that needs more by itself is alone."""
    base_bytes: int = 128 << 20
    """Memory of an actor that reads nothing: interpreter, libraries, transport."""

    def __post_init__(self) -> None:
        """Raises PlanError if no actor could be like that."""
        if self.workers < 1:
            raise PlanError(f"limits: workers is {self.workers}, and an actor needs at least 1; raise it")
        if not 0 <= self.base_bytes < self.memory_bytes:
            raise PlanError(
                f"limits: base_bytes {self.base_bytes} leaves nothing of memory_bytes {self.memory_bytes}; raise that"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Reader:
    """One loader of a source: holder number ``index`` of the ``of`` that share its windows by leases."""

    source: str
    """The source."""
    index: int
    """Its number among them, from 0."""
    of: int
    """How many there are."""
    cpus: float
    """Processors that it keeps busy at the rate planned."""
    memory_bytes: int
    """Its window and buffer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorSpec:
    """One actor: a process with readers."""

    name: str
    """Its own among all actors, as long as it is there: ``source#index`` if it was made for a source, ``#number`` if it
    was made for several; that of a shadow ends in ``.shadow``."""
    readers: tuple[Reader, ...]
    """What it reads; at least one, and of a source one at most."""
    workers: int
    """Threads that they share, at most one each."""
    base_bytes: int
    """Memory of the process itself."""
    shadow: bool = False
    """Whether it only stands by, for the actor that is the same but for this."""

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the sources it reads, sorted."""
        return tuple(sorted({reader.source for reader in self.readers}))

    @property
    def cpus(self) -> float:
        """Processors to reserve; a shadow needs none before the actor it stands for is gone."""
        return 0.0 if self.shadow else math.fsum(reader.cpus for reader in self.readers)

    @property
    def memory_bytes(self) -> int:
        """Memory to reserve; a shadow's is that of a reader at work, which it may become at any moment."""
        return self.base_bytes + sum(reader.memory_bytes for reader in self.readers)

    def to_json(self) -> dict[str, Any]:
        """JSON-serialisable form."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Inverse of `to_json`."""
        readers = tuple(Reader(**reader) for reader in values["readers"])
        return cls(**{**values, "readers": readers})


def with_shadows(actors: Iterable[ActorSpec]) -> tuple[ActorSpec, ...]:
    """The actors, and then a shadow for each."""
    actors = tuple(actors)
    shadows = (replace(actor, name=f"{actor.name}.shadow", shadow=True) for actor in actors)
    return (*actors, *shadows)


def of_its_own(reader: Reader, base_bytes: int) -> ActorSpec:
    """An actor that reads nothing else."""
    return ActorSpec(
        name=f"{reader.source}#{reader.index}", readers=(reader,), workers=1, base_bytes=base_bytes
    )


def resized(
    actors: tuple[ActorSpec, ...], source: str, num_actors: int, *, cpus: float
) -> tuple[ActorSpec, ...]:
    """The actors when so many of them read a source, and nothing else; readers of other sources stay where they are.

    If it shared an actor it leaves that. Those that are added come at the end, and those with the highest numbers go
    first. If there are shadows, each actor has one again.

    Args:
        actors: at least one of which reads the source.
        source: the source.
        num_actors: how many it shall have, at least 1.
        cpus: processors that its readers keep busy together.
    """
    assert num_actors >= 1
    primaries = [actor for actor in actors if not actor.shadow]
    one = next(reader for actor in primaries for reader in actor.readers if reader.source == source)
    changed = []
    own = 0
    for actor in primaries:
        others = tuple(reader for reader in actor.readers if reader.source != source)
        if others:
            changed.append(replace(actor, readers=others, workers=min(actor.workers, len(others))))
        elif own < num_actors:
            changed.append(replace(actor, readers=(_of(one, own, num_actors, cpus),)))
            own += 1
    changed += [
        of_its_own(_of(one, index, num_actors, cpus), primaries[0].base_bytes)
        for index in range(own, num_actors)
    ]
    return with_shadows(changed) if len(primaries) < len(actors) else tuple(changed)


def _of(reader: Reader, index: int, count: int, cpus: float) -> Reader:
    return replace(reader, index=index, of=count, cpus=cpus / count)
