"""Strategies: functions of a `DGraph` that plan a step. The built-in one does what the mixture file says."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import TypeAlias

from omniload.errors import MixtureError
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
    try:
        strategy: Strategy = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise MixtureError(f"strategy: {name} cannot be imported ({error}); is it on PYTHONPATH?") from error
    if not callable(strategy):
        raise MixtureError(f"strategy: {name} is not a function")
    return strategy


def source_of(name: str | None) -> str:
    """The text of a strategy, as far as it can be had, so that an edited one is another."""
    try:
        return "" if name is None else inspect.getsource(load_strategy(name))
    except (OSError, TypeError):
        return ""
