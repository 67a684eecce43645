"""The cost model that a mixture or a strategy asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from omniload.errors import MixtureError
from omniload.importing import import_named
from omniload.planner.costs.function import FunctionCost
from omniload.planner.costs.lengths import AttentionCost, TokenCost
from omniload.planner.costs.mixed import MixedCost
from omniload.planner.costs.protocol import CostModel
from omniload.suggest import suggest

_BUILT_IN: Mapping[str, Callable[[], CostModel]] = {"attention": AttentionCost, "tokens": TokenCost}


def cost_model(wanted: CostModel | str | Mapping[str, Any] | Callable[..., object]) -> CostModel:
    """The cost model that is meant.

    Args:
        wanted: a cost model; the name of a built-in one, ``attention`` or ``tokens``; ``package.module:name`` of a cost
            model or a function; a mapping as for `MixedCost.from_mapping`; or a function.

    Raises:
        MixtureError: a name is unknown, or cannot be imported.
        PlanError: what was found makes no costs.
    """
    name = None
    if isinstance(wanted, str):
        name = wanted
        if name in _BUILT_IN:
            return _BUILT_IN[name]()
        if ":" not in name:
            raise MixtureError(
                f"cost: '{name}' is neither built in nor package.module:name{suggest(name, list(_BUILT_IN))}"
            )
        wanted = import_named(name, f"cost: {name}")
    if isinstance(wanted, Mapping):
        return MixedCost.from_mapping(wanted)
    if not isinstance(wanted, type) and all(
        hasattr(wanted, part) for part in ("cost", "modules", "fingerprint")
    ):
        return wanted  # type: ignore[return-value]  # has what the protocol asks for
    if not callable(wanted):
        raise MixtureError(f"cost: a {type(wanted).__name__} is no cost model, name or function")
    return FunctionCost(wanted, name)
