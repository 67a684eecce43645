"""Numbers that follow each other, found among ascending ones: what lies side by side in a file is read at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class Runs:
    """Runs of numbers without gaps."""

    starts: list[int]
    """First number of each run."""
    ends: list[int]
    """Number after the last of each."""
    bounds: np.ndarray
    """``int64[n + runs]``: the numbers, and after each run its end: where n things and what follows them begin."""
    first: np.ndarray
    """``int64[runs]``: where each run begins in ``bounds``."""

    @classmethod
    def of(cls, numbers: np.ndarray) -> Self:
        """The runs of ``int64[n]`` strictly ascending numbers, n at least 1."""
        start, end = int(numbers[0]), int(numbers[-1]) + 1
        if end - start == len(numbers):  # as in a block
            return cls(
                starts=[start], ends=[end], bounds=np.arange(start, end + 1), first=np.zeros(1, np.int64)
            )
        leaps = np.flatnonzero(np.diff(numbers) != 1) + 1
        begins = np.append(0, leaps)
        ends = numbers[np.append(leaps, len(numbers)) - 1] + 1
        return cls(
            starts=numbers[begins].tolist(),
            ends=ends.tolist(),
            bounds=np.insert(numbers, np.append(leaps, len(numbers)), ends),
            first=begins + np.arange(len(begins)),
        )
