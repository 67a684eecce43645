"""What runs where the data is fetched, in worker processes or in the training process: finished batches, with notes.

An item is ``[batch, Note]``. A list, because torch's pinning goes into lists and leaves the note alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch.utils.data import Dataset, get_worker_info

from omniload.torch_loader.state import state_of

Item: TypeAlias = list[Any]
"""``[batch, Note]``."""
Task: TypeAlias = tuple[int, Any] | None
"""Number of a batch and its indices (one index without batching); None passes a worker's turn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """Comes with every item, in the order of the batches."""

    worker: int
    """Who fetched it."""
    is_batch: bool = True
    """Whether there is a batch; False for a turn that was passed, and at the end of a worker's part."""
    number: int = 0
    """Number of the batch in the epoch; of map-style datasets only."""
    place: Any = None
    """Where the item leaves the worker's dataset; None if that says nothing, or was not asked for."""


class StartWorker:
    """Called first in a worker process.

    Args:
        user_fn: the user's ``worker_init_fn``.
    """

    def __init__(self, user_fn: Callable[[int], None] | None) -> None:
        self._user_fn = user_fn

    def __call__(self, worker: int) -> None:
        """Show the user's function the user's dataset, then restore what the dataset keeps for itself."""
        info = get_worker_info()
        assert info is not None, "called in a worker"
        work: Any = info.dataset
        # The information is read-only to users; to them the dataset is theirs and not our view of it.
        object.__setattr__(info, "dataset", work.dataset)
        if self._user_fn is not None:
            self._user_fn(worker)
        work.restore(worker)


class MapWork(Dataset[Item]):
    """A map-style dataset whose keys are tasks and whose values are batches.

    Args:
        dataset: the user's.
        collate_fn: makes a batch of samples, or of one sample converts it.
        batched: whether a task has a list of indices.
        places: by worker, the state to put the dataset in first, if there is one.
    """

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[Any], Any],
        *,
        batched: bool,
        places: Sequence[Any] = (),
    ) -> None:
        self.dataset = dataset
        self._collate_fn = collate_fn
        self._batched = batched
        self._places = places

    def restore(self, worker: int) -> None:
        """Put the dataset in the state it had in this worker."""
        if worker < len(self._places) and self._places[worker] is not None:
            self.dataset.load_state_dict(self._places[worker])

    def __getitem__(self, task: Task) -> Item:
        info = get_worker_info()
        worker = 0 if info is None else info.id
        if task is None:
            return [None, Note(worker=worker, is_batch=False)]
        number, index = task
        samples = self._fetch(index) if self._batched else self.dataset[index]
        batch = self._collate_fn(samples)
        return [batch, Note(worker=worker, number=number, place=state_of(self.dataset))]

    def _fetch(self, indices: Any) -> Any:
        together = getattr(self.dataset, "__getitems__", None)
        return together(indices) if together else [self.dataset[index] for index in indices]


def as_it_is(item: Item) -> Item:
    """The ``collate_fn`` for batches that are finished."""
    return item
