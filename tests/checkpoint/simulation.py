"""Ranks simulated by threads of one process: the engine with everything real but processes and DTensors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import pytest
import torch
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from checkpoint.boxes import Box
from checkpoint.engine.coordination import Coordinator
from checkpoint.engine.load import Loader, LoadReport
from checkpoint.engine.match import LoadOptions
from checkpoint.engine.save import SaveOptions, Saver
from checkpoint.frameworks.layout import dtensor_boxes
from checkpoint.frameworks.values import CapturedState, Found, LocalTensor, Stored
from checkpoint.handle import SaveReport
from storage import Store

T = TypeVar("T")
Layout = Sequence[Sequence[Box]]  # boxes by rank
Tensors = Mapping[str, torch.Tensor]

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]

OPTIONS = SaveOptions(step=7, overwrite=False, timeout_s=20, user_metadata={"who": "test"})


def run_ranks(world_size: int, fn: Callable[[Coordinator], T]) -> list[T]:
    """Call ``fn`` with each rank's coordinator, all at once; results by rank, or what the ranks raised."""
    store = HashStore()
    pool = ThreadPoolExecutor(world_size, thread_name_prefix="simulated-rank")
    ranks = [
        pool.submit(lambda rank=rank: fn(Coordinator(store, rank, world_size))) for rank in range(world_size)
    ]
    pool.shutdown(wait=False)
    assert not wait(ranks, timeout=60).not_done, "a simulated rank hangs"
    raised = [error for rank in ranks if (error := rank.exception()) is not None]
    if raised:
        raise BaseExceptionGroup("ranks raised", raised)
    return [rank.result() for rank in ranks]


def raised_by_ranks(world_size: int, fn: Callable[[Coordinator], object]) -> list[BaseException]:
    """What each of the ranks raised; all must."""
    with pytest.raises(BaseExceptionGroup) as caught:
        run_ranks(world_size, fn)
    assert len(caught.value.exceptions) == world_size, caught.value.exceptions
    return list(caught.value.exceptions)


def random_bits(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bit pattern, so that not-a-numbers and subnormals are among the values."""
    generator = torch.Generator().manual_seed(seed)
    num_bytes = math.prod(shape) * dtype.itemsize
    data = torch.randint(
        0, 2 if dtype == torch.bool else 256, (num_bytes,), dtype=torch.uint8, generator=generator
    )
    return data.view(dtype).view(list(shape))


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor in row-major order: what exactness is about."""
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy().tobytes()


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, end) for start, end in zip(box.offsets, box.ends, strict=True))


def held(key: str, tensor: torch.Tensor, boxes: Sequence[Box], *, group: str = "model") -> LocalTensor:
    """A rank's part of a global tensor, as (strided) views of it."""
    return LocalTensor(
        group=group,
        key=key,
        dtype=tensor.dtype,
        shape=tuple(tensor.shape),
        boxes=tuple(boxes),
        views=tuple(tensor[slices(box)] for box in boxes),
        tensor=tensor,
    )


def captured(tensors: Tensors, layouts: Mapping[str, Layout], rank: int) -> CapturedState:
    return CapturedState(
        tensors=[held(key, tensor, layouts[key][rank]) for key, tensor in sorted(tensors.items())],
        objects={"model": {"kind": "test"}},
        rank_objects={"rng": rank},
    )


def save_simulated(
    store: Store,
    world_size: int,
    tensors: Tensors,
    layouts: Mapping[str, Layout],
    *,
    background: bool = False,
    options: SaveOptions = OPTIONS,
) -> list[SaveReport]:
    """Save global tensors cut into boxes over simulated ranks."""

    def fn(coordinator: Coordinator) -> SaveReport:
        saver = Saver(coordinator)
        mine = captured(tensors, layouts, coordinator.rank)
        return saver.save(store, lambda: mine, options, background=background).result(60)

    return run_ranks(world_size, fn)


def load_simulated(
    store: Store,
    world_size: int,
    expected: Tensors,
    layouts: Mapping[str, Layout],
    *,
    verify: bool = True,
    flat: bool = True,
    strict: bool = True,
    timeout_s: float = 20,
    stores: Sequence[Store] = (),
    machines: Sequence[bytes] = (),
) -> list[LoadReport]:
    """Load into simulated ranks and compare every box bit for bit.

    Destinations are contiguous, or with ``flat=False`` strided views of something larger. Each rank may have a store
    of its own, and be on a machine of its own: those of equal names share memory. By default all are on one.
    """

    def fn(coordinator: Coordinator) -> LoadReport:
        mine = []
        for key, tensor in sorted(expected.items()):
            boxes = layouts[key][coordinator.rank]
            views = tuple(_destination(tensor.dtype, box.lengths, flat) for box in boxes)
            mine.append(
                LocalTensor(
                    group="model",
                    key=key,
                    dtype=tensor.dtype,
                    shape=tuple(tensor.shape),
                    boxes=tuple(boxes),
                    views=views,
                    tensor=tensor,
                )
            )
        seen: list[object] = []

        def finish(
            stored: Stored, _: Sequence[LocalTensor], rank_objects: Mapping[str, object] | None
        ) -> None:
            seen.append((stored.objects, rank_objects))

        machine = machines[coordinator.rank] if machines else None
        report = Loader(coordinator, machine).load(
            stores[coordinator.rank] if stores else store,
            ["model"],
            lambda _: Found(tensors=mine),
            finish,
            LoadOptions(strict=strict, verify=verify, timeout_s=timeout_s),
        )
        for local in mine:
            for box, view in zip(local.boxes, local.views, strict=True):
                assert bits(view) == bits(expected[local.key][slices(box)]), (local.key, box)
        assert len(seen) == 1
        return report

    return run_ranks(world_size, fn)


def _destination(dtype: torch.dtype, lengths: tuple[int, ...], flat: bool) -> torch.Tensor:
    if flat or not lengths:
        return random_bits(lengths, dtype, seed=99)
    larger = random_bits([2 * length + 1 for length in lengths], dtype, seed=99)
    return larger[tuple(slice(1, None, 2) for _ in lengths)]


@st.composite
def layouts(draw: st.DrawFn, shape: Sequence[int], world_size: int) -> Layout:
    """Boxes by rank that tile a tensor: of a random DTensor, or cut and dealt at random, with replicas."""
    if 0 in shape:
        return [[] for _ in range(world_size)]
    if not shape or draw(st.booleans()):
        return draw(dtensor_layouts(shape, world_size))
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 5))):
        index = draw(st.integers(0, len(boxes) - 1))
        dim = draw(st.integers(0, len(shape) - 1))
        box = boxes[index]
        if box.lengths[dim] > 1:
            cut = draw(st.integers(1, box.lengths[dim] - 1))
            boxes[index : index + 1] = _cut(box, dim, cut)
    ranks: list[list[Box]] = [[] for _ in range(world_size)]
    for box in draw(st.permutations(boxes)):
        for rank in draw(st.sets(st.integers(0, world_size - 1), min_size=1)):
            ranks[rank].append(box)
    return ranks


@st.composite
def resharded(
    draw: st.DrawFn, saving: int, loading: int
) -> tuple[Tensors, dict[str, Layout], dict[str, Layout]]:
    """One to three tensors, and the boxes of the ranks that save them and of those that load them."""
    tensors, saved, loaded = {}, {}, {}
    for index in range(draw(st.integers(1, 3))):
        key, shape = f"t{index}", draw(shapes)
        tensors[key] = random_bits(shape, draw(st.sampled_from(DTYPES)), seed=index)
        saved[key] = draw(layouts(shape, saving))
        loaded[key] = draw(layouts(shape, loading))
    return tensors, saved, loaded


def _cut(box: Box, dim: int, at: int) -> list[Box]:
    offsets, lengths = list(box.offsets), list(box.lengths)
    left = Box(box.offsets, (*lengths[:dim], at, *lengths[dim + 1 :]))
    offsets[dim] += at
    return [left, Box(tuple(offsets), (*lengths[:dim], lengths[dim] - at, *lengths[dim + 1 :]))]


@st.composite
def dtensor_layouts(draw: st.DrawFn, shape: Sequence[int], world_size: int) -> Layout:
    """The boxes of a DTensor with random placements on a random mesh of ``world_size`` ranks."""
    meshes = [(world_size,), *((a, world_size // a) for a in range(1, world_size + 1) if world_size % a == 0)]
    mesh_shape = draw(st.sampled_from(meshes))
    choices = [st.just(Replicate())]
    for dim in range(len(shape)):
        choices.append(st.just(Shard(dim)))
        choices.append(st.builds(_StridedShard, st.just(dim), split_factor=st.integers(1, 3)))
    placements: list[Placement] = [draw(st.one_of(choices)) for _ in mesh_shape]
    return [
        [box for box, _ in dtensor_boxes(shape, mesh_shape, coordinate, placements)]
        for coordinate in itertools.product(*map(range, mesh_shape))
    ]


shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple)
"""Shapes of 0 to 4 dimensions, dimensions of no and of one element among them."""
