"""Which actors read which sources."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class Loader:
    """An actor that reads sources."""

    name: str
    """Its name in the job."""
    sources: tuple[int, ...]
    """Numbers of the sources in the mixture."""
    shadow: bool = False
    """Whether it stands by for those that read the same sources."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """All loaders of a job. Several that have a source share its windows by leases."""

    loaders: tuple[Loader, ...]
    """Each source is read by one at least."""
    version: int = 0
    """Grows with every change."""

    def readers(self, source: int) -> tuple[str, ...]:
        """Names of those that read a source."""
        return tuple(one.name for one in self.loaders if source in one.sources and not one.shadow)

    def shadows(self, source: int) -> tuple[str, ...]:
        """Names of those that stand by for them."""
        return tuple(one.name for one in self.loaders if source in one.sources and one.shadow)

    def changed(self, loaders: Sequence[Loader]) -> Layout:
        """The next version."""
        return replace(self, loaders=tuple(loaders), version=self.version + 1)


def with_shadows(loader: Loader, num_shadows: int) -> list[Loader]:
    """A loader, and those that stand by for it."""
    names = [f"{loader.name}.shadow-{i}" for i in range(num_shadows)]
    return [loader, *(replace(loader, name=name, shadow=True) for name in names)]


def deal(weights: Sequence[float], num_loaders: int, num_shadows: int) -> Layout:
    """One reader for each source, the heaviest given first to the loader with the least.

    Args:
        weights: of the sources, by their numbers.
        num_loaders: how many loaders; those that would have no source are left out.
        num_shadows: standbys of each.
    """
    dealt: list[list[int]] = [[] for _ in range(min(num_loaders, len(weights)))]
    load = [0.0] * len(dealt)
    for source in sorted(range(len(weights)), key=lambda one: (-weights[one], one)):
        to = min(range(len(dealt)), key=lambda one: (load[one], len(dealt[one]), one))
        dealt[to].append(source)
        load[to] += weights[source]
    loaders: list[Loader] = []
    for number, sources in enumerate(dealt):
        one = Loader(name=f"loader-{number}", sources=tuple(sorted(sources)))
        loaders += with_shadows(one, num_shadows)
    return Layout(loaders=tuple(loaders))
