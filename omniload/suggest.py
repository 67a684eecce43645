"""The remedy for a misspelt name: the one that was probably meant, or those that exist."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

_LISTED = 20


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
