"""What every peer that reads documents is given: a packer, and a torch DataLoader around both."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from benchmarks.loading.packing import derive, pack

SEQ_LEN = 8192
ROWS = 8
"""Rows per batch."""
BATCH_TOKENS = ROWS * SEQ_LEN

Documents = Callable[[int, int], Iterable[np.ndarray]]
"""Given a worker's number and how many there are, its documents, ``integer[n]`` each."""


class Packed(IterableDataset[torch.Tensor]):
    """Documents packed to batches where they are read, so that workers share that work.

    Args:
        documents: of each worker.
        derived: also make what a lane of omniload has besides, though it is not delivered.
    """

    def __init__(self, documents: Documents, *, derived: bool = False) -> None:
        self._documents = documents
        self._derived = derived

    def __iter__(self) -> Iterator[torch.Tensor]:
        """``int64[ROWS, SEQ_LEN]``."""
        info = get_worker_info()
        mine = self._documents(info.id, info.num_workers) if info else self._documents(0, 1)
        for lane, bounds in pack(mine, BATCH_TOKENS):
            if self._derived:
                derive(lane, bounds)
            yield torch.from_numpy(lane).view(ROWS, SEQ_LEN)


def packed_tokens(documents: Documents, num_workers: int, *, derived: bool = False) -> int:
    """Load all documents once. Returns the tokens delivered."""
    dataset = Packed(documents, derived=derived)
    return num_tokens(DataLoader(dataset, batch_size=None, num_workers=num_workers))


def num_tokens(batches: Iterable[torch.Tensor]) -> int:
    """Iterate to the end. Returns the tokens delivered."""
    return sum(batch.numel() for batch in batches)


def with_workers() -> float:
    """Processor time of this process and of its workers that ended, as those of a torch DataLoader do with its run."""
    return sum(os.times()[:4])
