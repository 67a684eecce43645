"""Chaos: everything that timing, memory and machine count may do to a run, on purpose and at random.

The stream must not notice. `DataLoader` takes a `Chaos` so that a test, ours or a user's, can hold its plan hashes
against those of a quiet run.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from omniload.pieces import Cursor, SampleChunk

if TYPE_CHECKING:
    from omniload.runtime.feed import ChunkReader


@dataclass(frozen=True, kw_only=True, slots=True)
class Chaos:
    """What to disturb, and how hard."""

    seed: int = 0
    """Seed of the disturbance; the stream does not depend on it."""
    max_delay_s: float = 0.002
    """Every read and every step is delayed by up to this."""
    max_loaders: int = 3
    """Each source is shared by 1 to this many loaders."""
    max_chunk_samples: int = 64
    """Each read asks for 1 to this many samples."""
    evict_probability: float = 0.1
    """Chance that a read is followed by dropping part of the prepared payload."""
    revoke_probability: float = 0.1
    """Chance that the lease of a window moves to another loader while the window is being read."""

    def source(self, name: str) -> SourceChaos:
        """The disturbance of one source."""
        return SourceChaos(self, name)


class SourceChaos:
    """Random decisions for one source. Not thread-safe: each source is read by one thread at a time."""

    def __init__(self, chaos: Chaos, name: str) -> None:
        self._chaos = chaos
        self._random = random.Random(f"{chaos.seed}/{name}")

    def num_loaders(self) -> int:
        """Loaders that share the source."""
        return self._random.randint(1, self._chaos.max_loaders)

    def chunk_samples(self) -> int:
        """Samples of the next read."""
        return self._random.randint(1, self._chaos.max_chunk_samples)

    def delay(self) -> None:
        """Sleep for a random while."""
        time.sleep(self._random.uniform(0, self._chaos.max_delay_s))

    def read(self, loader: ChunkReader, cursor: Cursor) -> SampleChunk:
        """A chunk from a cursor on: later, shorter, and at some cost to the payload kept."""
        self.delay()
        chunk = loader.read(cursor, self.chunk_samples())
        if self._random.random() < self._chaos.evict_probability:
            loader.evict(self._random.random())
        return chunk

    def revokes(self) -> bool:
        """Whether the lease being used moves now."""
        return self._random.random() < self._chaos.revoke_probability
