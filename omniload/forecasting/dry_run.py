"""The stream on metadata alone: the plans that a run would follow, without the payload of a single sample.

What it takes is what planning takes: the lengths of samples. Of pre-tokenised data these are stored; text is tokenised
for them, as in a run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

from omniload.forecasting.epoch_size import EpochSize
from omniload.loader import SourceLoader, open_loader
from omniload.mixture import Mixture
from omniload.pieces import Cursor, SampleChunk
from omniload.planner import Plan, Planner, StreamState
from omniload.runtime.feed import SourceFeed
from omniload.runtime.inline import MAX_READERS
from omniload.samples.tokenize import Tokenizer
from storage.background import BackgroundPool


class DryRun:
    """Plans of a mixture, one step after the other; equal to those of a run, by the same Planner.

    Args:
        mixture: the mixture; its quarantine file is not written.
        state: the stream to go on from; from its beginning by default.
        timeout_s: limit of every wait for a source.

    Raises:
        MixtureError, SourceError: as `omniload.loader.open_loader` says.
    """

    def __init__(
        self, mixture: Mixture, state: StreamState | None = None, *, timeout_s: float = 300.0
    ) -> None:
        tokenizer = Tokenizer.from_file(mixture.tokenizer) if mixture.tokenizer else None
        self.loaders: list[SourceLoader] = [
            open_loader(name, mixture, tokenizer=tokenizer, buffer_bytes=0) for name in mixture.names
        ]
        """One for each source, in the order of `Mixture.names`."""
        self.sizes = [EpochSize(loader.source, mixture) for loader in self.loaders]
        """How long a pass over each is."""
        self._pool = BackgroundPool(min(MAX_READERS, len(self.loaders)), name="omniload-dry")
        self._feeds = [
            SourceFeed(loader.name, mixture.sources[loader.name], [loader], self._pool, timeout_s=timeout_s)
            for loader in self.loaders
        ]
        self._planner = Planner(mixture, self, state or StreamState.initial(len(self.loaders)))

    @property
    def state(self) -> StreamState:
        """The stream after the last plan."""
        return self._planner.state

    def plans(self) -> Iterator[Plan]:
        """The plans from where it stands to the end of the stream.

        Raises:
            SourceError: a source cannot be read, gives nothing, or is over its budget of quarantined rows.
            LoaderTimeout: a source did not answer in time.
        """
        while (plan := self._planner.next()) is not None:
            yield plan

    def read(self, source: int, cursor: Cursor) -> SampleChunk:
        """Metadata for the planner."""
        chunk = self._feeds[source].read(cursor)
        self.sizes[source].note(chunk)
        return chunk

    def close(self) -> None:
        """Stop the threads and close the files."""
        self._pool.shutdown(cancel_futures=True)
        for loader in self.loaders:
            loader.close()

    def __enter__(self) -> Self:
        """The dry run itself; it is closed at the end of the block."""
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
