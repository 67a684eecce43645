"""One process's tensors stored in boxes of a given size, as many ranks would have left them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import xxhash
from torch._C._distributed_c10d import HashStore

import checkpoint
from checkpoint.boxes import Box
from checkpoint.engine.coordination import Coordinator
from checkpoint.engine.options import SaveOptions
from checkpoint.engine.save import Saver
from checkpoint.frameworks.values import CapturedState, LocalTensor
from storage import Store

_TENSOR_BYTES = 16 << 20


class ManyBoxes:
    """Tensors of 16 MiB and a checkpoint of them.

    Args:
        directory: Where it goes.
        num_bytes: Of all tensors.
        box_bytes: Of each stored box; a divisor of 16 MiB.
    """

    def __init__(self, directory: Path, num_bytes: int, box_bytes: int) -> None:
        self._rows = _TENSOR_BYTES // box_bytes
        self._box_bytes = box_bytes
        self._path = directory / f"boxes-{box_bytes}"
        self._raw = directory / f"raw-{box_bytes}"
        shape = (self._rows, box_bytes // 4)
        self._state = {
            f"t{index:04d}": torch.rand(shape) for index in range(max(1, num_bytes // _TENSOR_BYTES))
        }
        self._store()

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return len(self._state) * _TENSOR_BYTES

    def load(self) -> int:
        """Load it into the tensors, verified."""
        checkpoint.load(self._path, {"model": self._state})
        return self.num_bytes

    def read(self, *, hashed: bool) -> int:
        """Read as many bytes, box by box, into the tensors: no names, no layout."""
        with _opened(self._raw) as file:
            offset = 0
            for tensor in self._state.values():
                memory = memoryview(tensor.numpy().data).cast("B")
                for begin in range(0, _TENSOR_BYTES, self._box_bytes):
                    box = memory[begin : begin + self._box_bytes]
                    assert os.preadv(file, [box], offset) == len(box), "local files give a box at once"
                    if hashed:
                        xxhash.xxh3_64_intdigest(box)
                    offset += len(box)
        return self.num_bytes

    def _store(self) -> None:
        with self._raw.open("wb") as file:
            for tensor in self._state.values():
                file.write(tensor.numpy().data)
        tensors = [
            LocalTensor(
                group="model",
                key=key,
                dtype=tensor.dtype,
                shape=tuple(tensor.shape),
                boxes=tuple(Box((row, 0), (1, tensor.shape[1])) for row in range(self._rows)),
                views=tuple(tensor[row : row + 1] for row in range(self._rows)),
                tensor=tensor,
            )
            for key, tensor in self._state.items()
        ]
        captured = CapturedState(
            tensors=tensors, objects={"model": {"kind": "tree", "value": {}}}, rank_objects={}
        )
        options = SaveOptions(step=0, overwrite=False, timeout_s=60, user_metadata={})
        saver = Saver(Coordinator(HashStore(), 0, 1))
        saver.save(Store(self._path), lambda: captured, options, background=False).result(60)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    file = os.open(path, os.O_RDONLY)
    try:
        yield file
    finally:
        os.close(file)
