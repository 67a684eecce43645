"""An iterable dataset that is read in one process: batches, and the place in the dataset after each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from torch.utils.data import IterableDataset, get_worker_info

from omniload.errors import StateError
from omniload.torch_loader.state import is_stateful, state_of
from omniload.torch_loader.work import Item, Note

WorkerPlace: TypeAlias = Mapping[str, Any]
"""Where one worker stands in an iterable dataset: ``dataset`` and ``iterator``, their states or None; ``samples`` taken
since; ``at``, whether that is ``inside`` its part of an epoch, at its ``end``, or there and to ``begin`` the next."""

_END = object()


class Reading:
    """A dataset as one process reads it, epoch after epoch.

    Args:
        dataset: the user's.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._iterator: Any = None
        self._given: tuple[Any] | None = None  # the dataset's state before it was iterated first
        self._settled = False
        self._restored = False
        self._after_first: Any = None  # its state after the first sample that it gave then

    def __getstate__(self) -> dict[str, Any]:
        """Without the iterator, which may be a generator."""
        return {**self.__dict__, "_iterator": None}

    def begin(self) -> Iterator[Any]:
        """The samples of a whole epoch."""
        self._note_given()
        samples: Iterator[Any] = iter(self.dataset)
        self._iterator = samples
        if not self._restored:
            return samples
        self._restored = False
        first = next(samples, _END)
        if first is not _END and not _same(state_of(self.dataset), self._after_first):
            return itertools.chain([first], samples)
        # It begins again where it was restored to, as some datasets do every time they are iterated.
        assert self._given is not None, "noted before it was restored"
        self.dataset.load_state_dict(self._given[0])
        self._iterator = samples = iter(self.dataset)
        return samples

    def settle(self, place: WorkerPlace | None) -> None:
        """Put the dataset where it stood between epochs, before `restore`, so that users may change it until then.

        Raises:
            StateError: it has no state any more.
        """
        self._settled = False
        if place is not None and place["dataset"] is not None:
            self._note_given()
            _load(self.dataset, place["dataset"])
            self._settled = True

    def restore(self, place: WorkerPlace) -> Iterator[Any]:
        """The samples that are left of the epoch at a place, or those of the next one.

        Raises:
            StateError: the dataset has no state any more, or fewer samples.
        """
        self._note_given()
        has_state = place["dataset"] is not None or place["iterator"] is not None
        if place["dataset"] is not None:
            self._restored = True
            if not self._settled:
                _load(self.dataset, place["dataset"])
        self._settled = False
        samples: Iterator[Any] = iter(self.dataset)
        self._iterator = samples
        if place["iterator"] is not None:
            _load(self._iterator, place["iterator"])
        if has_state:
            first = next(samples, _END)
            self._after_first = state_of(self.dataset)
            samples = iter(()) if first is _END else itertools.chain([first], samples)
            if place["at"] != "inside" and first is not _END:
                return self._begun_anew(place, samples)
        if place["at"] != "inside":
            return self.begin() if place["at"] == "begin" else iter(())
        again = sum(1 for _ in itertools.islice(samples, place["samples"]))
        if again < place["samples"]:
            raise StateError(
                f"the dataset gave {place['samples']} samples before the state was saved, and only {again} now; resume"
                " with the dataset it was saved with"
            )
        return samples

    def _note_given(self) -> None:
        if self._given is None:
            try:
                self._given = (state_of(self.dataset),)
            except Exception:  # of what the first iteration is going to set
                self._given = (None,)

    def _begun_anew(self, place: WorkerPlace, samples: Iterator[Any]) -> Iterator[Any]:
        """As `restore`, for a dataset whose state at the end of an epoch was already that of the next."""
        self._restored = False
        if place["at"] == "begin":
            return samples
        if place["dataset"] is not None:
            self.dataset.load_state_dict(place["dataset"])
        return iter(())

    def states(self) -> dict[str, Any]:
        """The states of the dataset and of its iterator; of one that is both, the iterator's, as torchdata has it."""
        both = self._iterator is self.dataset
        return {
            "dataset": None if both else state_of(self.dataset),
            "iterator": state_of(self._iterator),
        }


class IterableWork(IterableDataset[Item]):
    """An iterable dataset that yields batches.

    Args:
        reading: the user's dataset.
        collate_fn: makes a batch of samples, or of one sample converts it.
        batch_size: samples in a batch; None to convert each by itself.
        drop_last: whether to leave out a last batch that is not full.
        snapshot_every: batches from one state of the dataset to the next.
        rank: which of every ``num_ranks`` samples is this rank's.
        num_ranks: ranks that share the dataset by this rule; 1 if they do not, or do so in the dataset.
        places: by worker, where the first iteration goes on; empty to start afresh.
        first_worker: the worker whose turn it is first in the first iteration.
    """

    def __init__(
        self,
        reading: Reading,
        collate_fn: Callable[[Any], Any],
        *,
        batch_size: int | None,
        drop_last: bool,
        snapshot_every: int,
        rank: int,
        num_ranks: int,
        places: Sequence[WorkerPlace | None] = (),
        first_worker: int = 0,
    ) -> None:
        self.reading = reading
        self.collate_fn = collate_fn
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.snapshot_every = snapshot_every
        self.rank = rank
        self.num_ranks = num_ranks
        self._places = places
        self._first_worker = first_worker

    @property
    def dataset(self) -> Any:
        """The user's dataset."""
        return self.reading.dataset

    def restore(self, worker: int) -> None:
        """Nothing: a place is restored together with the iterator, by the first iteration."""

    def __iter__(self) -> Iterator[Item]:
        info = get_worker_info()
        worker = 0 if info is None else info.id
        place = self._places[worker] if self._places else None
        passes = worker < self._first_worker
        self._places, self._first_worker = (), 0  # what lives on has full epochs from then on
        return _Batches(self, worker, place, passes_turn=passes)


class _Batches(Iterator[Item]):
    """One epoch of one worker. A class and no generator, so that an error does not end it."""

    def __init__(
        self,
        work: IterableWork,
        worker: int,
        place: WorkerPlace | None,
        *,
        passes_turn: bool,
    ) -> None:
        self._work = work
        self._reading = reading = work.reading
        self._worker = worker
        self._passes_turn = passes_turn
        self._since: dict[str, Any] = {"dataset": None, "iterator": None}
        self._taken = 0  # samples since that state; of the stream, so those of the other ranks count
        self._end: WorkerPlace | None = None  # where it stands already, if it has nothing more to give
        if place is None:
            samples = reading.begin()
        else:
            samples = reading.restore(place)
            if place["at"] == "end":
                self._end = place
            if place["at"] == "inside":
                self._since = {"dataset": place["dataset"], "iterator": place["iterator"]}
                self._taken = place["samples"]
        self._samples = samples if work.num_ranks == 1 else _every(samples, work.rank, work.num_ranks)
        self._batches = 0
        self._exhausted = False
        self._ended = False

    def __next__(self) -> Item:
        if self._passes_turn:
            self._passes_turn = False
            return [None, Note(worker=self._worker, is_batch=False)]
        if self._ended:
            raise StopIteration
        samples = self._take()
        if samples is _END:
            self._ended = True
            end = self._end or {**self._reading.states(), "samples": 0, "at": "end"}
            return [None, Note(worker=self._worker, is_batch=False, place=end)]
        batch = self._work.collate_fn(samples)
        self._batches += 1
        if self._exhausted or self._batches % self._work.snapshot_every == 0:
            states = self._reading.states()
            if states["dataset"] is not None or states["iterator"] is not None:
                self._since, self._taken = states, 0
        at = "end" if self._exhausted else "inside"
        place = {**self._since, "samples": self._taken, "at": at}
        return [batch, Note(worker=self._worker, place=place)]

    def _take(self) -> Any:
        """The samples of the next batch, or the next sample."""
        if self._exhausted:
            return _END
        work = self._work
        if work.batch_size is None:
            sample = next(self._samples, _END)
            self._exhausted = sample is _END
            self._taken += work.num_ranks
            return sample
        samples = list(itertools.islice(self._samples, work.batch_size))
        self._exhausted = len(samples) < work.batch_size
        self._taken += len(samples) * work.num_ranks
        return _END if not samples or (self._exhausted and work.drop_last) else samples


def _every(samples: Iterator[Any], rank: int, num_ranks: int) -> Iterator[Any]:
    """One of every ``num_ranks`` samples; a last group that is not full is left out, so that all ranks end together."""
    while len(group := list(itertools.islice(samples, num_ranks))) == num_ranks:
        yield group[rank]


def _load(thing: object, state: Any) -> None:
    if not is_stateful(thing):
        raise StateError(
            f"the state holds a place in the dataset, but {type(thing).__name__} has no state_dict and load_state_dict"
            " any more; resume with the dataset it was saved with"
        )
    thing.load_state_dict(state)


def _same(state: Any, other: Any) -> bool:
    try:
        return bool(state == other)
    except (RuntimeError, ValueError):  # tensors and arrays do not compare to one truth
        return False
