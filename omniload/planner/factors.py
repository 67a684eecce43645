"""Prime factors: how lanes are halved, and halved again, whatever their number."""

from __future__ import annotations


def prime_factors(number: int) -> list[int]:
    """Prime factors of a number from 1 on, ascending."""
    factors, factor = [], 2
    while number > 1:
        while number % factor == 0:
            factors.append(factor)
            number //= factor
        factor += 1
    return factors
