"""The drop-in DataLoader on map-style datasets: torch's order, and a state that workers do not matter to."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler
from torch.utils.data import DataLoader as TorchLoader

from omniload import DataLoader
from omniload.errors import StateError
from tests.omniload.dropin import (
    SAMPLES,
    Counting,
    Erratic,
    IteratorSampler,
    Numbers,
    Reversed,
    StatefulSampler,
    Triples,
    as_saved,
    flat,
    ids,
    resumed,
    take,
)

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


def generator(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def weighted(**keywords: Any) -> WeightedRandomSampler:
    return WeightedRandomSampler([1.0 + i for i in range(SAMPLES)], 40, **keywords)


# Ways to say in which order; a function each, since samplers and generators have a state.
ORDERS: dict[str, Any] = {
    "as stored": lambda: {"batch_size": 4},
    "shuffled": lambda: {"batch_size": 4, "shuffle": True},
    "shuffled, drop_last": lambda: {"batch_size": 4, "shuffle": True, "drop_last": True},
    "generator": lambda: {"batch_size": 4, "shuffle": True, "generator": generator()},
    "one by one": lambda: {"batch_size": None, "shuffle": True},
    "replacement": lambda: {
        "batch_size": 7,
        "sampler": RandomSampler(range(SAMPLES), replacement=True, num_samples=90),
    },
    "subset": lambda: {
        "batch_size": 3,
        "sampler": SubsetRandomSampler(list(range(0, SAMPLES, 2)), generator=generator()),
    },
    "subset without generator": lambda: {
        "batch_size": 3,
        "sampler": SubsetRandomSampler(list(range(0, SAMPLES, 2))),
    },
    "weighted": lambda: {"batch_size": 4, "sampler": weighted(generator=generator())},
    "weighted without generator": lambda: {"batch_size": 4, "sampler": weighted()},
    "own sampler": lambda: {"batch_size": 4, "sampler": Reversed()},
    "stateful sampler": lambda: {"batch_size": 4, "sampler": StatefulSampler()},
    "stateful iterator": lambda: {"batch_size": 4, "sampler": IteratorSampler()},
    "own batch sampler": lambda: {"batch_sampler": Triples()},
    "torch's batch sampler": lambda: {
        "batch_sampler": BatchSampler(RandomSampler(range(SAMPLES)), 5, drop_last=False)
    },
}
# Of these, epochs after the first depend on the loader's seed where torch takes one from its global generator.
TORCH_ORDERS = [name for name in ORDERS if "without generator" not in name]


@pytest.mark.parametrize("name", TORCH_ORDERS)
def test_the_first_epoch_has_the_order_that_torch_gives(name: str) -> None:
    torch.manual_seed(3)
    expected = ids(TorchLoader(Numbers(), **ORDERS[name]()))
    torch.manual_seed(3)
    assert ids(DataLoader(Numbers(), **ORDERS[name]())) == expected
    assert len(DataLoader(Numbers(), **ORDERS[name]())) == len(expected)


def test_with_a_generator_every_epoch_has_the_order_that_torch_gives() -> None:
    loader = TorchLoader(Numbers(), 4, shuffle=True, generator=generator())
    ours = DataLoader(Numbers(), 4, shuffle=True, generator=generator())
    expected = [ids(loader) for _ in range(3)]
    assert [ids(ours) for _ in range(3)] == expected
    assert expected[0] != expected[1]


@pytest.mark.parametrize("name", ORDERS)
def test_a_state_taken_anywhere_goes_on_exactly_and_the_epochs_after_it_are_whole(name: str) -> None:
    def make() -> DataLoader[int]:
        torch.manual_seed(3)
        return DataLoader(Numbers(), **ORDERS[name]())

    loader = make()
    expected = [ids(loader) for _ in range(4)]
    assert len(expected[0]) == len(expected[3]) == len(loader)
    assert resumed(make, make().state_dict(), 4) == expected, "before the first iteration"
    for cut in range(len(loader) + 1):
        loader = make()
        got = take(loader, cut)
        rest = resumed(make, loader.state_dict(), 3)
        assert [got + rest[0], *rest[1:]] == expected[:3], f"after {cut} batches"
    assert rest[0] == [], "at the last batch, the iterator was not at its end yet"
    loader = make()
    ids(loader)
    assert resumed(make, loader.state_dict(), 3) == expected[1:], "at the exact end"
    ids(loader)
    got = take(loader, 2)
    rest = resumed(make, loader.state_dict(), 2)
    assert [got + rest[0], rest[1]] == expected[2:], "in the third epoch"


@pytest.mark.parametrize("name", ORDERS)
def test_a_run_that_is_resumed_after_every_batch_is_the_run(name: str) -> None:
    def make() -> DataLoader[int]:
        torch.manual_seed(3)
        return DataLoader(Numbers(), **ORDERS[name]())

    loader = make()
    expected = [ids(loader) for _ in range(3)]
    state = make().state_dict()
    epochs: list[list[Any]] = [[]]
    while len(epochs) <= 3:
        loader = make()
        loader.load_state_dict(as_saved(state))
        batch = take(loader, 1)
        state = loader.state_dict()
        epochs[-1] += batch
        if not batch:
            epochs.append([])
    assert epochs[:3] == expected


@pytest.mark.parametrize("saved_with", [0, 1, 2, 4])
def test_a_state_goes_on_with_any_number_of_workers(saved_with: int) -> None:
    def make(num_workers: int, persistent_workers: bool = False) -> DataLoader[int]:
        torch.manual_seed(3)
        return DataLoader(
            Numbers(), 4, shuffle=True, num_workers=num_workers, persistent_workers=persistent_workers
        )

    reference = make(0)
    expected = [ids(reference) for _ in range(3)]
    loader = make(saved_with, persistent_workers=saved_with == 2)
    assert ids(loader) == expected[0], "the order does not depend on the workers"
    got = take(loader, 3)
    state = loader.state_dict()
    for num_workers, persistent in ((0, False), (2, True)):
        rest = resumed(make, state, num_workers=num_workers, persistent_workers=persistent)
        assert [got + rest[0], rest[1]] == expected[1:]


def test_states_may_be_taken_as_often_as_wanted_and_refer_to_the_last_iterator() -> None:
    make = functools.partial(DataLoader, Numbers(), 4, shuffle=True, generator=generator())
    loader = make(generator=generator())
    first = iter(loader)
    begun = ids(next(first) for _ in range(2))
    early = loader.state_dict()
    begun += ids([next(first)])
    late = loader.state_dict()
    assert loader.state_dict() == late
    for state, taken in ((early, 2), (late, 3)):
        fresh = make(generator=generator())
        assert begun[:taken] + resumed(lambda: make(generator=generator()), state, 1)[0] == ids(fresh)
    again = iter(loader)
    assert loader.state_dict()["batches"] == 0
    list(first)
    assert loader.state_dict()["inside"], "the end of an iterator that was left does not count"
    next(again)
    assert loader.state_dict()["batches"] == 1


def test_a_loaded_state_is_the_state_until_it_is_gone_on_from() -> None:
    loader = DataLoader(Numbers(), 4, shuffle=True)
    take(loader, 2)
    state = loader.state_dict()
    other = DataLoader(Numbers(), 4, shuffle=True)
    other.load_state_dict(state)
    assert other.state_dict() == state
    iter(other)
    assert other.state_dict() == state


def test_resume_reads_no_sample_twice() -> None:
    dataset = Numbers()
    loader = DataLoader(dataset, 4, shuffle=True)
    take(loader, 4)
    rest = Numbers()
    other = DataLoader(rest, 4, shuffle=True)
    other.load_state_dict(loader.state_dict())
    ids(other)
    assert len(dataset.read) == 16
    assert sorted(dataset.read + rest.read) == list(range(SAMPLES))


def test_the_state_is_small() -> None:
    loader = DataLoader(Numbers(10**6), 256, shuffle=True)
    take(loader, 3)
    assert len(json.dumps(loader.state_dict())) < 500


@settings(max_examples=60)
@given(
    samples=st.integers(1, 50),
    batch_size=st.integers(1, 12),
    then=st.integers(1, 12),
    drop_last=st.booleans(),
    data=st.data(),
)
def test_another_batch_size_goes_on_at_the_same_sample(
    samples: int, batch_size: int, then: int, drop_last: bool, data: st.DataObject
) -> None:
    def make(batch_size: int, drop_last: bool = False) -> DataLoader[int]:
        return DataLoader(
            Numbers(samples), batch_size, shuffle=True, drop_last=drop_last, generator=generator(1)
        )

    order = flat(ids(make(1)))
    loader = make(batch_size, drop_last)
    cut = data.draw(st.integers(0, len(loader)))
    got = flat(take(loader, cut))
    rest = flat(resumed(make, loader.state_dict(), 1, batch_size=then)[0])
    assert got + rest == order


@pytest.mark.parametrize(("num_workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_a_dataset_with_a_state_goes_on_with_it_in_each_worker(num_workers: int, persistent: bool) -> None:
    def make(num_workers: int = num_workers) -> DataLoader[int]:
        return DataLoader(
            Counting(), 4, num_workers=num_workers, persistent_workers=persistent and num_workers > 0
        )

    loader = make()
    expected = [ids(loader) for _ in range(3)]
    assert (expected[0] != expected[1]) == (persistent or not num_workers), "the count lives on"
    for cut in (1, 2, 3):
        loader = make()
        got = take(loader, cut)
        rest = resumed(make, loader.state_dict(), 3)
        assert [got + rest[0], *rest[1:]] == expected
    loader = make()
    ids(loader)
    assert resumed(make, loader.state_dict(), 2) == expected[1:]
    if num_workers:
        take(loader, 1)
        state = loader.state_dict()
        with pytest.raises(StateError, match="resume with num_workers=2"):
            make(0).load_state_dict(state)


def test_a_sampler_that_gives_another_order_is_refused_and_not_followed() -> None:
    loader = DataLoader(Numbers(), 4, sampler=Erratic())
    take(loader, 2)
    other = DataLoader(Numbers(), 4, sampler=Erratic())
    other.load_state_dict(loader.state_dict())
    with pytest.raises(StateError, match="Erratic does not give the indices it gave before") as raised:
        iter(other)
    assert "\n" not in str(raised.value)
    assert other.state_dict() == loader.state_dict(), "and nothing is lost"


class ByEpoch(Reversed):
    """Knows the epoch, as samplers of many frameworks do."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(SAMPLES, generator=generator(self.epoch)).tolist()


class Batched(BatchSampler):
    """A subclass, of which nothing is known."""


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_sampler_that_counts_epochs_is_put_in_the_one_of_the_state(wrapped: bool) -> None:
    def make() -> DataLoader[int]:
        if wrapped:
            return DataLoader(Numbers(), batch_sampler=Batched(ByEpoch(), 4, drop_last=False))
        return DataLoader(Numbers(), 4, sampler=ByEpoch())

    loader = make()
    loader.set_epoch(5)
    got = take(loader, 2)
    other = make()
    other.load_state_dict(as_saved(loader.state_dict()))
    other.set_epoch(0)
    whole = make()
    whole.set_epoch(5)
    assert got + ids(other) == ids(whole)


class Short(Reversed):
    """Shorter than it was."""

    def __iter__(self) -> Iterator[int]:
        yield 22


def test_a_sampler_that_ends_before_the_place_is_refused() -> None:
    loader = DataLoader(Numbers(), 4, sampler=Reversed())
    take(loader, 2)
    state = loader.state_dict()
    state["source"]["type"] = "Short"
    other = DataLoader(Numbers(), 4, sampler=Short())
    other.load_state_dict(state)
    with pytest.raises(StateError, match="Short does not give"):
        iter(other)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"shuffle": True, "dataset": Numbers(9)}, "the dataset has 9 samples, and had 23"),
        ({"shuffle": False}, r"sampler RandomSampler\(\), and this loader has SequentialSampler\(\)"),
        ({"shuffle": True, "dp_rank": 0, "dp_size": 1}, r"this loader has DistributedSampler\(seed=0"),
        ({"shuffle": True, "generator": generator()}, "from another generator .* which had none of its own"),
    ],
)
def test_a_state_of_other_data_or_another_order_is_refused(keywords: dict[str, Any], message: str) -> None:
    loader = DataLoader(Numbers(), 4, shuffle=True)
    take(loader, 2)
    other = DataLoader(keywords.pop("dataset", Numbers()), 4, **keywords)
    before = other.state_dict()
    with pytest.raises(StateError, match=message):
        other.load_state_dict(loader.state_dict())
    assert other.state_dict() == before


DAMAGE: list[dict[str, Any]] = [
    {"version": 2},
    {"style": "iterable"},
    {"epoch": -1},
    {"epoch": None},
    {"inside": 1},
    {"drawn": "8"},
    {"drawn": 1},
    {"batches": -2},
    {"last": [4]},
    {"last": [99, ""]},
    {"order": None},
    {"places": None},
    {"ranks": 2.5},
    {"seed": "x"},
    {"source": None},
    {"replicas": None},
]


@pytest.mark.parametrize("damage", DAMAGE, ids=str)
def test_a_damaged_state_is_refused_in_one_line(damage: dict[str, Any]) -> None:
    loader = DataLoader(Numbers(), 4, shuffle=True)
    take(loader, 2)
    state = as_saved(loader.state_dict())
    with pytest.raises(StateError) as raised:
        loader.load_state_dict({**state, **damage})
    assert "\n" not in str(raised.value)
    with pytest.raises(StateError):
        loader.load_state_dict({key: value for key, value in state.items() if key not in damage})
    assert loader.state_dict() == state


def test_a_damaged_generator_is_refused() -> None:
    loader = DataLoader(Numbers(), 4, shuffle=True, generator=generator())
    take(loader, 2)
    state = loader.state_dict()
    for text in ("", "AAAA", "€"):
        loader.load_state_dict({**state, "order": {"generator": text}})
        with pytest.raises(StateError, match="generator cannot be restored"):
            iter(loader)


@pytest.mark.parametrize("state", [{}, {"_num_yielded": 3}])
def test_a_state_of_something_else_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(StateError, match="version None"):
        DataLoader(Numbers()).load_state_dict(state)


def test_set_epoch_chooses_the_order_but_not_while_a_state_waits() -> None:
    def make() -> DataLoader[int]:
        torch.manual_seed(3)
        return DataLoader(Numbers(), 4, shuffle=True)

    loader = make()
    expected = [ids(loader) for _ in range(3)]
    loader = make()
    ids(loader)
    for epoch in (2, 1):
        loader.set_epoch(epoch)
        assert ids(loader) == expected[epoch]
    loader.set_epoch(1)
    got = take(loader, 2)
    other = make()
    other.load_state_dict(loader.state_dict())
    other.set_epoch(0)
    assert got + ids(other) == expected[1]
    other.set_epoch(0)
    assert ids(other) == expected[0]


def test_batches_in_no_order_have_no_state_inside_an_epoch() -> None:
    loader = DataLoader(Numbers(), 4, num_workers=2, in_order=False)
    assert sorted(flat(ids(loader))) == list(range(SAMPLES))
    between = loader.state_dict()
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(StateError, match="in_order=False"):
        loader.state_dict()
    loader.load_state_dict(between)
