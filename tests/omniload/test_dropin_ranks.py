"""The drop-in DataLoader on several ranks: who gets what, and a state that other numbers of ranks can go on from."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import DistributedSampler, SequentialSampler

from omniload import DataLoader
from omniload.errors import PlaceError, StateError
from tests.distributed import run_distributed
from tests.omniload.dropin import (
    IteratorStream,
    Numbers,
    Reversed,
    StatefulStream,
    Stream,
    Triples,
    as_saved,
    flat,
    ids,
    take,
)

SAMPLES = 48


def rank_loader(rank: int, ranks: int, batch_size: int = 2, **keywords: Any) -> DataLoader[int]:
    return DataLoader(Numbers(SAMPLES), batch_size, shuffle=True, dp_rank=rank, dp_size=ranks, **keywords)


def user_loader(rank: int, ranks: int, batch_size: int = 2) -> DataLoader[int]:
    dataset = Numbers(SAMPLES)
    sampler = DistributedSampler(dataset, num_replicas=ranks, rank=rank, seed=0)
    return DataLoader(dataset, batch_size, sampler=sampler)


def global_batches(loaders: list[Any], num_batches: int | None = None) -> list[set[int]]:
    """The samples of each step over all ranks."""
    per_rank = [ids(loader) if num_batches is None else take(loader, num_batches) for loader in loaders]
    assert len({len(batches) for batches in per_rank}) == 1, "all ranks end together"
    steps = [flat(list(step)) for step in zip(*per_rank, strict=True)]
    assert all(len(set(step)) == len(step) for step in steps), "no sample is on two ranks"
    return [set(step) for step in steps]


@pytest.mark.parametrize("make", [rank_loader, user_loader])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (4, 2), (2, 4), (2, 1), (2, 3)])
def test_the_same_global_batches_on_another_number_of_ranks(make: Any, before: int, after: int) -> None:
    expected = global_batches([make(0, 1, 12)])
    loaders = [make(rank, before, 12 // before) for rank in range(before)]
    got = global_batches(loaders, 1)
    states = [loader.state_dict() for loader in loaders]
    assert all(state == states[0] for state in states), "the state is the same on every rank"
    others = [make(rank, after, 12 // after) for rank in range(after)]
    for loader in others:
        loader.load_state_dict(as_saved(states[0]))
        loader.set_epoch(7)
    assert got + global_batches(others) == expected
    epoch = [set(flat(ids(loader))) for loader in others]
    assert set.union(*epoch) == set(range(SAMPLES)), "the next epoch is whole"
    assert sum(map(len, epoch)) == SAMPLES


@settings(max_examples=40, deadline=None)
@given(
    samples=st.integers(1, 40),
    before=st.integers(1, 4),
    after=st.integers(1, 4),
    batch_size=st.integers(1, 5),
    cut=st.integers(0, 6),
)
def test_no_sample_is_lost_or_given_twice_by_a_change_of_ranks(
    samples: int, before: int, after: int, batch_size: int, cut: int
) -> None:
    def make(rank: int, ranks: int) -> DataLoader[int]:
        return DataLoader(
            Numbers(samples), batch_size, shuffle=True, drop_last=False, dp_rank=rank, dp_size=ranks
        )

    loaders = [make(rank, before) for rank in range(before)]
    cut = min(cut, len(loaders[0]))
    got = [sample for loader in loaders for sample in flat(take(loader, cut))]
    state = loaders[0].state_dict()
    others = [make(rank, after) for rank in range(after)]
    if state["drawn"] < samples and state["drawn"] % after:
        for loader in others:
            with pytest.raises(StateError, match=rf"which {after} ranks cannot share evenly"):
                loader.load_state_dict(state)
        return
    for loader in others:
        loader.load_state_dict(state)
    rest = [sample for loader in others for sample in flat(ids(loader))]
    assert set(got + rest) == set(range(samples))
    # Only what makes the ranks even is given twice.
    assert len(got + rest) - samples < max(before, after)


def test_a_division_by_arguments_is_that_of_torchs_sampler() -> None:
    for rank in range(2):
        sampler = DistributedSampler(Numbers(), num_replicas=2, rank=rank, seed=0)
        torch_loader = TorchLoader(Numbers(), 4, sampler=sampler)
        loader = DataLoader(Numbers(), 4, shuffle=True, dp_rank=rank, dp_size=2)
        for epoch in range(3):
            sampler.set_epoch(epoch)
            assert ids(loader) == ids(torch_loader)


def test_a_place_between_two_ranks_is_refused_with_the_numbers() -> None:
    loader = rank_loader(0, 1, 3)
    take(loader, 3)
    other = rank_loader(0, 2, 3)
    with pytest.raises(StateError, match=r"saved by 1 ranks after 9 samples.*2 ranks cannot share") as raised:
        other.load_state_dict(loader.state_dict())
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("dataset", [Stream, StatefulStream, IteratorStream])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_ranks_that_divide_an_iterable_dataset_can_change_in_number(dataset: Any, num_workers: int) -> None:
    def make(rank: int, ranks: int) -> DataLoader[int]:
        return DataLoader(dataset(), 12 // ranks // 3, num_workers=num_workers, dp_rank=rank, dp_size=ranks)

    expected = global_batches([make(0, 1)])
    loaders = [make(rank, 2) for rank in range(2)]
    got = global_batches(loaders, 2)
    state = loaders[1].state_dict()
    assert state == loaders[0].state_dict()
    other = make(0, 1)
    other.load_state_dict(as_saved(state))
    assert got + global_batches([other]) == expected


@pytest.mark.parametrize(
    "keywords",
    [{"sampler": Reversed()}, {"batch_sampler": Triples()}, {"dataset": Stream()}],
    ids=["sampler", "batch sampler", "iterable"],
)
def test_ranks_that_the_loader_knows_nothing_of_must_stay_as_many(keywords: dict[str, Any]) -> None:
    dataset = keywords.pop("dataset", Numbers())
    loader = DataLoader(dataset, **keywords)
    take(loader, 2)
    state = {**loader.state_dict(), "ranks": 2}
    with pytest.raises(StateError, match=r"one of 2 ranks.*this job has 1: resume with 2 ranks"):
        loader.load_state_dict(state)
    same = DataLoader(Numbers(), sampler=SequentialSampler(Numbers()))
    take(same, 2)
    same.load_state_dict({**same.state_dict(), "ranks": 2})


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"dp_rank": 2, "dp_size": 2}, PlaceError, r"dp_rank: 2 is not in 0\.\.1"),
        ({"dp_rank": 0, "dp_size": 0}, PlaceError, "dp_size: 0"),
        ({"dp_rank": 0}, PlaceError, "go together"),
        ({"dp_rank": 0, "dp_size": 2, "sampler": Reversed()}, ValueError, "dp_size: given together"),
        ({"snapshot_every_n_steps": 0}, ValueError, "snapshot_every_n_steps: 0"),
    ],
)
def test_bad_arguments_are_one_clear_line(
    keywords: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as raised:
        DataLoader(Numbers(), **keywords)
    assert "\n" not in str(raised.value)


def _begin_in_a_job(rank: int, ranks: int) -> Any:
    """Three batches of a job whose ranks torch knows, and the state after them."""
    dataset = Numbers(SAMPLES)
    loader = DataLoader(dataset, 4, sampler=DistributedSampler(dataset))
    return take(loader, 3), loader.state_dict()


def test_a_state_of_a_real_job_goes_on_on_another_number_of_ranks() -> None:
    begun = run_distributed(_begin_in_a_job, 2)
    got = [sample for batches, _ in begun for sample in flat(batches)]
    assert len(set(got)) == 24
    (_, state), (_, other) = begun
    assert state == other
    loaders = [user_loader(rank, 4, 4) for rank in range(4)]
    for loader in loaders:
        loader.load_state_dict(as_saved(state))
    assert sorted(got + flat([flat(ids(loader)) for loader in loaders])) == list(range(SAMPLES))
