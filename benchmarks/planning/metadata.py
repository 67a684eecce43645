"""Sources without data: endless samples of given lengths, as the planner reads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from omniload.mixture import Mixture
from omniload.pieces import PIECE, Cursor, SampleChunk

_BLOCKS_PER_FILE = 16

Draw = Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray]]
"""``int64[n]`` tokens and ``int64[n]`` patches of n samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SyntheticMetadata:
    """Chunks of samples whose lengths are a pure function of seed, source and place."""

    draw: Draw
    """Lengths of samples."""
    seq_len: int
    """Longest sample: one of that length is a part of a longer document, so that all its tokens have a target."""
    seed: int = 0
    """Another gives other lengths."""
    chunk_samples: int = 4096
    """Samples of a chunk; each chunk is a window."""
    num_chunks: int = 1 << 30
    """Different chunks of a source, after which they come again: few keep the making of lengths out of measurements."""
    _made: dict[tuple[int, int], SampleChunk] = field(default_factory=dict, init=False)

    def read(self, source: int, cursor: Cursor) -> SampleChunk:
        """The chunk of the window that the cursor is in, from its position on."""
        number = cursor.window % self.num_chunks
        chunk = self._made.get((source, number))
        if chunk is None:
            chunk = self._made[source, number] = self._make(source, number)
        first = cursor.position + bool(cursor.sub)
        pieces = chunk.pieces[first:].copy()
        pieces["file"], pieces["block"] = divmod(cursor.window, _BLOCKS_PER_FILE)
        return SampleChunk(
            begin=cursor,
            end=Cursor(window=cursor.window + 1),
            ends_epoch=False,
            pieces=pieces,
            first_piece=chunk.first_piece[: len(chunk.tokens) + 1 - first],
            position=chunk.position[first:],
            sub=chunk.sub[first:],
            rows=chunk.rows[first:],
            failures=chunk.failures[first:],
            tokens=chunk.tokens[first:],
            truncated=chunk.truncated[first:],
            dropped=chunk.dropped[first:],
        )

    def _make(self, source: int, number: int) -> SampleChunk:
        count = self.chunk_samples
        tokens, patches = self.draw(np.random.default_rng([self.seed, source, number]), count)
        pieces = np.zeros(count, PIECE)
        pieces["row"] = np.arange(count)
        pieces["length"], pieces["targets"], pieces["patches"] = tokens, tokens, patches
        pieces["targets"] -= tokens < self.seq_len
        none = np.zeros(count, np.int64)
        return SampleChunk(
            begin=Cursor(),
            end=Cursor(),
            ends_epoch=False,
            pieces=pieces,
            first_piece=np.arange(count + 1),
            position=np.arange(count),
            sub=none,
            rows=np.append(np.ones(count, np.int64), 0),
            failures=np.zeros(count + 1, np.int64),
            tokens=tokens,
            truncated=none,
            dropped=none,
        )


def mixture(num_sources: int = 1, **keys: Any) -> Mixture:
    """A mixture of sources that are never opened, weights falling off as 1 / (1 + number)."""
    sources = {
        f"s{i:03}": {"path": "nowhere", "weight": 1 / (1 + i), "on_exhausted": "repeat"}
        for i in range(num_sources)
    }
    return Mixture.load({"sources": sources, **keys})
