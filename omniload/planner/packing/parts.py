"""What the ways of packing give."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """Candidates, or parts of them, in packs. A candidate that is not in it was not placed."""

    piece: np.ndarray
    """``int64[m]``: candidate of each part, by pack, in the order they lie in it."""
    start: np.ndarray
    """``int64[m]``: tokens of that candidate before the part; 0 unless documents are cut."""
    length: np.ndarray
    """``int64[m]``: tokens of the part."""
    pack: np.ndarray
    """``int64[m]``: ascending, numbered from 0 without gaps."""
