"""When the number of actors that read a source changes."""

from __future__ import annotations

from dataclasses import dataclass

from omniload.errors import PlanError
from omniload.scaling.layout import UTILISATION


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingPolicy:
    """When the number of readers changes."""

    high: float = 0.9
    """Readers that would be busy for a larger part of their time get company."""
    low: float = 0.7
    """One reader goes, or several, if without it the others would be busy for a smaller part of theirs."""
    lag: float = 0.02
    """Part of the time that the trainer may wait for a source."""
    window: int = 8
    """Observations that averages are over; until there are so many, only the schedule changes anything."""
    cool_down_steps: int = 50
    """After a change of a source there is no other for so many steps, unless the schedule asks for more readers."""

    def __post_init__(self) -> None:
        """Raises PlanError if changes would follow from each other."""
        if not 0 < self.low < UTILISATION < self.high <= 1:
            raise PlanError(
                f"scaling: low {self.low} and high {self.high} must be above 0, at most 1, and on either side of"
                f" {UTILISATION}, the utilisation that is planned"
            )
        for name, least in (("window", 1), ("cool_down_steps", 0), ("lag", 0)):
            if getattr(self, name) < least:
                raise PlanError(f"scaling: {name} is {getattr(self, name)}; it is at least {least}")
