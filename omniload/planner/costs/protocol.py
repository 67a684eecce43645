"""What a cost model is."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Protocol

import numpy as np

MODULES = ("backbone", "image", "audio")
"""Parts of a model that are balanced each for itself, in the order in which cost models name them."""

_FORMULAS = 1
"""Raised when a built-in model comes to count differently, so that a saved stream notices."""


class CostModel(Protocol):
    """Says what pieces cost each module of the model, in integers, from their lengths alone.

    Exists so that packing and balancing need not know what they weigh. Implemented by the models of this package and,
    through `cost_model`, by any function. It knows nothing of packs, lanes or ranks: a pack costs what its pieces cost.
    """

    @property
    def name(self) -> str:
        """What messages call it."""

    @property
    def modules(self) -> tuple[str, ...]:
        """Those it has of `MODULES`, in that order; the backbone first."""

    @property
    def fingerprint(self) -> str:
        """Equal for two models only if they give equal costs; the same in every process."""

    def cost(self, length: np.ndarray, patches: np.ndarray, frames: np.ndarray) -> np.ndarray:
        """Cost of each piece.

        Args:
            length: ``int64[n]``, tokens.
            patches: ``int64[n]``, rows for the image encoder.
            frames: ``int64[n]``, rows for the audio encoder.

        Returns:
            ``int64[modules, n]``, not negative.
        """


def fingerprint_of(name: str, values: object) -> str:
    """A digest of a built-in model.

    Args:
        name: its class.
        values: JSON-serialisable, or holding frozen dataclasses: all that its costs depend on.
    """
    text = json.dumps([_FORMULAS, name, values], sort_keys=True, default=dataclasses.asdict)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
