"""A pass over an iterable dataset: one place for each worker, and whose turn it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.data import DataLoader

from omniload.errors import StateError
from omniload.place import Place
from omniload.torch_loader.reading import IterableWork, Reading, WorkerPlace
from omniload.torch_loader.state import number
from omniload.torch_loader.work import Note


class IterablePass:
    """How far an epoch of an iterable dataset has come.

    Args:
        places: by worker, where each begins; None for a fresh dataset.
        next_worker: whose batch is next.
        batches: those that came before.
    """

    def __init__(
        self, places: Sequence[WorkerPlace | None], *, next_worker: int = 0, batches: int = 0
    ) -> None:
        self._places = list(places)
        self._next_worker = next_worker
        self._batches = batches

    def note(self, note: Note) -> None:
        """An item has arrived."""
        if note.place is not None:
            self._places[note.worker] = note.place
        self._next_worker = (note.worker + 1) % len(self._places)
        self._batches += note.is_batch

    def to_json(self) -> dict[str, Any]:
        """The place after the batches that have arrived."""
        return {
            "batches": self._batches,
            "places": list(self._places),
            "next_worker": self._next_worker,
        }

    def end_to_json(self, *, keeps: bool) -> dict[str, Any]:
        """The place at the end of the epoch, from which the next begins with the same datasets, or fresh ones."""
        return end_of_iterable(
            [{**place, "at": "begin"} if place and keeps else None for place in self._places]
        )


def end_of_iterable(places: Sequence[WorkerPlace | None]) -> dict[str, Any]:
    """The place between epochs."""
    return {"batches": 0, "places": list(places), "next_worker": 0}


def begin_iterable(
    loader: DataLoader[Any],
    reading: Reading,
    ranks: Place,
    snapshot_every: int,
    place: Mapping[str, Any] | None,
    kept: Sequence[WorkerPlace | None],
) -> tuple[IterableWork, IterablePass]:
    """Begin an epoch.

    Args:
        loader: has what makes batches of the dataset.
        reading: the dataset.
        ranks: the ranks that share the dataset by the rule of `IterableWork`.
        snapshot_every: batches of a worker from one state of the dataset to the next.
        place: where to go on; None for a whole epoch.
        kept: by worker, where the epoch before left a dataset that lives on.
    """
    restored = place or {"places": (), "next_worker": 0, "batches": 0}
    work = IterableWork(
        reading,
        loader.collate_fn,
        batch_size=loader.batch_size,
        drop_last=loader.drop_last,
        snapshot_every=snapshot_every,
        rank=ranks.dp_rank,
        num_ranks=ranks.dp_size,
        places=restored["places"],
        first_worker=restored["next_worker"],
    )
    progress = IterablePass(
        restored["places"] or kept, next_worker=restored["next_worker"], batches=restored["batches"]
    )
    return work, progress


def check_iterable(state: Mapping[str, Any], *, num_places: int) -> dict[str, Any]:
    """The place of a saved state, for this loader.

    Raises:
        StateError: it is of another number of workers, or damaged.
    """
    places = state["places"]
    if not all(place is None or _is_place(place) for place in places):
        raise StateError("the loader state is damaged: it does not say where each worker stands")
    if len(places) != num_places and any(place is not None for place in places):
        raise StateError(
            f"the state holds the places of {len(places)} workers in an iterable dataset, and this loader has"
            f" {num_places}: each of them has read a part of its own, so resume with num_workers={len(places)}"
        )
    next_worker = number(state, "next_worker")
    if next_worker >= len(places):
        raise StateError(f"the loader state is damaged: no worker {next_worker} among {len(places)}")
    return {**state, "places": places if len(places) == num_places else [None] * num_places}


def _is_place(place: Any) -> bool:
    match place:
        case {"dataset": _, "iterator": _, "samples": int(samples), "at": "inside" | "end" | "begin"}:
            return samples >= 0
    return False
