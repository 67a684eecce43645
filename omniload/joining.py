"""Parts of arrays, laid end to end: compiled without a Python object for each part, or a slice each in Python."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from omniload.kernels import KERNELS


def join_parts(values: Sequence[np.ndarray], places: np.ndarray, out: np.ndarray) -> None:
    """Copy parts of arrays end to end.

    Args:
        values: one-dimensional and contiguous, of the type of ``out``, or of types that it holds all values of.
        places: ``int64[3, n]``: the array that each part lies in, and its bounds there.
        out: as long as the parts together.
    """
    if KERNELS is None or any(one.dtype != out.dtype for one in values):
        join_parts_in_python(values, places, out)
    else:
        KERNELS.join_parts(list(values), np.ascontiguousarray(places), out)


def join_parts_in_python(values: Sequence[np.ndarray], places: np.ndarray, out: np.ndarray) -> None:
    """As `join_parts`."""
    parts = [values[array][begin:end] for array, begin, end in places.T.tolist()]
    if parts:
        np.concatenate(parts, out=out)
