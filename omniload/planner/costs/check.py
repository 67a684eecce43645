"""Whether what a cost function gave is costs."""

from __future__ import annotations

import numpy as np

from omniload.errors import PlanError
from omniload.planner.costs.exact import LARGEST

_REMEDY = "a cost is an integer of at least 0"
_MOST_TOGETHER = 2**62 - 1
"""Of all pieces and modules: packing and balancing add costs up, and take twice the difference of two sums."""


def checked(cost: object, num_modules: int, num_pieces: int, name: str) -> np.ndarray:
    """The costs as the planner wants them: whole numbers, because only those are summed and compared alike everywhere.

    Args:
        cost: ``[modules, n]``, or ``[n]`` if there is one module; integers, or floats without a fraction.
        num_modules: that there are.
        num_pieces: n.
        name: of the cost function, for the message.

    Returns:
        ``int64[modules, n]``.

    Raises:
        PlanError: the shape is another, or a value is NaN, infinite, negative, broken or too large; names the first
            such value. Also if all of them together come to 2⁶² or more.
    """
    try:
        given = np.asarray(cost)
    except ValueError as error:  # rows of unlike length
        raise PlanError(f"cost '{name}': gave no array ({error}); {_REMEDY}") from error
    shape = (num_modules, num_pieces)
    if given.shape != shape and not (num_modules == 1 and given.shape == (num_pieces,)):
        raise PlanError(
            f"cost '{name}': gave shape {list(given.shape)} for {num_pieces} pieces; return {list(shape)}:"
            " one row per module, one column per piece"
        )
    costs = given.reshape(shape)
    if not costs.size:
        return np.zeros(shape, np.int64)
    if costs.dtype.kind not in "iuf":
        raise PlanError(f"cost '{name}': gave values of type {costs.dtype}; {_REMEDY} and below 2**63")
    if costs.dtype.kind == "f":
        _refuse(~np.isfinite(costs), costs, name, _REMEDY)
        _refuse(costs >= 2.0**63, costs, name, "scale costs down")
        _refuse(costs != np.floor(costs), costs, name, f"{_REMEDY}: scale costs up, then round them")
    elif costs.dtype.kind == "u":
        _refuse(costs > LARGEST, costs, name, "scale costs down")
    _refuse(costs < 0, costs, name, _REMEDY)
    whole = costs.astype(np.int64)
    # In halves, since the sum itself might not fit.
    total = (int((whole >> 32).sum()) << 32) + int((whole & 0xFFFFFFFF).sum())
    if total > _MOST_TOGETHER:
        raise PlanError(
            f"cost '{name}': the pieces of a step cost {total} together, more than {_MOST_TOGETHER};"
            " scale costs down"
        )
    return whole


def _refuse(wrong: np.ndarray, costs: np.ndarray, name: str, remedy: str) -> None:
    if wrong.any():
        module, piece = (int(i[0]) for i in np.nonzero(wrong))
        raise PlanError(
            f"cost '{name}': module {module}: piece {piece} costs {costs[module, piece]}; {remedy}"
        )
