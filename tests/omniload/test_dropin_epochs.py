"""What users set at the beginning of an epoch holds for it, also after a resume from between epochs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler

from omniload import DataLoader
from tests.omniload.dropin import SAMPLES, Numbers, Reversed, StatefulSampler, Stream, as_saved, ids

EPOCHS = 3
Begin = Callable[[DataLoader[int], int], None]


def order(epoch: int) -> list[int]:
    return torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch)).tolist()


class ByEpoch(Reversed):
    """Another order in every epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from order(self.epoch)


class StatefulByEpoch(StatefulSampler):
    """Has a state, and is told the epoch nevertheless."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class BatchedByEpoch(BatchSampler):
    """Batches of another order in every epoch."""

    def __init__(self) -> None:
        super().__init__(ByEpoch(), 4, drop_last=False)

    @property
    def epoch(self) -> int:
        inner: Any = self.sampler
        return inner.epoch

    def set_epoch(self, epoch: int) -> None:
        inner: Any = self.sampler
        inner.set_epoch(epoch)


class EpochNumbers(Numbers):
    """Map-style, with another sample in every epoch, and the epoch in its state."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> int:
        return 100 * self.epoch + index

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch = state["epoch"]


class EpochStream(Stream):
    """Iterable, with another order in every epoch, no state, and no end of its own."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        mine = list(super().__iter__())
        yield from (order(self.epoch)[i] for i in mine)


class StatefulEpochStream(EpochStream):
    """With place and epoch in its state."""

    place = 0

    def __iter__(self) -> Iterator[int]:
        mine = list(super().__iter__())
        while self.place < len(mine):
            self.place += 1
            yield mine[self.place - 1]
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place, self.epoch = state["place"], state["epoch"]


def set_epoch_of_loader(loader: DataLoader[int], epoch: int) -> None:
    loader.set_epoch(epoch)


def set_epoch_of_sampler(loader: Any, epoch: int) -> None:
    one = loader.sampler if hasattr(loader.sampler, "set_epoch") else loader.batch_sampler
    one.set_epoch(epoch)


def set_epoch_of_dataset(loader: Any, epoch: int) -> None:
    loader.dataset.set_epoch(epoch)


def seed_generator(loader: Any, epoch: int) -> None:
    loader.generator.manual_seed(100 + epoch)


def nothing(loader: DataLoader[int], epoch: int) -> None:
    """Leave it to the loader."""


_FETCHED_IN_WORKERS = ("dataset", "stream", "stateful stream")
LOADERS: dict[str, Callable[..., DataLoader[int]]] = {
    "distributed": lambda: DataLoader(
        Numbers(), 4, sampler=DistributedSampler(Numbers(), num_replicas=2, rank=0)
    ),
    "ranks": lambda: DataLoader(Numbers(), 4, shuffle=True, dp_rank=0, dp_size=2),
    "sampler": lambda: DataLoader(Numbers(), 4, sampler=ByEpoch()),
    "stateful sampler": lambda: DataLoader(Numbers(), 4, sampler=StatefulByEpoch()),
    "batch sampler": lambda: DataLoader(Numbers(), batch_sampler=BatchedByEpoch()),
    "generator": lambda: DataLoader(Numbers(), 4, shuffle=True, generator=torch.Generator().manual_seed(7)),
    "dataset": lambda **more: DataLoader(EpochNumbers(), 4, **more),
    "stream": lambda **more: DataLoader(EpochStream(), 4, **more),
    "stateful stream": lambda **more: DataLoader(StatefulEpochStream(), 4, **more),
}


@pytest.mark.parametrize(
    ("name", "begin"),
    [
        *((name, set_epoch_of_loader) for name in LOADERS if name != "generator"),
        *((name, set_epoch_of_sampler) for name in LOADERS if "sampler" in name or name == "distributed"),
        *((name, set_epoch_of_dataset) for name in _FETCHED_IN_WORKERS),
        ("generator", seed_generator),
        *((name, nothing) for name in LOADERS),
    ],
)
def test_what_is_set_for_an_epoch_holds_after_a_resume_between_epochs(name: str, begin: Begin) -> None:
    check_resume_between_epochs(LOADERS[name], begin)


@pytest.mark.parametrize("name", _FETCHED_IN_WORKERS)
def test_what_is_set_for_an_epoch_of_a_dataset_in_workers_holds_after_a_resume(name: str) -> None:
    for begin in (set_epoch_of_loader, set_epoch_of_dataset, nothing):
        check_resume_between_epochs(functools.partial(LOADERS[name], num_workers=2), begin)


def check_resume_between_epochs(make: Callable[[], DataLoader[int]], begin: Begin) -> None:
    loader = make()
    expected, states = [], []
    for epoch in range(EPOCHS):
        begin(loader, epoch)
        expected.append(ids(loader))
        states.append(as_saved(loader.state_dict()))
    for done in range(1, EPOCHS):
        other = make()
        other.load_state_dict(states[done - 1])
        for epoch in range(done, EPOCHS):
            begin(other, epoch)
            assert ids(other) == expected[epoch]


def test_an_epoch_that_is_set_while_a_state_waits_between_epochs_is_in_the_state() -> None:
    def make() -> DataLoader[int]:
        return DataLoader(Numbers(), 4, sampler=ByEpoch())

    loader = make()
    ids(loader)
    other = make()
    other.load_state_dict(loader.state_dict())
    other.set_epoch(5)
    third = make()
    third.load_state_dict(as_saved(other.state_dict()))
    assert ids(third) == ids(other) == ids(DataLoader(order(5), 4))


def test_a_state_from_inside_an_epoch_wins_over_one_from_between_epochs_that_was_loaded_before() -> None:
    loader = LOADERS["stateful stream"]()
    between = loader.state_dict()
    ids(loader)
    after_one = loader.state_dict()
    epoch = iter(loader)
    next(epoch)
    inside = loader.state_dict()
    expected = ids(epoch)
    other = LOADERS["stateful stream"]()
    for state in (between, after_one, inside):
        other.load_state_dict(as_saved(state))
    assert ids(other) == expected
