"""Groups and temperatures of a mixture file become plain weights of plain sources.

A level holds sources and groups, whose weights are relative to each other; a group is a level inside, which shares
the group's weight. ``temperature`` T of a level replaces each weight w in it by w^(1/T): with the sizes of the sources
as weights, T = 1 reads them in proportion and a large T alike (Arivazhagan et al., 2019). A stage of the schedule
gives weights as they are; where it names a group, the group's sources share them as they share its weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from omniload.errors import MixtureError
from omniload.suggest import suggest

FILE_KEYS = ("groups", "include", "temperature")
"""Top-level keys of a mixture file that a `Mixture` has no more."""
_GROUP_KEYS = ("weight", "sources", "groups", "temperature")


@dataclass(kw_only=True, slots=True)
class _Flat:
    """What is gathered while descending."""

    where: str
    """The file, for messages."""
    sources: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Definitions by name, from all levels."""
    groups: dict[str, dict[str, Fraction]] = field(default_factory=dict)
    """By group, the shares of its sources; they add up to 1."""

    def error(self, message: str) -> MixtureError:
        """An error in the file."""
        return MixtureError(f"{self.where}: {message}")

    def number(self, values: Mapping[str, Any], key: str, prefix: str) -> Fraction:
        """A number that is not negative."""
        if key not in values:
            raise self.error(f"'{prefix}{key}' is missing; add it")
        try:
            number = float(values[key])
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not (0 <= number < math.inf):
            raise self.error(f"{prefix}{key}: a number that is not negative is needed, got {values[key]!r}")
        return Fraction(number)

    def members(
        self, level: Mapping[str, Any], key: str, prefix: str
    ) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """The sources or groups of a level, each name given once in all levels."""
        members = level.get(key) or {}
        if not isinstance(members, Mapping):
            raise self.error(f"{prefix}{key}: a mapping from names is needed, got {members!r}")
        for name, member in members.items():
            if not isinstance(member, Mapping):
                raise self.error(f"{prefix}{key}.{name}: a mapping of keys is needed, got {member!r}")
            if name in self.sources or name in self.groups:
                raise self.error(f"{prefix}{key}.{name}: another source or group has this name; rename one")
            yield name, member


def flatten(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The content of a mixture file with groups and temperatures resolved.

    Args:
        values: the file's top-level keys.
        where: the file, for messages.

    Raises:
        MixtureError: a name given twice, a group without weight or sources, a temperature that is none.
    """
    if not values.keys() & {"groups", "temperature"}:
        return dict(values)
    flat = _Flat(where=where)
    weights = _level(values, "", flat)
    plain = {key: value for key, value in values.items() if key not in FILE_KEYS}
    plain["sources"] = {name: {**spec, "weight": float(weights[name])} for name, spec in flat.sources.items()}
    if isinstance(values.get("schedule"), list | tuple):
        plain["schedule"] = [_stage(stage, i, flat) for i, stage in enumerate(values["schedule"])]
    return plain


def _level(level: Mapping[str, Any], prefix: str, flat: _Flat) -> dict[str, Fraction]:
    """Weights of all sources of a level, relative to each other."""
    weights: dict[str, Fraction] = {}
    shares: dict[str, dict[str, Fraction]] = {}
    for name, spec in flat.members(level, "sources", prefix):
        flat.sources[name] = dict(spec)
        weights[name] = flat.number(spec, "weight", f"{prefix}sources.{name}.")
        shares[name] = {name: Fraction(1)}
    for name, group in flat.members(level, "groups", prefix):
        inside = f"{prefix}groups.{name}"
        for key in group:
            if key not in _GROUP_KEYS:
                raise flat.error(f"unknown key '{inside}.{key}'{suggest(str(key), _GROUP_KEYS)}")
        flat.groups[name] = {}
        weights[name] = flat.number(group, "weight", f"{inside}.")
        members = _level(group, f"{inside}.", flat)
        total = sum(members.values())
        if not total:
            raise flat.error(f"{inside}: no source in it has a weight; give it one, or remove the group")
        shares[name] = flat.groups[name] = {source: weight / total for source, weight in members.items()}
    if level.get("temperature") is not None:
        weights = _reweighted(weights, level, prefix, flat)
    return {
        source: weights[name] * share for name, sources in shares.items() for source, share in sources.items()
    }


def _reweighted(
    weights: dict[str, Fraction], level: Mapping[str, Any], prefix: str, flat: _Flat
) -> dict[str, Fraction]:
    temperature = flat.number(level, "temperature", prefix)
    if not temperature:
        raise flat.error(f"{prefix}temperature: must be above 0; 1 leaves the weights as they are")
    largest = max(weights.values(), default=Fraction(0)) or Fraction(1)
    reweighted = {}
    for name, weight in weights.items():
        try:
            power = math.pow(weight / largest, 1 / temperature)
        except OverflowError:  # of the exponent
            power = 0.0
        if weight and not power:
            raise flat.error(f"{prefix}temperature: {level['temperature']} leaves '{name}' nothing; raise it")
        # Rounded, because the last digits of a power are not the same on every platform.
        reweighted[name] = Fraction(f"{power:.12g}")
    return reweighted


def _stage(stage: Any, number: int, flat: _Flat) -> Any:
    """A stage with the weights of groups handed on to their sources."""
    weights = stage.get("weights") if isinstance(stage, Mapping) else None
    if not isinstance(weights, Mapping):
        return stage
    plain: dict[str, float] = {}
    for name in weights:
        weight = flat.number(weights, name, f"schedule.{number}.weights.")
        for source, share in flat.groups.get(name, {name: Fraction(1)}).items():
            if source in plain:
                raise flat.error(
                    f"schedule.{number}: a weight for '{source}' and for a group it is in; remove one"
                )
            plain[source] = float(weight * share)
    return {**stage, "weights": plain}
