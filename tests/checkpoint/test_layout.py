"""Boxes of DTensors against a simulation that chunks tensors of element numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from checkpoint.boxes import Box, check_tiling, slices_within
from checkpoint.errors import UnsupportedLayout
from checkpoint.frameworks.layout import dtensor_boxes, tensor_boxes

meshes = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)
shapes = st.lists(st.sampled_from([1, 2, 3, 5, 7, 8, 13, 27]), min_size=1, max_size=3).map(tuple)


def coordinates(mesh):
    return list(np.ndindex(*mesh))


def chunk(tensor, num_chunks, index, dim):
    """A chunk as DTensor and FSDP make it: ``torch.chunk``, empty where that gives fewer."""
    chunks = torch.chunk(tensor, num_chunks, dim)
    return chunks[index] if index < len(chunks) else tensor.narrow(dim, 0, 0)


def strided_chunk(tensor, split_factor, num_chunks, index, dim):
    parts = [chunk(tensor, split_factor, part, dim) for part in range(split_factor)]
    return torch.cat([chunk(part, num_chunks, index, dim) for part in parts], dim)


def numbered(shape):
    return torch.arange(math.prod(shape)).reshape(shape)


def assert_boxes_hold(boxes, shape, local):
    """The boxes, cut from the numbered tensor, are the local tensor: every element, in place, once."""
    full, seen = numbered(shape), torch.full_like(local, -1)
    for box, where in boxes:
        assert box.num_elements > 0
        assert (seen[where] == -1).all()
        seen[where] = full[slices_within(box, Box.whole(shape))]
    assert torch.equal(seen, local)


def assert_tiled(shape, boxes):
    """Distinct boxes of all ranks tile the tensor (replicas repeat boxes, they never overlap otherwise)."""
    distinct = sorted({(box.offsets, box.lengths) for box in boxes})
    offsets = np.array([low for low, _ in distinct], dtype=np.int64).reshape(len(distinct), len(shape))
    lengths = np.array([size for _, size in distinct], dtype=np.int64).reshape(len(distinct), len(shape))
    check_tiling(shape, offsets, lengths)


@st.composite
def ordered_layouts(draw):
    """Any shape and mesh, each axis on some dimension or none, the axes of a dimension cut in any order."""
    mesh, shape = draw(meshes), draw(shapes)
    dims = [draw(st.integers(-1, len(shape) - 1)) for _ in mesh]
    order = draw(st.permutations(range(len(mesh))))
    placements = []
    for axis, dim in enumerate(dims):
        if dim < 0:
            placements.append(Replicate())
            continue
        before = order[: order.index(axis)]
        factor = math.prod(mesh[other] for other in before if other > axis and dims[other] == dim)
        placements.append(_StridedShard(dim, split_factor=factor) if factor > 1 else Shard(dim))
    return shape, mesh, dims, order, tuple(placements)


@given(ordered_layouts())
@settings(max_examples=300)
def test_axes_are_cut_in_the_order_that_split_factors_encode(layout):
    shape, mesh, dims, order, placements = layout
    everything = []
    for coordinate in coordinates(mesh):
        local = numbered(shape)
        for axis in order:
            if dims[axis] >= 0:
                local = chunk(local, mesh[axis], coordinate[axis], dims[axis])
        boxes = dtensor_boxes(shape, mesh, coordinate, placements)
        assert_boxes_hold(boxes, shape, local)
        assert len(boxes) <= 1
        everything += [box for box, _ in boxes]
    assert_tiled(shape, everything)


@st.composite
def literal_layouts(draw):
    """Strided shards with any split factor, to be cut from left to right as they stand."""
    mesh, shape = draw(meshes), draw(shapes)
    placements = []
    for _ in mesh:
        dim = draw(st.integers(-1, len(shape) - 1))
        factor = draw(st.integers(1, 5))
        if dim < 0:
            placements.append(Replicate())
        else:
            placements.append(_StridedShard(dim, split_factor=factor) if factor > 1 else Shard(dim))
    return shape, mesh, tuple(placements)


def literal_local(shape, mesh, coordinate, placements):
    local = numbered(shape)
    for axis, placement in enumerate(placements):
        if isinstance(placement, _StridedShard):
            factor = placement.split_factor
            local = strided_chunk(local, factor, mesh[axis], coordinate[axis], placement.dim)
        elif isinstance(placement, Shard):
            local = chunk(local, mesh[axis], coordinate[axis], placement.dim)
    return local


@given(literal_layouts())
@settings(max_examples=300)
def test_strided_shards_taken_literally_are_several_boxes(layout):
    shape, mesh, placements = layout
    order = {dim: range(len(mesh)) for dim in range(len(shape))}
    order = {
        dim: [axis for axis in axes if getattr(placements[axis], "dim", None) == dim]
        for dim, axes in order.items()
    }
    everything = []
    for coordinate in coordinates(mesh):
        boxes = dtensor_boxes(shape, mesh, coordinate, placements, shard_order=order)
        assert_boxes_hold(boxes, shape, literal_local(shape, mesh, coordinate, placements))
        everything += [box for box, _ in boxes]
    # Boxes of different ranks may cut each other only where they replicate, which none of these does.
    if not any(isinstance(placement, Replicate) for placement in placements):
        assert sum(box.num_elements for box in everything) == math.prod(shape)
        assert_tiled(shape, everything)


@pytest.mark.parametrize(
    ("mesh", "placements"),
    [
        ((4,), (_StridedShard(0, split_factor=2),)),
        ((3, 2), (_StridedShard(0, split_factor=3), Shard(0))),
        ((2, 3), (_StridedShard(0, split_factor=4), Shard(1))),
        ((2, 2), (Shard(0), _StridedShard(0, split_factor=3))),
        ((2, 2, 2), (_StridedShard(0, split_factor=8), Shard(0), _StridedShard(0, split_factor=3))),
    ],
)
@pytest.mark.parametrize("rows", [1, 2, 5, 7, 13, 27, 48])
def test_a_strided_shard_without_partner_is_taken_literally(mesh, placements, rows):
    shape = (rows, 4)
    num_boxes = []
    for coordinate in coordinates(mesh):
        boxes = dtensor_boxes(shape, mesh, coordinate, placements)
        assert_boxes_hold(boxes, shape, literal_local(shape, mesh, coordinate, placements))
        num_boxes.append(len(boxes))
    if rows == 48:
        assert max(num_boxes) > 1


def test_fsdp_over_an_uneven_tensor_parallel_dimension():
    """13 rows on dp3 x tp2: rank 4, at (2, 0), holds row 6 and nothing of row 7."""
    placements = (_StridedShard(0, split_factor=2), Shard(0))
    held = {at: dtensor_boxes((13,), (3, 2), at, placements) for at in coordinates((3, 2))}
    rows = {at: (boxes[0][0].offsets[0], boxes[0][0].ends[0]) for at, boxes in held.items()}
    assert rows == {
        (0, 0): (0, 3),
        (1, 0): (3, 6),
        (2, 0): (6, 7),
        (0, 1): (7, 9),
        (1, 1): (9, 11),
        (2, 1): (11, 13),
    }


def test_an_explicit_cutting_order_is_followed():
    boxes = dtensor_boxes((8,), (2, 4), (1, 0), (Shard(0), Shard(0)), shard_order={0: (1, 0)})
    assert boxes == [(Box((1,), (1,)), (slice(0, 1),))]


def test_a_scalar_is_one_box_and_an_empty_tensor_none():
    assert dtensor_boxes((), (2,), (1,), (Replicate(),)) == [(Box((), ()), ())]
    assert dtensor_boxes((0, 3), (2,), (1,), (Shard(0),)) == []
    assert dtensor_boxes((3, 0), (2,), (1,), (Replicate(),)) == []


@pytest.mark.parametrize("partial", [Partial(), Partial("avg")])
def test_partial_placements_are_refused_by_name(partial):
    with pytest.raises(UnsupportedLayout, match=r"P\(.*\) on mesh axis 1 .* redistribute\(\)"):
        dtensor_boxes((4,), (2, 2), (0, 0), (Shard(0), partial))


def test_a_plain_tensor_is_held_whole_and_its_view_is_live():
    tensor = torch.zeros(2, 3, requires_grad=True)
    boxes, views = tensor_boxes("w", tensor)
    assert boxes == (Box((0, 0), (2, 3)),)
    views[0].fill_(5)
    assert (tensor == 5).all()
    assert tensor_boxes("w", torch.empty(0, 3)) == ((), ())
    assert tensor_boxes("w", torch.tensor(1.0))[0] == (Box((), ()),)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.empty(2, device="meta"), "w: is on the meta device"),
        (torch.eye(2).to_sparse(), "w: layout torch.sparse_coo"),
    ],
)
def test_tensors_without_plain_memory_are_refused_by_name(tensor, message):
    with pytest.raises(UnsupportedLayout, match=message):
        tensor_boxes("w", tensor)
