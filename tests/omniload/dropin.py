"""Datasets and samplers for the tests of the drop-in DataLoader, and what they have in common."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

SAMPLES = 23
Make = Callable[..., Any]


class Numbers(Dataset[int]):
    """Map-style: sample i is i. Notes what was read, in its own process."""

    def __init__(self, num_samples: int = SAMPLES) -> None:
        self.num_samples = num_samples
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index


class Counting(Numbers):
    """Map-style, with a state: sample i is how many this process has read before it, and i."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __getitem__(self, index: int) -> int:
        self.count += 1
        return 100 * self.count + index

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Stream(IterableDataset[int]):
    """Iterable without a state; workers share the numbers."""

    def __init__(self, num_samples: int = SAMPLES) -> None:
        self.num_samples = num_samples
        self.start = 0
        self.next = 0

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        start, self.start = self.start, 0
        for i in range(start, self.num_samples):
            self.next = i + 1
            if i % workers == worker:
                yield i


class StatefulStream(Stream):
    """With a state, which the next iteration uses up."""

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["next"]


class StickyStream(StatefulStream):
    """As datasets of Hugging Face: every iteration begins where the dataset was restored to."""

    def __iter__(self) -> Iterator[int]:
        kept = self.start
        for sample in super().__iter__():
            self.start = kept
            yield sample
        self.start = kept


class IteratorStream(IterableDataset[int]):
    """Its iterator has the state, and not the dataset; several epochs give different orders."""

    def __init__(self) -> None:
        self.epochs = 0

    def __iter__(self) -> Iterator[int]:
        self.epochs += 1
        return NumberIterator()


class NumberIterator(Iterator[int]):
    """The numbers of one worker."""

    def __init__(self) -> None:
        info = get_worker_info()
        self.next, self.step = (info.id, info.num_workers) if info else (0, 1)

    def __next__(self) -> int:
        if self.next >= SAMPLES:
            raise StopIteration
        self.next += self.step
        return self.next - self.step

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


class CarryingStream(StatefulStream):
    """Its state goes on from epoch to epoch, so each has an order of its own; at an end it is that of the next."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        for sample in super().__iter__():
            yield 100 * self.epoch + sample
        self.epoch += 1
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.epoch = state["epoch"]


class Reversed(Sampler[int]):
    """A sampler of a user's, without a state, that gives the same order every time."""

    def __iter__(self) -> Iterator[int]:
        yield from reversed(range(SAMPLES))

    def __len__(self) -> int:
        return SAMPLES


class Erratic(Reversed):
    """Draws from torch's global generator, so no two orders are the same."""

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(SAMPLES).tolist()


class StatefulSampler(Reversed):
    """Knows its own place, and which epoch it is in."""

    def __init__(self) -> None:
        self.epoch = 0
        self.next = 0

    def __iter__(self) -> Iterator[int]:
        while self.next < SAMPLES:
            self.next += 1
            yield (self.next * 5 + self.epoch) % SAMPLES
        self.epoch += 1
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.next = state["epoch"], state["next"]


class IteratorSampler(Reversed):
    """Its iterator knows the place."""

    def __iter__(self) -> Iterator[int]:
        iterator = NumberIterator()
        iterator.next, iterator.step = 0, 1
        return iterator


class Triples(Sampler[list[int]]):
    """A batch sampler of a user's."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([i, i + 1, i + 2] for i in range(0, SAMPLES - 2, 3))

    def __len__(self) -> int:
        return SAMPLES // 3


def ids(batches: Any) -> list[Any]:
    """The batches as lists, which compare to one truth."""
    return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in batches]


def flat(batches: list[Any]) -> list[Any]:
    """The samples of batches."""
    return list(itertools.chain.from_iterable(batches))


def take(loader: Any, num_batches: int) -> list[Any]:
    """The first batches of a new iteration."""
    return ids(itertools.islice(iter(loader), num_batches))


def as_saved(state: dict[str, Any]) -> dict[str, Any]:
    """A state as it comes back from a file."""
    restored: dict[str, Any] = json.loads(json.dumps(state))
    return restored


def resumed(make: Make, state: dict[str, Any], num_epochs: int = 2, **keywords: Any) -> list[list[Any]]:
    """The epochs that a new loader gives from a state on; torch's global generator is elsewhere than it was."""
    loader = make(**keywords)
    loader.load_state_dict(as_saved(state))
    torch.manual_seed(1234)
    return [ids(loader) for _ in range(num_epochs)]
