"""Reading tensors of a checkpoint without a state to load into: any of them, any part of them, on one process.

>>> saved = checkpoint.open_checkpoint("runs/x/step-100")
>>> saved["model/embedding.weight"].shape
(32000, 4096)
>>> rows = saved["model/embedding.weight"][:100]  # reads the pieces that hold these
>>> norms = saved.read("model/*norm*")
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from types import EllipsisType
from typing import TypeAlias

import torch

from checkpoint.boxes import Box
from checkpoint.engine.read import read_boxes
from checkpoint.engine.views import Wanted
from checkpoint.errors import MismatchError
from checkpoint.patterns import fits
from checkpoint.planner import torch_dtype
from checkpoint.stored import StoredCheckpoint
from storage import Store

Index: TypeAlias = int | slice | EllipsisType | tuple[int | slice | EllipsisType, ...]


def open_checkpoint(
    path: str | os.PathLike[str] | Store,
    *,
    verify: bool = True,
    storage_options: Mapping[str, object] | None = None,
) -> LazyCheckpoint:
    """Open a committed checkpoint to read some of its tensors; only its list of tensors is read.

    Args:
        path: Directory or URL of the checkpoint, or an open store.
        verify: Check the digest of everything that is read.
        storage_options: Passed to the storage driver of a remote URL.

    Raises:
        NotACheckpoint: Nothing is committed at ``path``.
        CorruptCheckpoint, FormatError: Its metadata is damaged.
    """
    store = path if isinstance(path, Store) else Store(path, storage_options)
    stored = StoredCheckpoint.open(store)
    stored.check_files()
    return LazyCheckpoint(stored, verify=verify)


class LazyCheckpoint(Mapping[str, "LazyTensor"]):
    """The tensors of a checkpoint by ``group/key``. Made by :func:`open_checkpoint`.

    Whatever is committed at the place later, this stays with what was committed when it was opened.
    """

    def __init__(self, stored: StoredCheckpoint, *, verify: bool) -> None:
        self._stored = stored
        self._verify = verify
        self._ids = {f"{group}/{key}": index for (group, key), index in stored.tensor_ids.items()}

    def __repr__(self) -> str:
        return f"LazyCheckpoint({self._stored.store.url!r}, {len(self)} tensors)"

    def __getitem__(self, name: str) -> LazyTensor:
        return LazyTensor(self._stored, self._ids[name], verify=self._verify)

    def __iter__(self) -> Iterator[str]:
        return iter(self._ids)

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def step(self) -> int | None:
        """Step number, if it has one."""
        return self._stored.manifest.step

    @property
    def objects(self) -> Mapping[str, object]:
        """Plain values as they are stored: top-level name in the state to its tree."""
        return self._stored.objects

    def names(self, *patterns: str) -> list[str]:
        """Tensors that any of some patterns names, in order.

        Args:
            patterns: Groups (``"model"``), or shell patterns of ``group/key`` (``"model/*norm*"``).

        Raises:
            MismatchError: A pattern names none.
        """
        found = set()
        for pattern in patterns:
            fitting = [
                index for (group, key), index in self._stored.tensor_ids.items() if fits(pattern, group, key)
            ]
            if not fitting:
                raise MismatchError(
                    f"{self._stored.store.url}: {pattern!r} names no tensor; give a group, or a pattern of 'group/key'"
                )
            found.update(fitting)
        names = list(self._ids)
        return [names[index] for index in sorted(found)]

    def read(self, *patterns: str) -> dict[str, torch.Tensor]:
        """Read whole tensors, many at a time.

        Args:
            patterns: As for :meth:`names`.

        Returns:
            New tensors in host memory by ``group/key``.

        Raises:
            MismatchError: A pattern names none.
            CorruptCheckpoint: The checkpoint is damaged; names file and tensor.
        """
        names = self.names(*patterns)
        boxes = [(self._ids[name], Box.whole(self[name].shape)) for name in names]
        return dict(zip(names, _read(self._stored, boxes, verify=self._verify), strict=True))


class LazyTensor:
    """A stored tensor. Indexing it reads what is asked for, and gives a plain tensor.

    Args:
        stored: The checkpoint.
        tensor_id: Which of its tensors.
        verify: Check digests.
    """

    def __init__(self, stored: StoredCheckpoint, tensor_id: int, *, verify: bool) -> None:
        self._stored = stored
        self._tensor_id = tensor_id
        self._verify = verify
        self._row = stored.catalog.tensors[tensor_id]

    def __repr__(self) -> str:
        return f"LazyTensor({self._row.group}/{self._row.key}, {self._row.dtype}, {list(self.shape)})"

    @property
    def dtype(self) -> torch.dtype:
        """Element type."""
        return torch_dtype(self._row.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return self._row.shape

    def __getitem__(self, index: Index) -> torch.Tensor:
        """Read a part, as the same index of a torch tensor would give it.

        Args:
            index: Integers, slices with a positive step, an ellipsis.

        Raises:
            IndexError: It does not fit the shape, or is of another kind.
            CorruptCheckpoint: The checkpoint is damaged; names file and tensor.
        """
        box, rest = _box_of(index, self.shape)
        (part,) = _read(self._stored, [(self._tensor_id, box)], verify=self._verify)
        return part[rest]

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a tensor of 0 dimensions has no length")
        return self.shape[0]


def _box_of(index: Index, shape: tuple[int, ...]) -> tuple[Box, tuple[int | slice, ...]]:
    """The box to read for an index, and the index of what was asked for in it."""
    parts = index if isinstance(index, tuple) else (index,)
    given = sum(part is not Ellipsis for part in parts)
    if given > len(shape) or len(parts) - given > 1:
        raise IndexError(f"index {index} does not fit a tensor of {len(shape)} dimensions")
    at = next((position for position, part in enumerate(parts) if part is Ellipsis), len(parts))
    filled = (*parts[:at], *(slice(None),) * (len(shape) - given), *parts[at + 1 :])
    offsets, lengths = [], []
    rest: list[int | slice] = []
    for part, extent in zip(filled, shape, strict=True):
        if isinstance(part, slice):
            start, stop, step = part.indices(extent)
            if step <= 0:
                raise IndexError(f"a slice of step {step}: it must be positive")
            offsets.append(start)
            lengths.append(max(0, stop - start))
            rest.append(slice(None, None, step))
        elif isinstance(part, int) and not isinstance(part, bool):
            if not -extent <= part < extent:
                raise IndexError(f"index {part} is out of bounds of a dimension of {extent}")
            offsets.append(part % extent)
            lengths.append(1)
            rest.append(0)
        else:
            raise IndexError(f"an index of type {type(part).__name__}; use integers, slices and an ellipsis")
    return Box(tuple(offsets), tuple(lengths)), tuple(rest)


def _read(stored: StoredCheckpoint, boxes: Iterable[tuple[int, Box]], *, verify: bool) -> list[torch.Tensor]:
    tensors = []
    wanted = []
    for tensor_id, box in boxes:
        dtype = torch_dtype(stored.catalog.tensors[tensor_id].dtype)
        tensors.append(torch.empty(box.lengths, dtype=dtype, device="cpu"))
        if box.num_elements:
            wanted.append(Wanted(tensor_id=tensor_id, box=box, view=tensors[-1]))
    if wanted:
        needed = {one.tensor_id for one in wanted}
        narrow = stored.narrowed(needed)
        narrow.tables.check_tilings(needed)
        read_boxes(narrow, wanted, verify=verify)
    return tensors
