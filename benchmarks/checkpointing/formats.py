"""Ways to save and load a training state, all with the same guarantees where they can be given.

Every save ends with an fsync. Every load ends with the values in the live tensors of the state.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import safetensors.torch
import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

import checkpoint
from benchmarks.checkpointing.ranks import TIMEOUT_S
from benchmarks.checkpointing.state import TrainingState

_PIECE_BYTES = 4 * 2**20


class Format(Protocol):
    """A way to save and load; ``path`` is a file or directory of its own, which does not exist before a save."""

    def save(self, path: Path) -> None:
        """Return when the state is durable."""

    def load(self, path: Path) -> None:
        """Fill the live tensors from a saved state."""


class AsyncFormat(Protocol):
    """A way to save in the background."""

    def begin(self, path: Path) -> Callable[[], object]:
        """Return when the live tensors may change again, with a call that waits until the state is durable."""


class Raw:
    """This rank's tensors end to end in one file, by ``pwrite`` and ``pread``: no names, no layout.

    Args:
        state: what is saved and loaded.
        hashed: digest every 4 MiB with xxh3, on save and on load.
        share: rank and number of ranks that all hold the same and divide it evenly; None for all of it.
    """

    def __init__(self, state: TrainingState, *, hashed: bool, share: tuple[int, int] | None = None) -> None:
        buffers = [_bytes(tensor) for tensor in state.tensors.values()]
        if share is not None:
            rank, num_ranks = share
            # Largest first, dealt in turn.
            buffers = sorted(buffers, key=len, reverse=True)[rank::num_ranks]
        self._buffers = buffers
        self._hashed = hashed

    def save(self, path: Path) -> None:
        """See `Format`."""
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            for offset, piece in self._pieces():
                if self._hashed:
                    xxhash.xxh3_64_intdigest(piece)
                assert os.pwrite(file, piece, offset) == len(piece), "local files take a piece at once"
            os.fsync(file)
        finally:
            os.close(file)

    def load(self, path: Path) -> None:
        """See `Format`."""
        file = os.open(path, os.O_RDONLY)
        try:
            for offset, piece in self._pieces():
                assert os.preadv(file, [piece], offset) == len(piece), "local files give a piece at once"
                if self._hashed:
                    xxhash.xxh3_64_intdigest(piece)
        finally:
            os.close(file)

    def _pieces(self) -> Iterator[tuple[int, memoryview]]:
        offset = 0
        for buffer in self._buffers:
            for start in range(0, len(buffer), _PIECE_BYTES):
                piece = buffer[start : start + _PIECE_BYTES]
                yield offset, piece
                offset += len(piece)


class Copy:
    """Copies this rank's tensors into memory allocated before: the least an asynchronous save has to wait for.

    Args:
        state: what is copied.
        threaded: with torch's threads, which spin for each other where cores are busy; else on one thread.
    """

    def __init__(self, state: TrainingState, *, threaded: bool) -> None:
        self._tensors = list(state.tensors.values())
        self._staging = [torch.empty_like(tensor) for tensor in self._tensors]
        self._threaded = threaded

    def begin(self, path: Path) -> Callable[[], object]:
        """See `AsyncFormat`; nothing is written."""
        for tensor, staging in zip(self._tensors, self._staging, strict=True):
            if self._threaded:
                staging.copy_(tensor)
            else:
                np.copyto(staging.numpy(), tensor.numpy())
        return lambda: None


class TorchSave:
    """``torch.save`` and ``torch.load`` of this rank's tensors.

    Args:
        state: what is saved and loaded.
        mmap: load through a memory map.
    """

    def __init__(self, state: TrainingState, *, mmap: bool = False) -> None:
        self._tensors = state.tensors
        self._mmap = mmap

    def save(self, path: Path) -> None:
        """See `Format`."""
        with path.open("wb") as file:
            torch.save(self._tensors, file)
            os.fsync(file.fileno())

    def load(self, path: Path) -> None:
        """See `Format`."""
        _copy(torch.load(path, weights_only=True, mmap=self._mmap), self._tensors)


class Safetensors:
    """``safetensors.torch`` with this rank's tensors.

    Args:
        state: what is saved and loaded.
    """

    def __init__(self, state: TrainingState) -> None:
        self._tensors = state.tensors

    def save(self, path: Path) -> None:
        """See `Format`."""
        safetensors.torch.save_file(self._tensors, path)
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.close(file)

    def load(self, path: Path) -> None:
        """See `Format`."""
        _copy(safetensors.torch.load_file(path), self._tensors)


class TorchDcp:
    """torch's distributed checkpoint, with the state dicts it recommends.

    Args:
        state: what is saved and loaded.
        keep_staging: asynchronous saves copy into the memory of the one before.
    """

    def __init__(self, state: TrainingState, *, keep_staging: bool = False) -> None:
        self._state = state
        # Everything off is what torch picks without an accelerator; a stager that lives on keeps its memory.
        self._stager = DefaultStager(StagingOptions(False, False, False, False)) if keep_staging else None

    def save(self, path: Path) -> None:
        """See `Format`."""
        save(self._state_dict(), storage_writer=FileSystemWriter(path, sync_files=True))

    def begin(self, path: Path) -> Callable[[], object]:
        """See `AsyncFormat`."""
        future = async_save(self._state_dict(), checkpoint_id=path, async_stager=self._stager)
        assert isinstance(future, Future), "the stagers used here finish before async_save returns"
        return lambda: future.result(TIMEOUT_S)

    def load(self, path: Path) -> None:
        """See `Format`."""
        state_dict = self._state_dict()
        load(state_dict, storage_reader=FileSystemReader(path))
        set_state_dict(
            self._state.model,
            self._state.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )

    def _state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._state.model, self._state.optimizer)
        return {"model": model, "optimizer": optimizer}


class Ours:
    """The `checkpoint` package, pieces digested on save and verified on load.

    Args:
        state: what is saved and loaded.
    """

    def __init__(self, state: TrainingState) -> None:
        self._state = {"model": state.model, "optimizer": state.optimizer}

    def save(self, path: Path) -> None:
        """See `Format`."""
        checkpoint.save(path, self._state)

    def begin(self, path: Path) -> Callable[[], object]:
        """See `AsyncFormat`."""
        handle = checkpoint.async_save(path, self._state)
        return lambda: handle.result(TIMEOUT_S)

    def load(self, path: Path) -> None:
        """See `Format`."""
        checkpoint.load(path, self._state)


def remove(path: Path) -> None:
    """Delete what a format saved, if anything."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor, sharing its memory."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)


def _copy(stored: dict[str, Tensor], live: dict[str, Tensor]) -> None:
    for name, tensor in live.items():
        tensor.copy_(stored[name])
