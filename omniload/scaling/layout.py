"""Readers and actors for one rate of the stream: a function of the rate, whatever there is to pay for it."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from omniload.scaling.actors import ActorLimits, ActorSpec, Budget, Reader, of_its_own, with_shadows
from omniload.scaling.grouping import grouped
from omniload.scaling.profile import SourceProfile

UTILISATION = 0.8
"""Part of its time that a reader is planned to be busy: what is left absorbs samples that cost more than others, so
that steps do not wait for them."""
_ROUNDING = 1e-12


@dataclass(frozen=True, kw_only=True, slots=True)
class Sources:
    """All sources as columns, by name."""

    names: tuple[str, ...]
    """Sorted."""
    share: np.ndarray
    """``float64[n]``: of the stream's tokens."""
    rate: np.ndarray
    """``float64[n]``: tokens per second of a reader that is as busy as is planned."""
    cpu_s: np.ndarray
    """``float64[n]``: processor seconds per token."""
    memory: np.ndarray
    """``int64[n]``: bytes of a reader."""
    limits: ActorLimits
    """What one actor may be."""
    shadows: bool
    """Whether each has another that stands by for it."""

    @classmethod
    def of(
        cls,
        profiles: Sequence[SourceProfile],
        shares: Mapping[str, float],
        limits: ActorLimits,
        *,
        shadows: bool,
    ) -> Self:
        """The columns of some sources, in any order."""
        profiles = sorted(profiles, key=lambda profile: profile.name)
        return cls(
            names=tuple(profile.name for profile in profiles),
            share=np.array([shares[profile.name] for profile in profiles], np.float64),
            rate=UTILISATION * np.array([profile.tokens_per_s for profile in profiles]),
            cpu_s=np.array([profile.cpu_s_per_token for profile in profiles]),
            memory=np.array([profile.resident_bytes for profile in profiles], np.int64),
            limits=limits,
            shadows=shadows,
        )


class Layout:
    """How many readers each source needs at a rate, and which sources share an actor.

    Args:
        sources: all of them.
        tokens_per_s: the rate of the stream.
    """

    def __init__(self, sources: Sources, tokens_per_s: float) -> None:
        self._sources = sources
        self._load = tokens_per_s * sources.share / sources.rate  # in readers
        self._cpus = tokens_per_s * sources.share * sources.cpu_s
        self._num_readers = np.maximum(np.ceil(self._load), 1)  # float64: it may be more than can be

    @property
    def cpus(self) -> float:
        """Processors that are kept busy, rounded up by what the sum over actors may differ."""
        return math.fsum(self._cpus.tolist()) * (1 + _ROUNDING)

    @property
    def memory_bytes(self) -> float:
        """Memory that is taken; a whole number, of any size."""
        return self._memory_bytes(len(self._groups))

    def is_over(self, budget: Budget) -> bool:
        """Whether more is taken than there is; sources are put into groups only if that may decide it."""
        if self.cpus > budget.cpus or self._memory_bytes(0) > budget.memory_bytes:
            return True
        return self.memory_bytes > budget.memory_bytes

    @functools.cached_property
    def _groups(self) -> list[np.ndarray]:
        """Numbers of the sources that share an actor."""
        limits = self._sources.limits
        light = np.flatnonzero(self._num_readers == 1)
        room = limits.memory_bytes - limits.base_bytes
        load = np.stack([self._load / limits.workers, self._sources.memory / room], axis=1)
        return [light[group] for group in grouped(load[light])]

    def _memory_bytes(self, num_shared: int) -> float:
        num_actors = num_shared + self._num_readers[self._num_readers > 1].sum()
        own = num_actors * self._sources.limits.base_bytes + (self._num_readers * self._sources.memory).sum()
        return float(own) * (1 + self._sources.shadows)

    def actors(self) -> tuple[ActorSpec, ...]:
        """The actors: of the sources that have several, by name; then those that sources share; then shadows."""
        limits, base_bytes = self._sources.limits, self._sources.limits.base_bytes
        actors = [
            of_its_own(reader, base_bytes)
            for source in np.flatnonzero(self._num_readers > 1).tolist()
            for reader in self._readers(source)
        ]
        for number, group in enumerate(self._groups):
            readers = tuple(reader for source in group.tolist() for reader in self._readers(source))
            workers = min(len(readers), limits.workers)
            actors.append(
                ActorSpec(name=f"#{number}", readers=readers, workers=workers, base_bytes=base_bytes)
            )
        return with_shadows(actors) if self._sources.shadows else tuple(actors)

    def _readers(self, source: int) -> tuple[Reader, ...]:
        count = int(self._num_readers[source])
        return tuple(
            Reader(
                source=self._sources.names[source],
                index=index,
                of=count,
                cpus=float(self._cpus[source]) / count,
                memory_bytes=int(self._sources.memory[source]),
            )
            for index in range(count)
        )
