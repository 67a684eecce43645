"""Tensors flattened into 1-D memory and cut into ranges, as FSDP1 holds parameters and their optimizer state."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from checkpoint.errors import UnsupportedLayout
from checkpoint.frameworks.layout import range_boxes
from checkpoint.frameworks.values import LocalTensor


class FlatPart(NamedTuple):
    """What 1-D memory of this rank holds of one tensor: a range of its row-major elements.

    Attributes:
        shape: Global shape of the tensor.
        start: First element of the range in the tensor.
        offset: Where the range begins in the memory, elements.
        length: Elements of the range, possibly 0.
        extent: Elements of the memory, those of other tensors and padding included.
    """

    shape: tuple[int, ...]
    start: int
    offset: int
    length: int
    extent: int


class Held(NamedTuple):
    """A global tensor that a live tensor of this rank holds, whole or in part.

    Attributes:
        names: Its names in the module, the first one for saving.
        part: Where it is, if the live tensor is flattened. A flattened tensor may hold several.
    """

    names: list[str]
    part: FlatPart | None = None


def describe(group: str, key: str, tensor: torch.Tensor, part: FlatPart | None) -> LocalTensor:
    """Describe a live tensor, or the part of flattened memory that belongs to one tensor.

    Padding belongs to no tensor, so it is in no box. A tensor without dimensions beside a flattened one (a
    step count) is not held by ranks without memory for it: an optimizer does not advance it there.

    Args:
        group: Top-level name in the state.
        key: Name inside the group.
        tensor: A plain tensor or DTensor; if ``part`` is given, the memory or a tensor without dimensions.
        part: Where in flattened memory the tensor is.

    Raises:
        UnsupportedLayout: If the layout cannot be described by boxes, or the memory is not that of ``part``.
    """
    if part is None:
        return LocalTensor.of(group, key, tensor)
    if not tensor.ndim:
        local = LocalTensor.of(group, key, tensor)
        return local if part.extent else replace(local, boxes=(), views=())
    if tuple(tensor.shape) != (part.extent,):
        raise UnsupportedLayout(
            f"{group}: {key} has shape {list(tensor.shape)}; beside a flattened parameter it must have no "
            f"dimensions or be flattened likewise, [{part.extent}]"
        )
    memory = tensor
    if part.length != part.extent:
        memory = tensor[part.offset : part.offset + part.length]
    boxes, views = range_boxes(f"{group}: {key}", memory, part.shape, part.start)
    return LocalTensor(
        group=group, key=key, dtype=tensor.dtype, shape=part.shape, boxes=boxes, views=views, tensor=tensor
    )
