"""Which boxes of a global tensor a rank holds, from the tensor's placements.

PyTorch's own ``compute_local_shape_and_global_offset`` is not used. It cuts a dimension strictly from the left
mesh axis to the right one, while FSDP2 over tensor parallelism cuts the tensor-parallel shard first and then
chunks it, and the two differ when a dimension is uneven: of 13 rows over 3 x 2 ranks, rank 4 holds row 6 only.
It also gives one offset where a ``_StridedShard`` without its partner is several boxes.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Final, TypeAlias

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from checkpoint.boxes import Box, flat_boxes
from checkpoint.errors import UnsupportedLayout

# Consecutive (start, length) ranges of one dimension, in the order in which the local tensor holds them.
_Runs: TypeAlias = tuple[tuple[int, int], ...]

# Shape of a local tensor, its boxes, and where in it they are.
_Layout: TypeAlias = tuple[tuple[int, ...], tuple[Box, ...], tuple[tuple[slice, ...], ...]]


def tensor_boxes(name: str, tensor: torch.Tensor) -> tuple[tuple[Box, ...], tuple[torch.Tensor, ...]]:
    """The boxes of a global tensor that this rank holds, and their memory.

    A plain tensor is held whole. A rank outside the mesh of a DTensor holds nothing.

    Args:
        name: What to call the tensor in errors.
        tensor: A plain tensor or a DTensor.

    Returns:
        Boxes, and for each a view of the local tensor with the box's lengths, detached from autograd. Empty
        boxes are left out.

    Raises:
        UnsupportedLayout: If the tensor is on the meta device, not strided or a wrapper subclass other than
            DTensor, if a placement is not a (strided) shard or replica, or if the local tensor does not have
            the shape that the placements imply.
    """
    if not isinstance(tensor, DTensor):
        _check_dense(name, tensor)
        boxes = _whole(tensor.shape)
        return boxes, (tensor.detach(),) if boxes else ()
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return (), ()
    # Not to_local(), which takes part in autograd or is told not to; either takes as long as all the rest.
    local = tensor._local_tensor
    _check_dense(name, local)
    local = local.detach()
    try:
        expected, boxes, places = _layout_of(tensor, tuple(coordinate))
    except UnsupportedLayout as error:
        raise UnsupportedLayout(f"{name}: {error}") from None
    # Shards without elements come as (0,) or (0, ...), depending on who made them.
    if local.shape != expected and (local.numel() or 0 not in expected):
        raise UnsupportedLayout(
            f"{name}: placements {_text(tensor.placements)} of shape {list(tensor.shape)} on mesh "
            f"{list(tensor.device_mesh.shape)} give a local shape of {list(expected)} at {coordinate}, but the "
            f"local tensor has {list(local.shape)}; redistribute() it to Shard or Replicate placements"
        )
    return boxes, (local,) if len(boxes) == 1 else tuple(local[where] for where in places)


def range_boxes(
    name: str, memory: torch.Tensor, shape: Sequence[int], start: int
) -> tuple[tuple[Box, ...], tuple[torch.Tensor, ...]]:
    """The boxes of a global tensor of which 1-D memory holds consecutive row-major elements.

    Args:
        name: What to call the tensor in errors.
        memory: The elements that this rank holds, shape ``[n]``.
        shape: Global shape.
        start: Which element of the global tensor the first one is.

    Returns:
        As :func:`tensor_boxes`.

    Raises:
        UnsupportedLayout: If the memory is on the meta device or not dense.
    """
    _check_dense(name, memory)
    boxes, begins, strides = _range_layout(tuple(shape), start, start + memory.numel(), memory.stride(0))
    detached, first = memory.detach(), memory.storage_offset()
    return boxes, tuple(
        detached.as_strided(box.lengths, of_box, first + begin)
        for box, begin, of_box in zip(boxes, begins, strides, strict=True)
    )


def dtensor_boxes(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
    *,
    shard_order: Mapping[int, Sequence[int]] | None = None,
) -> list[tuple[Box, tuple[slice, ...]]]:
    """The boxes that the rank at one mesh coordinate holds of a DTensor.

    A dimension that several mesh axes shard is cut by ``torch.chunk``, one axis after the other, from the left
    axis to the right one. A ``_StridedShard`` whose split factor is the product of axes to its right that
    shard the same dimension says that those were cut *before* it, as FSDP2 does. A ``_StridedShard`` with any
    other split factor is taken literally: the dimension is cut in ``split_factor`` parts, each part in as many
    chunks as the axis has ranks, and a rank holds its chunk of every part.

    Args:
        shape: Global shape.
        mesh_shape: Ranks along each mesh axis.
        coordinate: Position along each mesh axis.
        placements: One per mesh axis.
        shard_order: Mesh axes in cutting order by tensor dimension. Where given, strided shards of that
            dimension are taken literally.

    Returns:
        Each box with its index in the local tensor, in the local tensor's row-major order; adjacent ranges
        are merged, empty boxes left out.

    Raises:
        UnsupportedLayout: For a placement that is not a (strided) shard or replica.
    """
    return _product(_all_runs(shape, mesh_shape, coordinate, placements, shard_order or {}))


def _check_dense(name: str, tensor: torch.Tensor) -> None:
    if tensor.is_meta:
        raise UnsupportedLayout(f"{name}: is on the meta device; allocate it first, e.g. with to_empty()")
    if tensor.layout != torch.strided:
        raise UnsupportedLayout(f"{name}: layout {tensor.layout} has no boxes; convert it with to_dense()")
    wraps: bool = is_traceable_wrapper_subclass(tensor)  # a name, lest mypy deduce that it cannot be
    if wraps:
        raise UnsupportedLayout(f"{name}: tensor subclass {type(tensor).__name__} is not supported")


def _explicit_order(tensor: DTensor) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Tensor dimensions and their cutting order where the DTensor states one itself (PyTorch >= 2.10), else empty."""
    spec = tensor._spec
    if getattr(spec, "use_strided_shard_as_shard_order", True):
        return ()
    return tuple(
        (entry.tensor_dim, tuple(entry.mesh_dims)) for entry in getattr(spec, "shard_order", None) or ()
    )


# What follows is the same at each save again, and for DTensors in many tensors of a model.

_MAX_KNOWN: Final = 4096

# By id: the spec, which is kept so that no other gets its id, this rank's coordinate, and what follows from both.
_known_specs: dict[int, tuple[DTensorSpec, tuple[int, ...], _Layout]] = {}


@lru_cache(maxsize=_MAX_KNOWN)
def _whole(shape: tuple[int, ...]) -> tuple[Box, ...]:
    """The box of a tensor that is held whole, if it has elements."""
    box = Box.whole(shape)
    return (box,) if box.num_elements else ()


@lru_cache(maxsize=_MAX_KNOWN)
def _range_layout(
    shape: tuple[int, ...], start: int, stop: int, stride: int
) -> tuple[tuple[Box, ...], tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """The boxes of a range, and in the storage of its memory where each begins, from the first on, and its strides."""
    boxes = tuple(flat_boxes(shape, start, stop))
    sizes = (stride * box.num_elements for box in boxes)
    begins = tuple(itertools.accumulate(sizes, initial=0))[: len(boxes)]
    return boxes, begins, tuple(_contiguous(box.lengths, stride) for box in boxes)


def _contiguous(lengths: Sequence[int], stride: int) -> tuple[int, ...]:
    """Strides of elements that lie in row-major order, each so far from the one before."""
    strides = itertools.accumulate(reversed(lengths[1:]), int.__mul__, initial=stride)
    return tuple(strides)[::-1] if lengths else ()


def _layout_of(tensor: DTensor, coordinate: tuple[int, ...]) -> _Layout:
    """As :func:`_local_layout`."""
    # By identity: a tensor keeps its spec, and moments of like parameters share one; to compare two takes as long as
    # all the rest. PyTorch's own caches keep specs, too.
    spec = tensor._spec
    known = _known_specs.get(id(spec))
    if known is None or known[1] != coordinate:
        layout = _local_layout(
            tuple(tensor.shape),
            spec.mesh.shape,
            coordinate,
            tuple(spec.placements),
            _explicit_order(tensor),
        )
        if len(_known_specs) >= _MAX_KNOWN:
            _known_specs.clear()
        known = _known_specs[id(spec)] = (spec, coordinate, layout)
    return known[2]


@lru_cache(maxsize=_MAX_KNOWN)
def _local_layout(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
    placements: tuple[Placement, ...],
    order: tuple[tuple[int, tuple[int, ...]], ...],
) -> _Layout:
    """Shape of the local tensor, its boxes, and where in it they are; see :func:`dtensor_boxes`."""
    runs = _all_runs(shape, mesh_shape, coordinate, placements, dict(order))
    pieces = _product(runs)
    expected = tuple(sum(length for _, length in dim_runs) for dim_runs in runs)
    return expected, tuple(box for box, _ in pieces), tuple(where for _, where in pieces)


def _all_runs(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
    shard_order: Mapping[int, Sequence[int]],
) -> list[_Runs]:
    """The ranges held along each tensor dimension."""
    axes_of: dict[int, list[int]] = {}
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard | _StridedShard):
            axes_of.setdefault(placement.dim, []).append(axis)
        elif type(placement) is not Replicate:
            raise UnsupportedLayout(
                f"placement {placement} on mesh axis {axis} holds no part of the global tensor; "
                "redistribute() it to Shard or Replicate placements"
            )
    runs: list[_Runs] = []
    for dim, extent in enumerate(shape):
        axes = axes_of.get(dim, [])
        factors = {axis: _split_factor(placements[axis]) for axis in axes}
        order: Sequence[int] | None = shard_order.get(dim)
        if order is None:
            order = _decoded_order(axes, mesh_shape, factors)
            if order is None:
                order = axes
            else:
                factors = dict.fromkeys(axes, 1)
        held: _Runs = ((0, extent),)
        for axis in order:
            held = _cut(held, factors[axis], mesh_shape[axis], coordinate[axis])
        runs.append(held)
    return runs


def _split_factor(placement: Placement) -> int:
    return int(placement.split_factor) if isinstance(placement, _StridedShard) else 1


def _decoded_order(
    axes: Sequence[int], mesh_shape: Sequence[int], factors: Mapping[int, int]
) -> list[int] | None:
    """Mesh axes in cutting order, as split factors encode it, or None when they encode no order.

    The split factor of an axis is the number of shards that earlier cuts by axes to its right have made, so,
    from right to left, each axis is inserted where that product is reached. It is the rule by which PyTorch
    redistributes such a DTensor (``DTensorSpec._maybe_convert_StridedShard_to_shard_order``).
    """
    order: list[int] = []
    for axis in reversed(axes):
        products = itertools.accumulate((mesh_shape[done] for done in order), int.__mul__, initial=1)
        position = next((at for at, product in enumerate(products) if product == factors[axis]), None)
        if position is None:
            return None
        order.insert(position, axis)
    return order


def _cut(runs: _Runs, split_factor: int, num_chunks: int, index: int) -> _Runs:
    """Chunk ``index`` of ``num_chunks`` of each of ``split_factor`` parts of some ranges, merged."""
    extent = sum(length for _, length in runs)
    merged: list[tuple[int, int]] = []
    for part in range(split_factor):
        part_start, part_stop = _chunk(extent, split_factor, part)
        start, stop = _chunk(part_stop - part_start, num_chunks, index)
        for first, length in _slice(runs, part_start + start, part_start + stop):
            if merged and sum(merged[-1]) == first:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((first, length))
    return tuple(merged)


def _chunk(extent: int, num_chunks: int, index: int) -> tuple[int, int]:
    """Start and stop of a chunk as ``torch.chunk`` makes them, empty when it makes fewer."""
    size = -(-extent // num_chunks)
    return min(index * size, extent), min((index + 1) * size, extent)


def _slice(runs: _Runs, start: int, stop: int) -> list[tuple[int, int]]:
    """Positions ``start`` to ``stop`` of the concatenation of some ranges."""
    taken = []
    for first, length in runs:
        begin, end = max(start, 0), min(stop, length)
        if begin < end:
            taken.append((first + begin, end - begin))
        start, stop = start - length, stop - length
    return taken


def _product(runs: Sequence[_Runs]) -> list[tuple[Box, tuple[slice, ...]]]:
    """Boxes with their index in the local tensor, from the ranges along each dimension."""
    indexed: list[list[tuple[int, int, slice]]] = []
    for dim_runs in runs:
        # A dimension of extent 0 keeps its empty range when no axis cuts it.
        kept = [run for run in dim_runs if run[1]]
        stops = list(itertools.accumulate(length for _, length in kept))
        indexed.append(
            [
                (first, length, slice(stop - length, stop))
                for (first, length), stop in zip(kept, stops, strict=True)
            ]
        )
    return [
        (
            Box(tuple(first for first, _, _ in combo), tuple(length for _, length, _ in combo)),
            tuple(where for _, _, where in combo),
        )
        for combo in itertools.product(*indexed)
    ]


def _text(placements: Sequence[Placement]) -> str:
    return "(" + ", ".join(map(str, placements)) + ")"
