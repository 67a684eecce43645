"""Metadata of all sources for one stream, from the actors that read them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from omniload.errors import LoaderStopped
from omniload.pieces import Cursor, SampleChunk, by_source
from omniload.planner.reader import is_unreachable
from omniload.runtime.feed import SourceFeed
from omniload.runtime.ray.fleet import Fleet
from omniload.runtime.ray.job import Job
from omniload.runtime.ray.layout import Layout
from omniload.runtime.ray.loaders import remote_loaders
from storage.background import BackgroundPool

READERS = 16
"""Reads that wait for loaders at once."""


class Holders:
    """Which loaders have the pieces of steps at hand: looked up once for a step, whoever asks for it.

    Args:
        feeds: of the sources, by their numbers.
    """

    def __init__(self, feeds: Sequence[SourceFeed]) -> None:
        self._feeds = feeds
        self._of_steps: dict[int, np.ndarray] = {}

    def of(self, step: int, pieces: np.ndarray) -> np.ndarray:
        """``uint8[n]``: which of the loaders of its source has each of ``PIECE[n]``, the pieces of a step."""
        if step not in self._of_steps:
            self._of_steps[step] = self._look_up(pieces)
        return self._of_steps[step]

    def release(self, before: int) -> None:
        """Steps before this one are not asked for any more."""
        self._of_steps = {step: found for step, found in self._of_steps.items() if step >= before}

    def clear(self) -> None:
        """Sources are shared among other loaders than before."""
        self._of_steps = {}

    def _look_up(self, pieces: np.ndarray) -> np.ndarray:
        found = np.zeros(len(pieces), np.uint8)
        for source, where in by_source(pieces):
            if self._feeds[source].is_shared:
                found[where] = self._feeds[source].holders(pieces.take(where))
        return found


class Feeds:
    """Metadata of all sources, from the actors that read them.

    Args:
        job: the job.
        fleet: those actors; hears what befalls them.
    """

    def __init__(self, job: Job, fleet: Fleet) -> None:
        self._names, self._fleet, layout = job.mixture.names, fleet, fleet.layout
        self._pool = BackgroundPool(READERS, name="omniload-read")
        chaos = job.settings.chaos
        self._feeds = [
            SourceFeed(
                name,
                job.mixture.sources[name],
                remote_loaders(job, layout, source),
                self._pool,
                timeout_s=job.settings.timeout_s,
                num_standbys=len(layout.shadows(source)),
                observer=fleet,
                chaos=chaos.source(name) if chaos else None,
            )
            for source, name in enumerate(job.mixture.names)
        ]
        self.holders = Holders(self._feeds)
        """Which of those actors have what is planned at hand."""
        self.stopped = False

    @property
    def stale_answers(self) -> int:
        """Answers refused because their lease had moved."""
        return sum(feed.stale_answers for feed in self._feeds)

    @property
    def waited_s(self) -> list[float]:
        """How long planning waited for each source."""
        return [feed.waited_s for feed in self._feeds]

    def read(self, source: int, cursor: Cursor) -> SampleChunk:
        """Metadata for the planner."""
        if self.stopped:
            raise LoaderStopped("the loader is closed")
        try:
            return self._feeds[source].read(cursor)
        except Exception as error:
            if is_unreachable(error):
                self._fleet.source_lost(self._names[source], error)
            raise

    def share(self, job: Job, layout: Layout) -> None:
        """Read from other actors from now on."""
        for source, feed in enumerate(self._feeds):
            feed.share(remote_loaders(job, layout, source), len(layout.shadows(source)))
        self.holders.clear()

    def stop(self) -> None:
        """Begin no further reads."""
        self.stopped = True
        for feed in self._feeds:
            feed.stop()
        self._pool.shutdown(wait=False, cancel_futures=True)
