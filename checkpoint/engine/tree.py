"""Who passes messages on to whom: groups of neighbours first, then their leaders in a tree."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Tree:
    """A tree over ranks in which every subtree is a run of consecutive ranks that begins with its root.

    Ranks are numbered node by node, so groups of ``node_size`` neighbours share a node. Their first ranks lead
    them; of these, ``fan_out`` neighbours at a time have the first one as their leader, and so on up to rank 0.

    Attributes:
        world_size: Number of ranks.
        node_size: Ranks in a group of the lowest level, at least 2. A guess that is wrong for some nodes costs nothing.
        fan_out: Leaders in a group of every other level, at least 2.
    """

    world_size: int
    node_size: int = 8
    fan_out: int = 32

    def parent(self, rank: int) -> int:
        """Whom a rank reports to; rank 0 to nobody."""
        assert rank > 0, "rank 0 is the root"
        return next(rank - rank % span for span in self._spans(0) if rank % span)

    def children(self, rank: int) -> list[int]:
        """Who reports to a rank, in ascending order."""
        found: list[int] = []
        step = 1
        for span in self._spans(rank):
            found += range(rank + step, min(rank + span, self.world_size), step)
            step = span
        return found

    def end(self, rank: int) -> int:
        """One past the last rank of the subtree that begins with a rank."""
        return min(max([rank + 1, *(rank + span for span in self._spans(rank))]), self.world_size)

    def height(self, rank: int) -> int:
        """Number of levels at which others report to a rank: the most messages on any way up to it."""
        return sum(rank + below < self.world_size for below in [1, *self._spans(rank)][:-1])

    def _spans(self, rank: int) -> Iterator[int]:
        """Ranks under a leader at each level that a rank leads, from the lowest up to all ranks."""
        span, below = self.node_size, 1
        while rank % span == 0 and below < self.world_size:
            yield span
            span, below = span * self.fan_out, span
