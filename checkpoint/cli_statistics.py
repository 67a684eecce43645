"""Statistics of tensors that are seen in parts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from checkpoint.engine.memory import Bytes
from checkpoint.planner import torch_dtype

_NUM_FIRST: Final = 8

Numbers = npt.NDArray[Any]


def as_numbers(data: Bytes, dtype: str) -> Numbers:
    """Elements as NumPy has them: those of types it lacks as the next larger one, which holds them exactly.

    Args:
        data: Their bytes.
        dtype: Stored name of their type.
    """
    if dtype == "complex32":  # torch warns of it
        return data.view(np.float16).astype(np.float32).view(np.complex64)
    elements = torch.from_numpy(data).view(torch_dtype(dtype))
    lacking = elements.dtype == torch.bfloat16 or dtype.startswith("float8_")
    numbers: Numbers = (elements.to(torch.float32) if lacking else elements).numpy()
    return numbers


class Statistics:
    """Least, greatest and mean of the finite elements, how many are not finite, and the first few.

    Of complex numbers it is the magnitudes that are ranked and averaged.
    """

    def __init__(self) -> None:
        self.num_elements = 0
        self.num_nan = 0
        self.num_inf = 0
        self.least: Any = None
        self.greatest: Any = None
        self.mean = 0.0
        self.first: list[Any] = []
        self._num_finite = 0
        self._complex = False

    def add(self, numbers: Numbers) -> None:
        """Count in the elements that follow, shape ``[n]``, n at least 1."""
        self.first += list(numbers[: _NUM_FIRST - len(self.first)])
        self.num_elements += len(numbers)
        if numbers.dtype.kind in "fc":
            self.num_nan += int(np.isnan(numbers).sum())
            self.num_inf += int(np.isinf(numbers).sum())
            numbers = numbers[np.isfinite(numbers)]
        if numbers.dtype.kind == "c":
            self._complex = True
            with np.errstate(over="ignore"):
                numbers = np.abs(numbers)
        if not len(numbers):
            return
        low, high = numbers.min(), numbers.max()
        self.least = low if self.least is None else min(self.least, low)
        self.greatest = high if self.greatest is None else max(self.greatest, high)
        total = self._num_finite + len(numbers)
        self.mean = self.mean * (self._num_finite / total) + _mean(numbers) * (len(numbers) / total)
        self._num_finite = total

    def lines(self) -> Iterator[str]:
        """What there is to say, for people."""
        if not self.num_elements:
            yield "no elements"
            return
        if self._num_finite:
            of = " of the magnitudes" if self._complex else ""
            yield f"min {self.least}, max {self.greatest}, mean {self.mean:.9g}{of}"
        yield f"not finite: {self.num_nan + self.num_inf} ({self.num_nan} nan, {self.num_inf} inf)"
        more = ", ..." if self.num_elements > len(self.first) else ""
        yield f"first values: {', '.join(map(str, self.first))}{more}"


def _mean(numbers: Numbers) -> float:
    with np.errstate(over="ignore"):
        mean = float(numbers.sum(dtype=np.float64)) / len(numbers)
    if math.isfinite(mean):
        return mean
    # The sum overflowed; the sum of the parts of the mean does not.
    return float((numbers.astype(np.float64) / len(numbers)).sum())
