"""The indices of a pass over a map-style dataset: where they come from, and the way back to a place among them.

The order is the sampler's. What it takes to have the same order again is saved when the pass begins:

==============================  ==========================================================================
sampler                         saved
==============================  ==========================================================================
with ``state_dict``             its state after each batch; it finds the place by itself
with a ``generator``            the generator's state before the sampler draws
whose ``generator`` is None     the loader's seed; each epoch has a generator of its own made from it
with ``epoch``, ``set_epoch``   the epoch; of torch's ``DistributedSampler`` also its arguments
any other                       nothing: it is iterated again, and must give the same indices
==============================  ==========================================================================

All but the first are iterated again up to the place, which reads no sample. The indices of the last batch before it
are compared with those that were saved, so that a sampler that draws another order is refused and not followed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from omniload.errors import StateError
from omniload.sources.order import key64
from omniload.torch_loader.state import is_stateful, number, pack_generator, state_of, unpack_generator
from omniload.torch_loader.work import Task

_END = object()
_DRAWING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_KNOW_NO_RANKS = (SequentialSampler, *_DRAWING)


class IndexSource:
    """The sampler of a loader.

    Args:
        sampler: the loader's.
        batch_sampler: the loader's, or None without batching.
    """

    def __init__(self, sampler: Any, batch_sampler: Any) -> None:
        plain = type(batch_sampler) is BatchSampler
        self.sampler = batch_sampler.sampler if plain else sampler if batch_sampler is None else batch_sampler
        """What is iterated: gives an index, or, if it makes the batches itself, a list of them."""
        self.batch_size: int | None = batch_sampler.batch_size if plain else None
        """Indices to put in a batch; None to take what the sampler gives."""
        self.drop_last = plain and batch_sampler.drop_last
        self.stateful = is_stateful(self.sampler)
        # A subclass that gives an order of its own may share it among ranks in a way of its own.
        plain_division = getattr(type(self.sampler), "__iter__", None) is DistributedSampler.__iter__
        self.distributed = plain_division and not self.stateful
        """Whether a place counts the indices of all ranks, so that it can be divided among another number."""
        self.num_replicas: int = self.sampler.num_replicas if self.distributed else 1
        self.fits_any_ranks = self.distributed or type(self.sampler) in _KNOW_NO_RANKS
        """Whether a place holds on another number of ranks."""
        self._drawing = None if self.stateful else _first(self.sampler, _draws)
        self._counting = None if self.stateful else _first(self.sampler, _counts_epochs)

    @property
    def needs_seed(self) -> bool:
        """Whether the sampler would draw from torch's global generator."""
        return self._drawing is not None and self._drawing.generator is None

    def identity(self) -> dict[str, Any]:
        """What must be the same for the same indices."""
        identity: dict[str, Any] = {"type": type(self.sampler).__name__}
        if self.distributed:
            sampler = self.sampler
            identity |= {"seed": sampler.seed, "shuffle": sampler.shuffle, "drop_last": sampler.drop_last}
        return identity

    def order(self) -> dict[str, Any]:
        """What the sampler's next order depends on, besides `identity`, the seed and its own state."""
        order: dict[str, Any] = {}
        if self._counting is not None:
            order["epoch"] = self._counting.epoch
        if self._drawing is not None and self._drawing.generator is not None:
            order["generator"] = pack_generator(self._drawing.generator)
        return order

    def restore(self, order: Mapping[str, Any], state: Any = None) -> None:
        """Inverse of `order`, for one of the same keys; of a sampler with a state of its own, that state."""
        if self._drawing is not None and self._drawing.generator is not None:
            unpack_generator(self._drawing.generator, order["generator"])
        if self._counting is not None:
            self._counting.set_epoch(number(order, "epoch"))
        if state is not None:
            self.sampler.load_state_dict(state)

    def shared(self, drawn: int, length: int | None) -> int:
        """What another number of ranks has drawn of a dataset, without what it gave twice to make its ranks even."""
        return int(self.sampler.total_size) if length is not None and drawn >= length else drawn

    @contextmanager
    def seeded(self, seed: int | None) -> Iterator[None]:
        """Let the sampler, if it has no generator, draw what comes first from one with this seed."""
        if seed is None or not self.needs_seed:
            yield
            return
        assert self._drawing is not None, "follows from needs_seed"
        self._drawing.generator = torch.Generator().manual_seed(seed)
        try:
            yield
        finally:
            self._drawing.generator = None


def _first(sampler: Any, is_it: Callable[[Any], bool]) -> Any | None:
    """The sampler, or the first that it wraps, of which something holds."""
    while sampler is not None and not is_it(sampler):
        sampler = getattr(sampler, "sampler", None)
    return sampler


def _draws(sampler: Any) -> bool:
    """Whether it draws with a ``generator`` of torch's, or would if it had one."""
    generator = getattr(sampler, "generator", None)
    return isinstance(generator, torch.Generator) or (generator is None and isinstance(sampler, _DRAWING))


def _counts_epochs(sampler: Any) -> bool:
    return hasattr(sampler, "set_epoch") and isinstance(getattr(sampler, "epoch", None), int)


def epoch_seed(seed: int, epoch: int) -> int:
    """Seed of an epoch's order; of the first one the loader's own, so that it is the order torch would give."""
    return seed if epoch == 0 else key64(seed, "epoch", epoch) >> 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """How far the indices have come with a batch."""

    batches: int = 0
    """Batches up to it."""
    items: int = 0
    """What the sampler gave up to it: indices, or whole batches if it makes them."""
    exhausted: bool = False
    """Whether the sampler had no more to give."""
    last: Sequence[Any] = ()
    """The batch's indices; as a list of one if the sampler made the batch."""
    sampler: Any = None
    """State of the sampler, if it has one."""
    iterator: Any = None
    """State of its iterator, if it has one."""


class Indices(Iterator[Task]):
    """The tasks of one epoch.

    Args:
        source: the sampler.
        seed: of the epoch, if the sampler needs one.
        place: where to go on, as `to_json` gave it, ``drawn`` being this rank's part; between epochs, the sampler is
            there already. None for a whole epoch.
        turns: tasks that pass a worker's turn, to put first.

    Raises:
        StateError: the sampler does not give what it gave up to the place.
    """

    def __init__(
        self, source: IndexSource, seed: int | None, place: Mapping[str, Any] | None = None, *, turns: int = 0
    ) -> None:
        self._source = source
        self._turns = turns
        self._pending: dict[int, Drawn] = {}  # by number, what is drawn and not delivered yet
        self._end: dict[str, Any] | None = (
            None  # the states, if there was nothing more to give from the beginning
        )
        self._iterator: Any
        with source.seeded(seed):
            self._delivered = self._go_to(place, draws=seed is not None)
        self._last = self._delivered

    def __next__(self) -> Task:
        if self._turns:
            self._turns -= 1
            return None
        source, before, exhausted = self._source, self._last, False
        if source.batch_size is None:
            index = next(self._items)
            last = [index]
        else:
            last = index = list(itertools.islice(self._items, source.batch_size))
            exhausted = len(last) < source.batch_size
            if not last or (source.drop_last and exhausted):
                raise StopIteration
        self._last = Drawn(
            batches=before.batches + 1,
            items=before.items + len(last),
            exhausted=exhausted,
            last=last,
            **self.states(),
        )
        self._pending[before.batches] = self._last
        return before.batches, index

    def deliver(self, batch: int) -> None:
        """Say that this batch has arrived, and that those before it will not any more."""
        for earlier in [one for one in self._pending if one < batch]:
            del self._pending[earlier]
        self._delivered = self._pending.pop(batch, self._delivered)  # one out of order was given up before

    def to_json(self) -> dict[str, Any]:
        """The place after the batches delivered; JSON-serialisable if the sampler's state is."""
        drawn = self._delivered
        return {
            "batches": drawn.batches,
            "drawn": drawn.items * self._source.num_replicas,
            "exhausted": drawn.exhausted,
            # Each rank has other indices, but the state is to be the same; and the order is known by seed and epoch.
            "last": None if self._source.distributed else [len(drawn.last), _digest(drawn.last)],
            "sampler": drawn.sampler,
            "iterator": drawn.iterator,
        }

    def states(self) -> dict[str, Any]:
        """States of the sampler and of its iterator now, which is ahead of what was delivered."""
        if self._end is not None:
            return self._end
        sampler, iterator = self._source.sampler, self._iterator
        return {
            "sampler": None if iterator is sampler else state_of(sampler),
            "iterator": state_of(iterator),
        }

    def _go_to(self, place: Mapping[str, Any] | None, *, draws: bool) -> Drawn:
        sampler = self._source.sampler
        state, iterator_state = (place["sampler"], place["iterator"]) if place is not None else (None, None)
        if state is not None and place is not None and place["inside"]:
            sampler.load_state_dict(state)
        self._iterator = iter(sampler)
        if iterator_state is not None:
            self._iterator.load_state_dict(iterator_state)
        self._items: Iterator[Any] = self._iterator
        if draws:
            # Samplers draw their order, or at least fetch their generator, at the first index: while the seed holds.
            self._items = itertools.chain(list(itertools.islice(self._items, 1)), self._items)
        if place is None:
            return Drawn(**self.states())
        last: list[Any] = []
        if state is None and iterator_state is None:
            last = self._skip(place["drawn"], place["last"])
        elif place["exhausted"] or not place["drawn"]:
            # At the end of an epoch a sampler has to say so once more before it begins anew, or has begun by itself.
            first = next(self._items, _END)
            if place["exhausted"]:
                self._items, self._end = iter(()), {"sampler": state, "iterator": iterator_state}
                if first is not _END and state is not None:
                    sampler.load_state_dict(state)
            elif first is _END:
                self._iterator = self._items = iter(sampler)
            else:
                self._items = itertools.chain([first], self._items)
        return Drawn(
            batches=place["batches"],
            items=place["drawn"],
            exhausted=place["exhausted"],
            last=last,
            **self.states(),
        )

    def _skip(self, count: int, last: Sequence[Any] | None) -> list[Any]:
        """Iterate past ``count`` items; the last of them, compared with number and digest of those saved."""
        num_last, digest = last if last is not None else (0, None)
        skipped = sum(1 for _ in itertools.islice(self._items, count - num_last))
        found = list(itertools.islice(self._items, num_last))
        if skipped + len(found) < count or (digest is not None and _digest(found) != digest):
            raise StateError(
                f"{type(self._source.sampler).__name__} does not give the indices it gave before the state was saved:"
                " it, or the data, has changed, or it draws without a seed; resume with the same ones, and give the"
                " sampler a generator or state_dict and load_state_dict"
            )
        return found


def _digest(indices: Sequence[Any]) -> str:
    return xxhash.xxh3_64_hexdigest(repr(list(indices)).encode())
