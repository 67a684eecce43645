"""Which of the loaders is asked for payload."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from omniload.runtime.feed import AVOID_S
from omniload.runtime.ray.layout import Layout


class Routes:
    """Which loaders to ask for payload, the most promising first.

    Any loader of a source can derive any of its payload; the one that read a window has it at hand.

    Args:
        layout: the loaders.
        num_sources: sources of the mixture.
    """

    def __init__(self, layout: Layout, num_sources: int) -> None:
        members = [(*layout.readers(source), *layout.shadows(source)) for source in range(num_sources)]
        # Sources that the same loaders read are asked for together.
        self._kinds = sorted(set(members))
        self._kind_of = np.array([self._kinds.index(one) for one in members])
        self._lost_at: dict[str, float] = {}

    def lost(self, names: Sequence[str]) -> None:
        """Loaders did not answer."""
        self._lost_at |= dict.fromkeys(names, time.monotonic())

    def of(self, pieces: np.ndarray, holders: np.ndarray) -> list[tuple[list[str], np.ndarray]]:
        """Names of loaders, and ``int64[n]`` which of the pieces to ask them for.

        Args:
            pieces: ``PIECE[p]``.
            holders: ``uint8[p]``: which loader of its source, the readers first, has each at hand.
        """
        kind = self._kind_of[pieces["source"]]
        found = []
        for one in np.unique(kind).tolist():
            members = self._kinds[one]
            for holder in range(len(members)):
                where = np.flatnonzero((kind == one) & (holders % len(members) == holder))
                if len(where):
                    names = [members[holder], *members[:holder], *members[holder + 1 :]]
                    found.append((sorted(names, key=self._is_lost), where))
        return found

    def _is_lost(self, name: str) -> bool:
        return self._lost_at.get(name, -AVOID_S) > time.monotonic() - AVOID_S
