"""A pass over a map-style dataset. The workers do not matter to it, unless the dataset has a state of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.data import DataLoader

from omniload.errors import StateError
from omniload.torch_loader.indices import IndexSource, Indices
from omniload.torch_loader.state import number
from omniload.torch_loader.work import MapWork, Note


class MapPass:
    """How far an epoch of a map-style dataset has come.

    Args:
        source: the sampler.
        dataset: the user's.
        order: what the sampler's order depends on, taken before it drew.
        tasks: the indices of the epoch.
        places: by worker, the state of the dataset, if it has one.
    """

    def __init__(
        self,
        source: IndexSource,
        dataset: Any,
        order: Mapping[str, Any],
        tasks: Indices,
        places: Sequence[Any],
    ) -> None:
        self.tasks = tasks
        self._source = source
        self._dataset = dataset
        self._order = dict(order)
        self._places = list(places)

    def note(self, note: Note) -> None:
        """An item has arrived."""
        if note.is_batch:
            self.tasks.deliver(note.number)
            self._places[note.worker] = note.place

    def to_json(self) -> dict[str, Any]:
        """The place after the batches that have arrived."""
        place = end_of_map(self._source, self._dataset, self._places)
        return {**place, "order": self._order, **self.tasks.to_json()}

    def end_to_json(self, *, keeps: bool) -> dict[str, Any]:
        """The place at the end of the epoch, from which the next begins with the same datasets, or fresh ones."""
        places = self._places if keeps else [None] * len(self._places)
        return end_of_map(self._source, self._dataset, places, **self.tasks.states())


def end_of_map(
    source: IndexSource, dataset: Any, places: Sequence[Any], *, sampler: Any = None, iterator: Any = None
) -> dict[str, Any]:
    """The place between epochs.

    Args:
        source: the sampler.
        dataset: the user's.
        places: by worker, the state of the dataset, if it has one.
        sampler: state of the sampler, if it has one.
        iterator: state of its iterator, if it has one.
    """
    return {
        "source": source.identity(),
        "order": source.order(),
        "length": length_of(dataset),
        "places": list(places),
        "batches": 0,
        "drawn": 0,
        "exhausted": False,
        "replicas": source.num_replicas,
        "last": None,
        "sampler": sampler,
        "iterator": iterator,
    }


def length_of(dataset: Any) -> int | None:
    """Samples of a dataset; None if it does not say."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def begin_map(
    loader: DataLoader[Any],
    source: IndexSource,
    seed: int | None,
    place: Mapping[str, Any] | None,
    kept: Sequence[Any],
) -> tuple[MapWork, MapPass]:
    """Begin an epoch.

    Args:
        loader: has the dataset, and what makes batches of it.
        source: its sampler.
        seed: of the epoch, if the sampler needs one.
        place: where to go on; None for a whole epoch.
        kept: by worker, where the epoch before left a dataset that lives on.
    """
    places: Sequence[Any] = () if place is None else place["places"]
    work = MapWork(loader.dataset, loader.collate_fn, batched=loader.batch_sampler is not None, places=places)
    if place is not None and place["inside"]:  # between epochs it was restored when the state was loaded
        if not loader.num_workers:
            work.restore(0)
        source.restore(place["order"])
    order = source.order()
    # Each worker's dataset goes on where it was, so the turns of those before it are passed.
    keeps_place = any(one is not None for one in places)
    turns = place["batches"] % loader.num_workers if place and keeps_place and loader.num_workers else 0
    tasks = Indices(source, seed, place, turns=turns)
    return work, MapPass(source, loader.dataset, order, tasks, places or kept)


def check_map(
    state: Mapping[str, Any], source: IndexSource, *, length: int | None, num_places: int
) -> dict[str, Any]:
    """The place of a saved state, for this loader.

    Args:
        state: as `MapPass` gave it.
        source: this loader's sampler.
        length: samples of the dataset; None if it does not say.
        num_places: processes that fetch for this rank.

    Raises:
        StateError: it is of another sampler or dataset, or falls between the ranks.
    """
    place = dict(state)
    was, now = place.get("source"), source.identity()
    if was != now:
        raise StateError(
            f"the state was saved with the sampler {_shown(was)}, and this loader has {_shown(now)}: resume with the"
            " same sampler and the same arguments of it"
        )
    if place.get("length") != length:
        raise StateError(
            f"the dataset has {length} samples, and had {place.get('length')} when the state was saved; resume with the"
            " dataset it was saved with"
        )
    places = place["places"]
    if len(places) != num_places:
        if any(one is not None for one in places):
            raise StateError(
                f"the dataset keeps a state in each of {len(places)} workers, and this loader has {num_places}: resume"
                f" with num_workers={len(places)}"
            )
        place["places"] = [None] * num_places
    drawn, replicas = number(place, "drawn"), number(place, "replicas")
    _check_order(place, source, drawn)
    if replicas != source.num_replicas:
        drawn = source.shared(drawn, length)
    if drawn % source.num_replicas:
        raise StateError(
            f"the state was saved by {replicas} ranks after {drawn} samples over all of them, which"
            f" {source.num_replicas} ranks cannot share evenly: resume with {replicas} ranks, or save after a multiple"
            f" of {source.num_replicas} samples"
        )
    place["drawn"] = drawn // source.num_replicas
    return place


def _check_order(place: Mapping[str, Any], source: IndexSource, drawn: int) -> None:
    order = place.get("order")
    complete = {"sampler", "iterator"} <= place.keys() and isinstance(place.get("exhausted"), bool)
    if not complete or not isinstance(order, dict) or not _is_last(place.get("last", ""), drawn):
        raise StateError("the loader state is damaged: it does not say how the indices were drawn")
    if order.keys() != source.order().keys() or (place["seed"] is not None) != source.needs_seed:
        had = "one" if "generator" in order else "none"
        raise StateError(
            f"the sampler draws from another generator than when the state was saved, which had {had} of its own;"
            " give the loader, or the sampler, the same"
        )


def _is_last(last: Any, drawn: int) -> bool:
    match last:
        case None:
            return True
        case [int(count), str()]:
            return 0 <= count <= drawn
    return False


def _shown(identity: Any) -> str:
    if not isinstance(identity, Mapping):
        return repr(identity)
    arguments = ", ".join(f"{key}={value!r}" for key, value in identity.items() if key != "type")
    return f"{identity.get('type')}({arguments})"
