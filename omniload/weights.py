"""Weights and caps as integers, before anything is compared: the same on every platform."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

WEIGHT_UNIT = 2**32
"""Integer weights are parts of this; they add up to exactly this."""


def integer_weights(weights: Sequence[float | Fraction]) -> list[int]:
    """Scale non-negative weights to integers that add up to `WEIGHT_UNIT`, by largest remainder.

    A source of weight 0 gets exactly 0. Ties go to the lower index.
    """
    ratios = [weight.as_integer_ratio() for weight in weights]
    common = math.lcm(*(denominator for _, denominator in ratios))
    scaled = [numerator * (common // denominator) for numerator, denominator in ratios]
    total = sum(scaled)
    assert total > 0, "the mixture guarantees a positive weight"
    parts = [weight * WEIGHT_UNIT // total for weight in scaled]
    by_remainder = sorted(range(len(parts)), key=lambda i: (parts[i] * total - scaled[i] * WEIGHT_UNIT, i))
    for i in by_remainder[: WEIGHT_UNIT - sum(parts)]:
        parts[i] += 1
    return parts


def integer_cap(fraction: float) -> int:
    """A fraction in parts of `WEIGHT_UNIT`, rounded up, so that caps that add up to 1 still do."""
    return math.ceil(Fraction(fraction) * WEIGHT_UNIT)


def renormalised(parts: np.ndarray) -> np.ndarray:
    """Scale integer weights that add up to less than `WEIGHT_UNIT`, since some were taken out, to add up to it again.

    Args:
        parts: ``int64[n]``, which add up to at most `WEIGHT_UNIT`.

    Returns:
        ``int64[n]``: each in proportion to 1 part; zeros stay zeros, also if all are.
    """
    total = int(parts.sum())
    if total in (0, WEIGHT_UNIT):
        return parts
    # Each is below 2³², so that 2³² times it still has a place in 64 bits without sign.
    scaled: np.ndarray = ((parts.astype(np.uint64) << np.uint64(32)) // np.uint64(total)).astype(np.int64)
    scaled[np.flatnonzero(parts)[: WEIGHT_UNIT - int(scaled.sum())]] += 1
    return scaled
