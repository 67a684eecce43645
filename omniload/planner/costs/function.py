"""A function of the user's as a cost model."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from omniload.errors import PlanError, kind_and_message
from omniload.importing import source_text
from omniload.planner.costs.check import checked
from omniload.planner.costs.protocol import MODULES, fingerprint_of


class FunctionCost:
    """A function that says what pieces cost.

    It is called once, with one piece of one token, to see of how many modules it tells.

    Args:
        function: ``(length, patches, frames) -> [n] or [modules, n]``, as `CostModel.cost`. It must give equal costs
            for equal arguments, in every process.
        name: what messages call it; by default where the function is defined.

    Raises:
        PlanError: it fails, or gives no costs.
    """

    def __init__(self, function: Callable[..., object], name: str | None = None) -> None:
        self._function = function
        self.name = name or _name_of(function)
        one, none = np.ones(1, np.int64), np.zeros(1, np.int64)
        shape = self._call(one, none, none).shape
        num_modules = shape[0] if len(shape) == 2 else 1
        if not 1 <= num_modules <= len(MODULES):
            raise PlanError(
                f"cost '{self.name}': tells of {num_modules} modules; there are {len(MODULES)}: {', '.join(MODULES)}"
            )
        self.modules = MODULES[:num_modules]
        self.cost(one, none, none)

    @property
    def fingerprint(self) -> str:
        """Of the name and, where it can be had, the function's source text."""
        return fingerprint_of("FunctionCost", [self.name, source_text(self._function)])

    def cost(self, length: np.ndarray, patches: np.ndarray, frames: np.ndarray) -> np.ndarray:
        """``int64[modules, n]``.

        Raises:
            PlanError: it fails, or gives no costs; see `checked`.
        """
        return checked(self._call(length, patches, frames), len(self.modules), len(length), self.name)

    def _call(self, length: np.ndarray, patches: np.ndarray, frames: np.ndarray) -> np.ndarray:
        try:
            return np.asarray(self._function(length, patches, frames))
        except Exception as error:
            raise PlanError(f"cost '{self.name}': {kind_and_message(error)}") from error


def _name_of(function: Callable[..., object]) -> str:
    return (
        f"{getattr(function, '__module__', '')}:{getattr(function, '__qualname__', type(function).__name__)}"
    )
