"""One pass over a dataset: what torch's loader iterates, and how far the training loop has come in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from omniload.torch_loader.work import Note


class Pass(Protocol):
    """How far an epoch has come.

    Why: batches are fetched ahead, and what is saved is where the training loop is. Implementations: `MapPass`,
    `IterablePass`. Left out: fetching, and what the two have in common, which the loader keeps.
    """

    def note(self, note: Note) -> None:
        """Take notice of an item, in the order they arrive in."""

    def to_json(self) -> dict[str, Any]:
        """The place after the batches that have arrived."""

    def end_to_json(self, *, keeps: bool) -> dict[str, Any]:
        """The place at the end of the epoch, from which the next begins.

        Args:
            keeps: whether the datasets of the workers live on after the epoch.
        """


class Epoch(Iterator[Any]):
    """What ``iter(loader)`` gives: the batches of one epoch, or of what is left of it.

    Args:
        items: of torch's loader.
        progress: told about each.
        on_end: called when there are no more.
        length: of the loader, for ``len``.
    """

    def __init__(
        self,
        items: Iterator[Any],
        progress: Pass,
        on_end: Callable[[], None],
        length: Callable[[], int],
    ) -> None:
        self._items = items
        self._progress = progress
        self._on_end = on_end
        self._length = length

    def __next__(self) -> Any:
        while True:
            try:
                batch, note = next(self._items)
            except StopIteration:
                self._on_end()
                raise
            self._progress.note(note)
            if note.is_batch:
                return batch

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return self._length()


class Relay:
    """The sampler of an engine that lives on: gives it the tasks of each epoch in turn."""

    def __init__(self) -> None:
        self.tasks: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.tasks
