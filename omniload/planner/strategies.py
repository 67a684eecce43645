"""Strategies: functions of a `DGraph` that plan a step. The built-in one does what the mixture file says."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from omniload.errors import MixtureError
from omniload.importing import import_named, source_text
from omniload.planner.graph import DGraph
from omniload.planner.plan import Plan

Strategy: TypeAlias = Callable[[DGraph], Plan]


def declared(graph: DGraph) -> Plan:
    """Every stage as the keys of the mixture file want it."""
    return graph.delay().mix().cost().pack().balance().plan()


def load_strategy(name: str | None) -> Strategy:
    """A strategy by ``package.module:function``; `declared` for None.

    Raises:
        MixtureError: it cannot be imported, or is not a function.
    """
    if name is None:
        return declared
    module, _, function = name.partition(":")
    if not (module and function):
        raise MixtureError(f"strategy: '{name}' is not of the form package.module:function")
    strategy: Strategy = import_named(name, f"strategy: {name}")
    if not callable(strategy):
        raise MixtureError(f"strategy: {name} is not a function")
    return strategy


def source_of(name: str | None) -> str:
    """The text of a strategy, as far as it can be had, so that an edited one is another."""
    return "" if name is None else source_text(load_strategy(name))
