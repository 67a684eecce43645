"""Weighted sums of large integers in 64 bits, exact."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from omniload.errors import PlanError

LARGEST = 2**63 - 1
"""The largest cost that there is, of one piece."""


def weighted_sum(weights: Sequence[int], values: Sequence[np.ndarray], unit: int, what: str) -> np.ndarray:
    """``⌈Σ weights[i] · values[i] / unit⌉`` for each column, as if computed without bound.

    Products that 64 bits do not hold never arise: with ``w = w₁u + w₀`` and ``v = v₁u + v₀``, the quotient of ``wv`` by
    ``u`` is ``w₁v + w₀v₁`` and a rest ``w₀v₀ < u²``, and none of these is larger than the result.

    Args:
        weights: not negative, of any size.
        values: ``int64[n]`` for each weight, not negative.
        unit: positive, at most 2³⁰.
        what: says whose cost it is, for the message.

    Returns:
        ``int64[n]``.

    Raises:
        PlanError: a result may be larger than 64 bits hold: the sum of the largest terms is.
    """
    size = len(values[0])
    assert len(values) <= 8, "the rests add up in 64 bits"
    assert 0 < unit <= 2**30, "the rests add up in 64 bits"
    if not size:
        return np.zeros(0, np.int64)
    largest = [int(value.max()) for value in values]
    most = sum(weight * value for weight, value in zip(weights, largest, strict=True))
    terms = [(w, v) for w, v, up_to in zip(weights, values, largest, strict=True) if w and up_to]
    if most > LARGEST * unit:
        raise PlanError(
            f"cost '{what}': a piece costs up to {-(-most // unit)}, more than {LARGEST}; cut longer pieces (seq_len)"
            " or scale the costs down"
        )
    whole, rest = np.zeros(size, np.int64), np.zeros(size, np.int64)
    for weight, value in terms:
        if most <= LARGEST:  # the usual case: no product needs more than 64 bits
            rest += weight * value
            continue
        high, low = divmod(weight, unit)
        quotient = value // unit
        whole += high * value + low * quotient
        rest += low * (value - quotient * unit)
    return whole - (-rest // unit)
