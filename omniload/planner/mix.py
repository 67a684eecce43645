"""Mixing: which source gives the next sample, by largest integer deficit against the scheduled weights.

After every draw of ``n`` tokens each source is owed its weight's share of them and the drawn one has received ``n``.
The next draw is from the source that is owed most. All of it is exact integer arithmetic, so that the order is the
same on every platform; any prefix of the draws stays within two of the longest samples of its declared share.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

WEIGHT_UNIT = 2**32
"""Integer weights are parts of this; they add up to exactly this."""


def integer_weights(weights: Sequence[float]) -> list[int]:
    """Scale non-negative weights to integers that add up to `WEIGHT_UNIT`, by largest remainder.

    A source of weight 0 gets exactly 0. Ties go to the lower index.
    """
    total = sum(Fraction(weight) for weight in weights)
    assert total > 0, "the mixture guarantees a positive weight"
    shares = [Fraction(weight) * WEIGHT_UNIT / total for weight in weights]
    parts = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: (parts[i] - shares[i], i))
    for i in by_remainder[: WEIGHT_UNIT - sum(parts)]:
        parts[i] += 1
    return parts


def most_owed(deficits: Sequence[int], weights: Sequence[int]) -> int:
    """Index of the source with the largest deficit among those with a weight; the first on ties."""
    best, best_deficit = -1, 0
    for i, deficit in enumerate(deficits):
        if weights[i] and (best < 0 or deficit > best_deficit):
            best, best_deficit = i, deficit
    return best
