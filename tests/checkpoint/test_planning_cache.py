"""A state that was saved before is not planned again; one that differs anywhere, on any rank, is."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from checkpoint.boxes import Box
from checkpoint.compression import Compression
from checkpoint.engine.coordination import Coordinator
from checkpoint.engine.options import SaveOptions
from checkpoint.engine.save import Saver
from checkpoint.errors import AlreadyCommitted, StateError
from checkpoint.format.manifest import read_manifest, read_metadata
from checkpoint.frameworks.values import CapturedState, LocalTensor
from checkpoint.stored import StoredCheckpoint
from checkpoint.verify import verify
from storage import Store
from tests.checkpoint.simulation import held, raised_by_ranks, random_bits, run_ranks

_numbers = itertools.count()
WORLD_SIZE = 3
CUT = random_bits((6, 4), torch.float32, seed=1)
WHOLE = random_bits((5,), torch.int16, seed=2)


def place() -> Store:
    return Store(f"memory://planning/{next(_numbers)}")


class Watched(Coordinator):
    """Notes the stages that it goes through and how much this rank has to say in each."""

    stages: list[tuple[str, int]]

    def round(self, name: str, stage: str, local: Callable[[], bytes], decide: Any, **kwargs: Any) -> bytes:
        def noted() -> bytes:
            message = local()
            self.stages.append((stage, len(message)))
            return message

        return super().round(name, stage, noted, decide, **kwargs)


def tensors(rank: int) -> list[LocalTensor]:
    """One that is cut over the ranks, one that all have; and forty more, so that what is said has a size."""
    rows = [Box((2 * rank, 0), (2, 4))]
    many = [held(f"u{index:02d}", WHOLE, [Box.whole((5,))]) for index in range(40)]
    return [held("a", CUT, rows), held("b", WHOLE, [Box.whole((5,))]), *many]


def save(
    saver: Saver,
    store: Store,
    state: list[LocalTensor],
    *,
    background: bool = False,
    compression: Compression | None = None,
) -> None:
    options = SaveOptions(step=1, overwrite=False, timeout_s=20, user_metadata={}, compression=compression)
    captured = CapturedState(tensors=state, objects={"model": {}}, rank_objects={})
    saver.save(store, lambda: captured, options, background=background).result(20)


def layout_of(store: Store) -> Mapping[str, bytes]:
    manifest, _ = read_manifest(store)
    names = ("tensors.parquet", "shards.parquet", "stored.parquet", "files.parquet")
    return {name: read_metadata(store, manifest, name) for name in names}


def watched(coordinator: Coordinator) -> Watched:
    seat = Watched(coordinator._origin, coordinator.rank, coordinator.world_size)
    seat.stages = []
    return seat


@pytest.mark.parametrize("background", [False, True])
def test_a_second_save_is_planned_in_one_short_round_and_writes_the_same(background: bool) -> None:
    """Also as what a rank that never saved before would write."""
    stores = [place() for _ in range(4)]

    def fn(coordinator: Coordinator) -> list[tuple[str, int]]:
        seat = watched(coordinator)
        saver = Saver(seat)
        for store in stores[:3]:
            save(saver, store, tensors(coordinator.rank), background=background)
        save(Saver(coordinator.fork()), stores[3], tensors(coordinator.rank))
        return [one for one in seat.stages if one[0] != "write"]

    for stages in run_ranks(WORLD_SIZE, fn):
        assert [stage for stage, _ in stages] == ["plan"] * 3
        sizes = [size for _, size in stages]
        assert sizes[1] == sizes[2] < 400 < sizes[0]
    for store in stores:
        assert layout_of(store) == layout_of(stores[0])
        assert verify(StoredCheckpoint.open(store)).problems == ()


_CHANGES: dict[str, Callable[[list[LocalTensor]], list[LocalTensor]]] = {
    "a key": lambda state: [replace(state[0], key="A"), *state[1:]],
    "a group": lambda state: [replace(state[0], group="other"), *state[1:]],
    "a tensor more": lambda state: [*state, held("z", WHOLE, [Box.whole((5,))])],
    "a tensor less": lambda state: [*state[:20], *state[21:]],
    "a replica less": lambda state: [replace(state[0]), held("b", WHOLE, []), *state[2:]],
    "a box cut in two": lambda state: [
        held("a", CUT, [Box(state[0].boxes[0].offsets, (1, 4)), _below(state[0].boxes[0])]),
        *state[1:],
    ],
    "another order": lambda state: state[::-1],
}


def _below(box: Box) -> Box:
    return Box((box.offsets[0] + 1, box.offsets[1]), (1, 4))


@pytest.mark.parametrize("differing", range(WORLD_SIZE))
@pytest.mark.parametrize("change", _CHANGES)
def test_any_difference_on_any_rank_makes_all_plan_anew(change: str, differing: int) -> None:
    """And both states are known afterwards."""
    stores = [place() for _ in range(4)]

    def changed(rank: int) -> list[LocalTensor]:
        state = tensors(rank)
        if change in ("a key", "a group"):  # not on one rank alone: another has the rest of the tensor
            return _CHANGES[change](state)
        return _CHANGES[change](state) if rank == differing else state

    def fn(coordinator: Coordinator) -> list[str]:
        seat = watched(coordinator)
        saver = Saver(seat)
        for store, state in zip(stores, [tensors, changed, tensors, changed], strict=True):
            save(saver, store, state(coordinator.rank))
        return [stage for stage, _ in seat.stages if stage != "write"]

    for stages in run_ranks(WORLD_SIZE, fn):
        if change in ("a key", "a group"):
            assert stages == ["plan"] * 4
        else:
            assert stages == ["plan", "plan", "describe", "plan", "plan"]
    assert layout_of(stores[0]) == layout_of(stores[2])
    assert layout_of(stores[1]) == layout_of(stores[3])
    reference = place()
    run_ranks(WORLD_SIZE, lambda one: save(Saver(one), reference, changed(one.rank)))
    assert layout_of(stores[1]) == layout_of(reference)
    assert verify(StoredCheckpoint.open(stores[1])).problems == ()


@pytest.mark.parametrize(
    "other",
    [random_bits((5,), torch.bfloat16, seed=3), random_bits((6,), torch.int16, seed=3)],
    ids=["dtype", "shape"],
)
def test_another_dtype_or_shape_makes_all_plan_anew(other: torch.Tensor) -> None:
    stores = [place(), place()]

    def fn(coordinator: Coordinator) -> None:
        saver = Saver(coordinator)
        save(saver, stores[0], tensors(coordinator.rank))
        state = tensors(coordinator.rank)
        state[1] = held("b", other, [Box.whole(other.shape)])
        save(saver, stores[1], state)

    run_ranks(WORLD_SIZE, fn)
    found = StoredCheckpoint.open(stores[1])
    row = found.tables.tensors[found.tensor_ids["model", "b"]]
    assert (row.dtype, row.shape) == (str(other.dtype).removeprefix("torch."), tuple(other.shape))
    assert verify(found).problems == ()


def test_a_dtype_that_differs_on_one_rank_is_refused_though_the_others_know_a_plan() -> None:
    stores = [place(), place()]

    def fn(coordinator: Coordinator) -> None:
        saver = Saver(coordinator)
        save(saver, stores[0], tensors(coordinator.rank))
        state = tensors(coordinator.rank)
        if coordinator.rank == 2:
            state[1] = held("b", WHOLE.view(torch.bfloat16), [Box.whole((5,))])
        save(saver, stores[1], state)

    for error in raised_by_ranks(WORLD_SIZE, fn):
        assert type(error) is StateError
        assert "model/b: bfloat16 [5] on rank 2, but int16 [5] on rank 0" in str(error)
    assert stores[1].list() == []


def test_other_compression_is_laid_out_anew() -> None:
    stores = [place(), place()]
    large = torch.zeros(3, 4096)

    def fn(coordinator: Coordinator) -> None:
        saver = Saver(coordinator)
        state = [held("a", large, [Box((coordinator.rank, 0), (1, 4096))])]
        save(saver, stores[0], state)
        save(saver, stores[1], state, compression={"model": "zstd"})

    run_ranks(WORLD_SIZE, fn)
    sizes = [
        sum(file.size for file in store.list() if file.path.endswith(".safetensors")) for store in stores
    ]
    assert sizes[1] < sizes[0] - 40_000
    assert verify(StoredCheckpoint.open(stores[1])).problems == ()


def test_only_the_last_two_states_are_known() -> None:
    states = [[held(key, WHOLE, [Box.whole((5,))])] for key in "abc"]

    def fn(coordinator: Coordinator) -> list[int]:
        seat = watched(coordinator)
        saver = Saver(seat)
        for index in (0, 1, 0, 1, 2, 1, 0):
            save(saver, place(), states[index])
        return [size for stage, size in seat.stages if stage == "plan"]

    (sizes,) = run_ranks(1, fn)
    known = [size == sizes[2] for size in sizes]
    assert known == [False, False, True, True, False, True, False]


def test_a_known_plan_does_not_skip_the_checks_of_a_save() -> None:
    store = place()

    def fn(coordinator: Coordinator) -> None:
        saver = Saver(coordinator)
        save(saver, store, tensors(coordinator.rank))
        save(saver, store, tensors(coordinator.rank))

    for error in raised_by_ranks(WORLD_SIZE, fn):
        assert type(error) is AlreadyCommitted
