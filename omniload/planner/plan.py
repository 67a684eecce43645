"""The plan of one step: which pieces, in which packs, in which lanes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the whole job trains on in one step. Independent of ranks, machines and timing."""

    step: int
    """Index of the step, from 0."""
    pieces: np.ndarray
    """``PIECE[n]``, by pack, in the order they lie in it."""
    offsets: np.ndarray
    """``int64[packs + 1]``: pack p holds ``pieces[offsets[p]:offsets[p + 1]]``."""
    lane_offsets: np.ndarray
    """``int64[lanes + 1]``: lane l, a microbatch slot, holds the packs ``lane_offsets[l]:lane_offsets[l + 1]``."""

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
        return digest.hexdigest()

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
