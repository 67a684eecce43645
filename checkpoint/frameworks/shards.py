"""Tensors that a trainer has flattened and cut itself, as ZeRO does, for dicts and lists in the state."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FlatShard:
    """What this rank holds of a tensor: some of its elements, consecutive in row-major order.

    It stands in a dict or list of the state as a tensor does. The ranks together hold all of the tensor, and what
    several hold is saved once; a rank that holds nothing of it gives empty memory. It is saved as boxes, without
    communication, so it loads into any other cut, and :func:`checkpoint.open_checkpoint` gives the whole tensor.

    Attributes:
        memory: The elements, shape ``[n]``, saved from and loaded into; a view of something larger is fine.
        shape: Shape of the whole tensor.
        start: Which element of the whole tensor the first one is.

    Raises:
        ValueError: The memory has more than one dimension, or reaches beyond the tensor.
    """

    memory: torch.Tensor
    shape: tuple[int, ...]
    start: int

    def __post_init__(self) -> None:
        if self.memory.ndim != 1:
            raise ValueError(f"memory has shape {list(self.memory.shape)}: give a flat view of it, shape [n]")
        if not 0 <= self.start <= self.start + self.memory.numel() <= math.prod(self.shape):
            raise ValueError(
                f"memory of {self.memory.numel()} elements from {self.start} on reaches beyond a tensor of shape "
                f"{list(self.shape)}: leave out padding and what belongs to others"
            )


def flat_shards(
    memory: torch.Tensor, shapes: Mapping[str, Sequence[int]], *, start: int = 0
) -> dict[str, FlatShard]:
    """The tensors in a range of flat memory in which they lie one after the other, as in a partition of ZeRO.

    >>> rows = {name: param.shape for name, param in named}  # in the order in which they were flattened
    >>> state = {"master": flat_shards(partition, rows, start=rank * partition.numel())}

    Args:
        memory: What this rank holds, shape ``[n]``.
        shapes: Shape of each tensor, in the order in which they lie; what follows them is padding.
        start: Which element of all of them the first one of ``memory`` is.

    Returns:
        Views of ``memory`` by name, empty ones for the tensors that it has nothing of.
    """
    shards = {}
    begin = -start  # of the tensor, in the memory
    for name, shape in shapes.items():
        size = math.prod(shape)
        first = min(max(begin, 0), memory.numel())
        stop = min(max(begin + size, first), memory.numel())
        shards[name] = FlatShard(
            memory=memory[first:stop], shape=tuple(shape), start=first - begin if first < stop else 0
        )
        begin += size
    return shards
