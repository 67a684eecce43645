"""Costs in time, by measured coefficients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Self

import numpy as np

from omniload.errors import PlanError
from omniload.planner.costs.exact import weighted_sum
from omniload.planner.costs.protocol import MODULES, fingerprint_of
from omniload.planner.costs.sizes import check_sizes
from omniload.suggest import suggest

_ZEPTOSECONDS = 10**9
"""In a picosecond."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibratedCost:
    """Time of a piece in picoseconds, from coefficients in zeptoseconds (10⁻²¹ s), which `TimeFit` finds.

    Coefficients are integers so that a plan made with them is the same everywhere; where they come from is no longer
    asked. They change in a run only by a logged decision, from a stated step on.
    """

    name: ClassVar[str] = "calibrated"
    modules: ClassVar[tuple[str, ...]] = MODULES
    tokens: int = 0
    """Of a token."""
    tokens_squared: int = 0
    """Of a pair of tokens of one piece."""
    patches: int = 0
    """Of a patch."""
    patches_squared: int = 0
    """Of a pair of patches of one piece."""
    frames: int = 0
    """Of a frame."""
    frames_squared: int = 0
    """Of a pair of frames of one piece."""
    documents: int = 0
    """Of a piece."""
    lanes: int = 0
    """Of a lane, whatever is in it: part of a predicted time, of no piece's cost."""

    def __post_init__(self) -> None:
        """Check the coefficients.

        Raises:
            PlanError: one is no integer, or negative.
        """
        check_sizes(self, "coefficients")

    @classmethod
    def from_mapping(cls, coefficients: Mapping[str, Any]) -> Self:
        """From the coefficients of a decision; those it does not name are 0.

        Raises:
            PlanError: one is unknown, no integer, or negative.
        """
        unknown = [str(name) for name in coefficients if name not in FEATURES]
        if unknown:
            raise PlanError(f"coefficients: unknown '{unknown[0]}'{suggest(unknown[0], FEATURES)}")
        return cls(**coefficients)

    def to_json(self) -> dict[str, int]:
        """JSON-serialisable form: the coefficients by name."""
        return asdict(self)

    @property
    def fingerprint(self) -> str:
        """Equal for models of equal costs."""
        return fingerprint_of("CalibratedCost", self)

    def cost(self, length: np.ndarray, patches: np.ndarray, frames: np.ndarray) -> np.ndarray:
        """``int64[3, n]`` in picoseconds, rounded up from the exact sum; exact for pieces below 2³¹ of anything.

        What a document costs whatever its length counts for the backbone. An encoder without coefficients costs 0.

        Raises:
            PlanError: a piece costs more than 64 bits hold.
        """
        length, patches, frames = (unit.astype(np.int64, copy=False) for unit in (length, patches, frames))
        backbone = weighted_sum(
            (self.tokens, self.tokens_squared, self.documents),
            (length, length * length, np.ones_like(length)),
            _ZEPTOSECONDS,
            self.name,
        )
        image = weighted_sum(
            (self.patches, self.patches_squared), (patches, patches * patches), _ZEPTOSECONDS, self.name
        )
        audio = weighted_sum(
            (self.frames, self.frames_squared), (frames, frames * frames), _ZEPTOSECONDS, self.name
        )
        return np.stack([backbone, image, audio])


FEATURES = tuple(field.name for field in fields(CalibratedCost))
"""What a time is explained by, in order."""
