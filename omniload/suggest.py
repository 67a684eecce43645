"""The remedies that messages end with: the name that was probably meant, and numbers that would have done."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

_LISTED = 20
_FARTHEST = 2**16


def suggest(name: str, known: Sequence[str]) -> str:
    """The end of a message about an unknown name, led by a semicolon.

    Args:
        name: what was asked for.
        known: what there is.
    """
    if not known:
        return "; there is none"
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"; did you mean '{close[0]}'?"
    more = f" and {len(known) - _LISTED} more" if len(known) > _LISTED else ""
    return f"; known are: {', '.join(known[:_LISTED])}{more}"


def nearest_divisors(number: int, wanted: int, count: int = 3) -> list[int]:
    """Divisors of a number, of at most `_FARTHEST`, that are nearest to the wanted one; the lower first on ties."""
    divisors = [one for one in range(1, min(number, _FARTHEST) + 1) if number % one == 0]
    return sorted(sorted(divisors, key=lambda one: abs(one - wanted))[:count])
