"""Lists of different lengths as flat columns: all values one after the other, and how many each list has."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


def starts(counts: Ints) -> Ints:
    """Where each list begins among the values, and as the last entry their number; int64 ``[len(counts) + 1]``."""
    found = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=found[1:])
    return found


def ranges(begin: Ints, counts: Ints) -> Ints:
    """The indices ``begin[i]`` to ``begin[i] + counts[i]`` for each ``i``, one after the other."""
    first = starts(counts)
    counted: Ints = np.arange(first[-1]) + np.repeat(begin - first[:-1], counts)
    return counted
