"""What of a lane a rank needs, by its pipeline stage."""

from __future__ import annotations

from enum import Flag, auto

_TARGETS = frozenset(("targets", "labels"))
_LAYOUT = frozenset(
    (
        "cu_seqlens",
        "max_seqlen",
        "position_ids",
        "segment_ids",
        "num_target_tokens",
        "step",
        "lane",
        "is_last_in_step",
    )
)


class Needs(Flag):
    """Parts of a lane. Every stage of a pipeline needs the layout; what else, depends on which stages it holds."""

    LAYOUT = auto()
    """Where documents begin and end, the positions of their tokens, and which lane of which step it is."""
    INPUTS = auto()
    """``input_ids``, and what the samples bring along for the encoders, like ``pixel_values``: the first stage."""
    TARGETS = auto()
    """``targets`` or ``labels``: the last stage."""

    @classmethod
    def of_stage(cls, stage: int, num_stages: int) -> Needs:
        """What pipeline rank ``stage`` of ``num_stages`` needs.

        Holds where the first and the last stage of the model are on the first and the last rank: in every schedule
        but those shaped like a V, where the first rank has both and needs all.
        """
        needs = cls.LAYOUT
        if stage == 0:
            needs |= cls.INPUTS
        if stage == num_stages - 1:
            needs |= cls.TARGETS
        return needs

    def holds(self, key: str) -> bool:
        """Whether an entry of a lane is among these parts. What is not known by name comes with the inputs."""
        if key in _LAYOUT:
            return Needs.LAYOUT in self
        return (Needs.TARGETS if key in _TARGETS else Needs.INPUTS) in self
