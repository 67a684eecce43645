"""The drop-in DataLoader on iterable datasets: a place for each worker, from the dataset's state or by replay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import IterableDataset

from omniload import DataLoader
from omniload.errors import StateError
from tests.omniload.dropin import (
    SAMPLES,
    CarryingStream,
    IteratorStream,
    StatefulStream,
    StickyStream,
    Stream,
    as_saved,
    flat,
    ids,
    resumed,
    take,
)

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

DATASETS: list[type[Any]] = [Stream, StatefulStream, StickyStream, IteratorStream, CarryingStream]
CASES = [(dataset, *workers) for dataset in DATASETS for workers in ((0, False), (2, False), (2, True))]


class Uneven(StatefulStream):
    """The first worker has most of the samples: the others end long before it."""

    def __iter__(self) -> Iterator[int]:
        for sample in StatefulStream.__iter__(self):
            if sample % 3 == 0 or sample < 4:
                yield sample


def loader_of(dataset: type[Any], num_workers: int, persistent: bool, **keywords: Any) -> DataLoader[int]:
    return DataLoader(dataset(), 2, num_workers=num_workers, persistent_workers=persistent, **keywords)


CASES += [(StatefulStream, 1, False), (Uneven, 0, False), (Uneven, 4, True)]


@pytest.mark.parametrize(("dataset", "num_workers", "persistent"), CASES)
def test_a_state_taken_anywhere_goes_on_exactly_and_the_epochs_after_it_are_whole(
    dataset: type[Any], num_workers: int, persistent: bool
) -> None:
    def make() -> DataLoader[int]:
        return loader_of(dataset, num_workers, persistent)

    loader = make()
    epochs = [ids(loader) for _ in range(3)]
    if dataset is CarryingStream:
        assert (epochs[0] != epochs[1]) == (persistent or not num_workers)
    torch_loader = TorchLoader(dataset(), 2, num_workers=num_workers, persistent_workers=persistent)
    assert [ids(torch_loader) for _ in range(2)] == epochs[:2], "batches and order are torch's"
    loader = make()
    iterator, got = iter(loader), []
    states = {0: loader.state_dict()}
    for batch in iterator:
        got.append(batch.tolist())
        states[len(got)] = loader.state_dict()
    states[-1] = loader.state_dict()
    cuts = [5, len(got)] if num_workers else list(range(len(got) + 1))
    for cut in cuts:
        rest = resumed(make, states[cut], 2)
        assert [got[:cut] + rest[0], rest[1]] == epochs[:2], f"after {cut} of {len(got)} batches"
    assert resumed(make, states[-1], 2) == epochs[1:], "at the exact end"
    iterator = iter(loader)
    second = ids(next(iterator) for _ in range(2))
    rest = resumed(make, loader.state_dict(), 2)
    assert [second + rest[0], rest[1]] == epochs[1:], "in the second epoch"


@pytest.mark.parametrize("dataset", DATASETS)
def test_a_run_that_is_resumed_after_every_batch_is_the_run(dataset: type[Any]) -> None:
    loader = DataLoader(dataset(), 4)
    expected = [ids(loader) for _ in range(3)]
    state = DataLoader(dataset(), 4).state_dict()
    epochs: list[list[Any]] = [[]]
    while len(epochs) <= 3:
        loader = DataLoader(dataset(), 4)
        loader.load_state_dict(as_saved(state))
        batch = take(loader, 1)
        state = loader.state_dict()
        epochs[-1] += batch
        if not batch:
            epochs.append([])
    assert epochs[:3] == expected


@pytest.mark.parametrize("dataset", [StatefulStream, Stream])
@pytest.mark.parametrize("snapshot_every", [1, 3])
def test_a_resumed_run_can_be_saved_and_resumed_again(dataset: type[Any], snapshot_every: int) -> None:
    def make() -> DataLoader[int]:
        return loader_of(dataset, 2, False, snapshot_every_n_steps=snapshot_every)

    loader = make()
    expected = ids(loader)
    got: list[Any] = []
    state = make().state_dict()
    for count in (1, 2, 3, 4):
        loader = make()
        loader.load_state_dict(as_saved(state))
        got += take(loader, count)
        state = loader.state_dict()
    assert got + resumed(make, state, 1)[0] == expected


def test_states_between_snapshots_are_made_up_by_reading_again() -> None:
    loader = DataLoader(StatefulStream(), 2, snapshot_every_n_steps=4)
    take(loader, 6)
    (place,) = loader.state_dict()["places"]
    assert place == {"dataset": {"next": 8}, "iterator": None, "samples": 4, "at": "inside"}
    assert resumed(lambda: DataLoader(StatefulStream(), 2), loader.state_dict(), 1)[0][0] == [12, 13]


@pytest.mark.parametrize("dataset", [Stream, StatefulStream])
def test_another_number_of_workers_is_refused_with_the_remedy(dataset: type[Any]) -> None:
    loader = loader_of(dataset, 2, False)
    take(loader, 3)
    state = loader.state_dict()
    other = loader_of(dataset, 0, False)
    with pytest.raises(StateError, match="resume with num_workers=2") as raised:
        other.load_state_dict(state)
    assert "\n" not in str(raised.value)
    assert ids(other)[0] == [0, 1], "nothing has changed"


def test_the_state_of_no_worker_is_that_of_one() -> None:
    make = lambda num_workers: loader_of(StatefulStream, num_workers, False)  # noqa: E731
    for saved_with, loaded_with in ((0, 1), (1, 0)):
        loader = make(saved_with)
        got = take(loader, 4)
        rest = resumed(lambda: make(loaded_with), loader.state_dict(), 1)[0]  # noqa: B023
        assert flat(got + rest) == list(range(SAMPLES))


def test_a_dataset_that_gives_fewer_samples_than_before_is_refused() -> None:
    loader = DataLoader(Stream(), 4)
    take(loader, 4)
    other = DataLoader(Stream(9), 4)
    other.load_state_dict(loader.state_dict())
    with pytest.raises(StateError, match="gave 16 samples before the state was saved, and only 9 now"):
        next(iter(other))


@pytest.mark.parametrize(
    "damage",
    [
        {"places": [{}]},
        {"places": [{"dataset": None, "iterator": None, "samples": -1, "at": "inside"}]},
        {"places": [{"dataset": None, "iterator": None, "samples": 1, "at": "there"}]},
        {"places": [3]},
        {"next_worker": 1},
        {"next_worker": None},
        {"style": "map"},
    ],
    ids=str,
)
def test_a_damaged_state_is_refused_in_one_line(damage: dict[str, Any]) -> None:
    loader = DataLoader(Stream(), 4)
    take(loader, 2)
    state = as_saved(loader.state_dict())
    with pytest.raises(StateError) as raised:
        loader.load_state_dict({**state, **damage})
    assert "\n" not in str(raised.value)
    assert loader.state_dict() == state


def test_a_state_loaded_in_the_middle_of_an_epoch_is_gone_on_from_and_later_epochs_are_whole() -> None:
    for dataset in (StatefulStream, StickyStream, IteratorStream, Stream):
        loader = DataLoader(dataset(), 4)
        expected = ids(loader)
        iterator = iter(loader)
        got = ids(next(iterator) for _ in range(2))
        state = loader.state_dict()
        next(iterator)
        loader.load_state_dict(state)
        assert got + ids(loader) == expected
        assert ids(loader) == expected


def test_a_dataset_that_has_lost_its_state_is_refused() -> None:
    loader = DataLoader(StatefulStream(), 4)
    take(loader, 2)
    other = DataLoader(Stream(), 4)
    other.load_state_dict(loader.state_dict())
    with pytest.raises(StateError, match="Stream has no state_dict"):
        next(iter(other))


@pytest.mark.parametrize(
    ("batch_size", "drop_last"),
    [(None, False), *((size, drops) for size in (1, 4, 23, 24) for drops in (False, True))],
)
def test_the_length_is_exact(batch_size: int | None, drop_last: bool) -> None:
    class Sized(Stream):
        def __len__(self) -> int:
            return self.num_samples

    for ranks in (None, 2):
        place = {} if ranks is None else {"dp_rank": 1, "dp_size": ranks}
        loader = DataLoader(Sized(), batch_size, drop_last=drop_last, **place)
        assert len(loader) == len(ids(loader))


def test_a_length_that_nobody_knows_is_a_type_error() -> None:
    class Sized(Stream):
        def __len__(self) -> int:
            return self.num_samples

    with pytest.raises(TypeError):
        len(DataLoader(Stream()))
    with pytest.raises(TypeError, match="several workers"):
        len(DataLoader(Sized(), 4, num_workers=2))


class Failing(IterableDataset[int]):
    """An iterator that fails once and could go on."""

    def __iter__(self) -> Iterator[int]:
        return FailingIterator()


class FailingIterator(Iterator[int]):
    def __init__(self) -> None:
        self.next = 0

    def __next__(self) -> int:
        self.next += 1
        if self.next == 3:
            raise ValueError("the third sample is bad")
        if self.next > 7:
            raise StopIteration
        return self.next


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_does_not_end_the_epoch_more_than_it_does_in_torch(num_workers: int) -> None:
    seen: list[list[Any]] = []
    for loader in (
        TorchLoader(Failing(), 2, num_workers=num_workers),
        DataLoader(Failing(), 2, num_workers=num_workers),
    ):
        iterator, got = iter(loader), []
        while True:
            try:
                got.append(next(iterator).tolist())
            except ValueError as error:
                got.append("the third sample is bad" in str(error))
            except StopIteration:
                break
        seen.append(got)
    assert seen[0] == seen[1] == [[1, 2], True, [4, 5], [6, 7]]


def test_a_state_with_tensors_is_kept() -> None:
    class WithTensor(StatefulStream):
        def state_dict(self) -> dict[str, Any]:
            return {"next": torch.tensor([self.next, 0])}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.start = int(state["next"][0])

    loader = DataLoader(WithTensor(), 4)
    got = take(loader, 3)
    other = DataLoader(WithTensor(), 4)
    other.load_state_dict(loader.state_dict())
    assert flat(got + ids(other)) == list(range(SAMPLES)) == flat(ids(other))
