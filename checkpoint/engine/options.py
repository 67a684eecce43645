"""How to save."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, SupportsIndex

import torch

from checkpoint.compression import Compression, check_codecs

_MAX_STEP: Final = 10**18 - 1  # what the name of a step's directory has digits for


def step_number(step: object) -> int:
    """A step as a plain integer, from whatever counts as one: of Python, NumPy or a tensor.

    Raises:
        ValueError: It is no whole number, or out of bounds.
    """
    is_flag = isinstance(step, bool) or (isinstance(step, torch.Tensor) and step.dtype is torch.bool)
    try:
        number = operator.index(step) if isinstance(step, SupportsIndex) and not is_flag else -1
    except (TypeError, RuntimeError):  # arrays and tensors have the method, whatever they hold
        number = -1
    if not 0 <= number <= _MAX_STEP:
        raise ValueError(f"step is {step!r:.60}: give a whole number from 0 to {_MAX_STEP}, the steps done")
    return int(number)


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveOptions:
    """How to save; equal on all ranks.

    Attributes:
        step: Step number for the manifest, or None; anything that :func:`step_number` takes, kept as it gives it.
        overwrite: Replace a checkpoint that is committed at the place.
        timeout_s: Longest wait for other ranks, in each stage.
        user_metadata: JSON-able values for the manifest.
        compression: Which tensors to compress.

    Raises:
        ValueError: ``step`` is no whole number from 0, or ``compression`` not a mapping of patterns to codecs.
    """

    step: int | None
    overwrite: bool
    timeout_s: float
    user_metadata: Mapping[str, object]
    compression: Compression | None = None

    def __post_init__(self) -> None:
        if self.step is not None:
            object.__setattr__(self, "step", step_number(self.step))
        check_codecs(self.compression)
