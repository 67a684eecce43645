"""The plan of one step: which pieces, in which packs, in which lanes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import astuple, dataclass, field
from functools import cached_property

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """How the work of one module is to be divided over the ranks of whatever mesh there is."""

    axis: str = "dp"
    """Axis over which it is distributed: ``dp``, ``world``, or one of the mesh."""
    group_size: int = 1
    """Neighbouring ranks on it that share one part."""
    broadcast: tuple[str, ...] = ()
    """Axes along which only the first rank fetches, and the others receive from it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """What the whole job trains on in one step. Independent of ranks, machines and timing.

    Plans are equal, and have equal Python hashes, if they have the same `hash`.
    """

    step: int
    """Index of the step, from 0."""
    pieces: np.ndarray
    """``PIECE[n]``, by pack, in the order they lie in it."""
    offsets: np.ndarray
    """``int64[packs + 1]``: pack p holds ``pieces[offsets[p]:offsets[p + 1]]``."""
    lane_offsets: np.ndarray
    """``int64[lanes + 1]``: lane l, a microbatch slot, holds the packs ``lane_offsets[l]:lane_offsets[l + 1]``."""
    lane_costs: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    """``int64[modules, lanes]``: what each lane costs the backbone, and then each encoder, by the cost model."""
    placement: tuple[tuple[str, Placement], ...] = ()
    """By module, where a strategy declared it; sorted by name."""

    @property
    def num_packs(self) -> int:
        """Packs of the step."""
        return len(self.offsets) - 1

    @property
    def num_lanes(self) -> int:
        """Lanes of the step."""
        return len(self.lane_offsets) - 1

    @cached_property
    def num_target_tokens(self) -> int:
        """Tokens of the step that count in the loss, over all lanes."""
        return int(self.pieces["targets"].sum(dtype=np.int64))

    @cached_property
    def hash(self) -> str:
        """Digest of everything above: equal plans, and only those, have equal hashes."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(np.array([self.step, self.num_lanes, self.num_packs], "<i8").tobytes())
        digest.update(self.lane_offsets.astype("<i8").tobytes())
        digest.update(self.offsets.astype("<i8").tobytes())
        digest.update(self.pieces.tobytes())
        digest.update(self.lane_costs.astype("<i8").tobytes())
        digest.update(repr([(name, *astuple(one)) for name, one in self.placement]).encode())
        return digest.hexdigest()

    def __eq__(self, other: object) -> bool:
        return self.hash == other.hash if isinstance(other, Plan) else NotImplemented

    def __hash__(self) -> int:
        return int(self.hash[:15], 16)

    @cached_property
    def encoded(self) -> bytes:
        """As `omniload.planner.plan_bytes` writes it; once, however many it is sent to or passed on to."""
        from omniload.planner.plan_bytes import plan_to_bytes  # which builds on this

        return plan_to_bytes(self)

    def __reduce__(self) -> tuple[Callable[[bytes], Plan], tuple[bytes]]:
        """Plans travel between processes in a third of the bytes."""
        from omniload.planner.plan_bytes import plan_from_bytes

        return plan_from_bytes, (self.encoded,)

    def packs_of(self, lane: int) -> range:
        """The packs of one lane, numbered in the step."""
        return range(int(self.lane_offsets[lane]), int(self.lane_offsets[lane + 1]))

    def lane_slice(self, lane: int) -> slice:
        """The pieces of one lane, as a slice of ``pieces``."""
        packs = self.packs_of(lane)
        return slice(int(self.offsets[packs.start]), int(self.offsets[packs.stop]))

    def pack_of_piece(self, lane: int) -> np.ndarray:
        """``int64[n]``: the pack, numbered in the step, of each piece of a lane."""
        packs = self.packs_of(lane)
        return np.repeat(
            np.arange(packs.start, packs.stop), np.diff(self.offsets[packs.start : packs.stop + 1])
        )
