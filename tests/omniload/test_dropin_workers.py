"""The worker processes of the drop-in DataLoader: what they are told, how they draw, fail, and end."""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from omniload import DataLoader
from tests.omniload.dropin import Numbers, StatefulStream, as_saved, flat, ids, take


class Random(Dataset[tuple[int, float, int]]):
    """A sample is what torch, random and numpy draw."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[int, float, int]:
        return int(torch.randint(2**60, ())), random.random(), int(np.random.randint(2**62))


def as_drawn(batch: Any) -> Any:
    return batch


def drawn(loader: Any) -> list[tuple[int, float, int]]:
    return flat(list(loader))


def random_loader(cls: Any, **keywords: Any) -> Any:
    return cls(Random(), 2, num_workers=2, collate_fn=as_drawn, **keywords)


def test_no_two_workers_loaders_epochs_or_resumes_draw_the_same() -> None:
    torch.manual_seed(1)
    reference = drawn(random_loader(TorchLoader))
    torch.manual_seed(1)
    loader = random_loader(DataLoader, persistent_workers=True)
    epochs = [drawn(loader), drawn(loader)]
    assert epochs[0] == reference, "as torch seeds them"
    other = drawn(random_loader(DataLoader))
    torch.manual_seed(1)
    loader = random_loader(DataLoader)
    take(loader, 2)
    torch.manual_seed(1)
    resumed = random_loader(DataLoader)
    resumed.load_state_dict(as_saved(loader.state_dict()))
    rest = drawn(resumed)
    assert len(rest) == 8
    for column in range(3):
        seen = [sample[column] for sample in [*epochs[0], *epochs[1], *other, *rest]]
        assert len(set(seen)) == len(seen)


class Told(Numbers):
    """Says what the worker was told."""

    def __init__(self) -> None:
        super().__init__()
        self.told = "nothing"

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is not None
        return self.told, info.id, info.num_workers, type(info.dataset).__name__, info.dataset is self


class ToldStream(IterableDataset[Any]):
    """The same, iterable."""

    def __init__(self) -> None:
        self.told = "nothing"

    def __iter__(self) -> Iterator[Any]:
        yield Told.__getitem__(self, 0)  # type: ignore[arg-type]


def tell(worker: int) -> None:
    """A ``worker_init_fn`` as in torch's documentation."""
    info = get_worker_info()
    assert info is not None
    info.dataset.told = f"worker {worker}"  # type: ignore[attr-defined]


@pytest.mark.parametrize(("dataset", "context"), [(Told, "fork"), (ToldStream, "fork")])
def test_workers_see_the_users_dataset_and_their_own_number(dataset: Any, context: str) -> None:
    loader = DataLoader(dataset(), None, num_workers=2, worker_init_fn=tell, multiprocessing_context=context)
    name = dataset.__name__
    assert ids(loader)[:2] == [[f"worker {i}", i, 2, name, True] for i in range(2)]


def test_a_state_goes_on_in_spawned_workers() -> None:
    loader = DataLoader(StatefulStream(), 4, num_workers=1)
    got = take(loader, 3)
    other = DataLoader(StatefulStream(), 4, num_workers=1, multiprocessing_context="spawn")
    other.load_state_dict(as_saved(loader.state_dict()))
    assert flat(got + ids(other)) == list(range(23))


class Bad(Numbers):
    """The sample 9 cannot be read."""

    def __getitem__(self, index: int) -> int:
        if index == 9:
            raise ValueError("sample 9 is bad")
        return index


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_comes_with_its_traceback_and_is_met_again_after_a_resume(num_workers: int) -> None:
    loader = DataLoader(Bad(), 4, num_workers=num_workers)
    iterator = iter(loader)
    assert ids(next(iterator) for _ in range(2)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(ValueError, match="sample 9 is bad") as raised:
        next(iterator)
    assert not num_workers or "__getitem__" in str(raised.value)
    state = loader.state_dict()
    assert state["batches"] == 2
    other = DataLoader(Bad(), 4, num_workers=num_workers)
    other.load_state_dict(state)
    with pytest.raises(ValueError, match="sample 9 is bad"):
        next(iter(other))
    assert next(iterator).tolist() == [12, 13, 14, 15], "as in torch, the others can still be had"
    assert loader.state_dict()["batches"] == 4


class Stuck(Numbers):
    """The sample 9 takes for ever, or kills."""

    def __init__(self, kills: bool) -> None:
        super().__init__()
        self.kills = kills

    def __getitem__(self, index: int) -> int:
        if index == 9 and self.kills:
            os.kill(os.getpid(), signal.SIGKILL)
        if index == 9:
            time.sleep(60)
        return index


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("kills", "timeout", "message"),
    [(False, 0.5, "timed out after 0.5 seconds"), (True, 0, "worker .* is killed|exited unexpectedly")],
)
def test_a_stuck_or_killed_worker_is_an_error_and_loses_no_place(
    kills: bool, timeout: float, message: str
) -> None:
    # In a process of its own: torch reports the killed one from a signal handler, wherever the program is then. Not
    # a fork of this one, which would share the queues of loaders that earlier tests left to be collected, and close
    # them when it collects its copies.
    process = multiprocessing.get_context("spawn").Process(
        target=_go_on_after_an_error, args=(kills, timeout, message)
    )
    process.start()
    process.join(60)
    assert process.exitcode == 0


def _go_on_after_an_error(kills: bool, timeout: float, message: str) -> None:
    loader = DataLoader(Stuck(kills), 4, num_workers=1, timeout=timeout, collate_fn=list)
    iterator = iter(loader)  # kept, since torch waits for its workers when it goes
    got: list[Any] = []
    failure = ""
    try:
        got.extend(iterator)
    except RuntimeError as error:
        failure = str(error)
    assert re.search(message, failure)
    state = loader.state_dict()
    assert state["batches"] == len(got)
    other = DataLoader(Numbers(), 4)
    other.load_state_dict(state)
    assert flat(got + ids(other)) == list(range(23))
    with suppress(RuntimeError):  # of the worker that is ended here
        for worker in multiprocessing.active_children():
            worker.kill()
    os._exit(0)


def test_workers_end_with_the_iterator_they_are_of() -> None:
    loader = DataLoader(Numbers(), 4, num_workers=2, collate_fn=pid_of)
    iterator = iter(loader)
    pids = {next(iterator), next(iterator)}
    assert len(pids) == 2
    del iterator
    assert not any(os.path.exists(f"/proc/{pid}/cmdline") and _runs(pid) for pid in pids)  # noqa: PTH110


def pid_of(batch: Any) -> int:
    return os.getpid()


def _runs(pid: int) -> bool:
    with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
        return file.read().rsplit(")", 1)[1].split()[0] != "Z"


def test_a_collate_function_exchanged_between_epochs_holds_from_then_on() -> None:
    loader = DataLoader(Numbers(), 4)
    assert ids(loader)[0] == [0, 1, 2, 3]
    loader.collate_fn = len
    assert ids(loader)[0] == 4
