"""The commit protocol, between simulated ranks: all commit or none, all raise alike, nothing half is visible."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from checkpoint.boxes import Box
from checkpoint.engine import save as save_module
from checkpoint.engine.coordination import Coordinator
from checkpoint.engine.save import SaveOptions, Saver
from checkpoint.errors import (
    AlreadyCommitted,
    AsyncSaveFailed,
    CoordinationTimeout,
    ObjectsDiffer,
    RanksFailed,
    StateError,
    TilingError,
)
from checkpoint.format.manifest import read_manifest
from checkpoint.frameworks.values import CapturedState
from checkpoint.handle import SaveHandle
from checkpoint.stored import StoredCheckpoint
from checkpoint.verify import verify
from storage import Store
from storage.errors import NoSpace
from tests.checkpoint.simulation import (
    OPTIONS,
    captured,
    held,
    load_simulated,
    raised_by_ranks,
    random_bits,
    run_ranks,
    save_simulated,
)
from tests.checkpoint.watched_store import WatchedStore

_numbers = itertools.count()
TENSOR = random_bits((6, 4), torch.float32, seed=1)
ROWS = [[Box((2 * rank, 0), (2, 4))] for rank in range(3)]


def place() -> str:
    return f"memory://commit/{next(_numbers)}"


def state(rank: int, objects: Mapping[str, object] | None = None) -> CapturedState:
    return CapturedState(
        tensors=[held("t", TENSOR, ROWS[rank])],
        objects=dict(objects or {"model": {"kind": "test"}}),
        rank_objects={"rng": rank},
    )


def options(*, overwrite: bool = False, timeout_s: float = 20) -> SaveOptions:
    return SaveOptions(step=1, overwrite=overwrite, timeout_s=timeout_s, user_metadata={})


def save(
    coordinator: Coordinator,
    store: Store,
    capture: Callable[[], CapturedState] | None = None,
    **kwargs: object,
) -> SaveHandle:
    chosen = options(**kwargs)  # type: ignore[arg-type]
    mine = capture or (lambda: state(coordinator.rank))
    return Saver(coordinator).save(store, mine, chosen, background=False)


def test_a_second_save_is_refused_on_all_ranks_and_changes_nothing() -> None:
    store = Store(place())
    run_ranks(3, lambda c: save(c, store))
    before = [(file.path, store.read(file.path)) for file in store.list()]
    for error in raised_by_ranks(3, lambda c: save(c, store)):
        assert type(error) is AlreadyCommitted
        assert "overwrite=True" in str(error)
    assert [(file.path, store.read(file.path)) for file in store.list()] == before


def test_overwrite_swaps_the_manifest_and_keeps_the_replaced_attempt_for_one_more_save() -> None:
    store = Store(place())
    attempts = []
    for _ in range(4):
        run_ranks(3, lambda c: save(c, store, overwrite=True))
        attempts.append(read_manifest(store)[0].attempt)
        assert set(store.list_dirs("data")) == set(attempts[-2:])
        load_simulated(store, 1, {"t": TENSOR}, {"t": [[Box.whole((6, 4))]]})
    assert read_manifest(store)[0].replaces == attempts[-2]


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("background", [False, True])
def test_a_rank_that_cannot_write_fails_the_save_on_all_ranks_alike(failing: int, background: bool) -> None:
    url = place()

    def full(point: str) -> None:
        if point.startswith("before data"):
            raise NoSpace("disk", "full")

    def fn(coordinator: Coordinator) -> None:
        store = WatchedStore(url, full) if coordinator.rank == failing else Store(url)
        saver = Saver(coordinator)
        saver.save(store, lambda: state(coordinator.rank), options(), background=background).result(20)

    errors = raised_by_ranks(3, fn)
    for error in errors:
        assert isinstance(error, RanksFailed)
        (member,) = error.members
        assert (member.rank, member.stage, member.kind) == (failing, "write", "NoSpace")
        assert str(member) == str(errors[0].exceptions[0])  # type: ignore[attr-defined]
    assert Store(url).list() == []  # neither visible nor left over


@pytest.mark.parametrize("world_size", [1, 3])
def test_ranks_that_all_fail_alike_to_write_leave_nothing_over(
    world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = place()
    write = save_module.write_files

    def write_and_fail(*args: Any, **kwargs: Any) -> None:
        write(*args, **kwargs)
        raise StateError("t: cannot be compressed")

    monkeypatch.setattr(save_module, "write_files", write_and_fail)
    cut = ROWS if world_size == 3 else [[Box.whole((6, 4))]]
    for error in raised_by_ranks(
        world_size, lambda c: save(c, Store(url), lambda: captured({"t": TENSOR}, {"t": cut}, c.rank))
    ):
        assert type(error) is StateError
    assert Store(url).list() == []


def test_what_a_rank_that_is_late_may_still_write_stays_when_another_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = place()
    write = save_module.write_files
    gave_up = threading.Event()

    def write_some(data: Store, layouts: Any, sources: Any, **kwargs: Any) -> Any:
        if threading.current_thread().name == "rank-0":
            raise StateError("t: cannot be compressed")
        written = write(data, layouts, sources, **kwargs)
        assert gave_up.wait(20)
        return written

    monkeypatch.setattr(save_module, "write_files", write_some)

    def fn(coordinator: Coordinator) -> None:
        threading.current_thread().name = f"rank-{coordinator.rank}"
        try:
            save(
                coordinator,
                Store(url),
                lambda: captured({"t": TENSOR}, {"t": ROWS}, coordinator.rank),
                timeout_s=0.5,
            )
        finally:
            gave_up.set()

    for error in raised_by_ranks(3, fn):
        assert isinstance(error, CoordinationTimeout)
        assert "ranks 1, 2 did not finish stage 'write'" in str(error)
    assert len(Store(url).list()) == 2


def test_a_manifest_that_cannot_be_read_when_it_is_replaced_leaves_nothing_over() -> None:
    url = place()
    run_ranks(3, lambda c: save(c, Store(url)))
    before = [file.path for file in Store(url).list()]

    class Unreadable(Store):
        def read(self, path: str) -> bytes:
            raise NoSpace(path, "no memory")

    for error in raised_by_ranks(3, lambda c: save(c, Unreadable(url), overwrite=True)):
        assert isinstance(error, RanksFailed)
    assert [file.path for file in Store(url).list()] == before


def test_a_rank_that_fails_while_planning_fails_all() -> None:
    store = Store(place())

    def fn(coordinator: Coordinator) -> None:
        def capture() -> CapturedState:
            if coordinator.rank == 1:
                raise StateError("loader: cannot store a socket")
            return state(coordinator.rank)

        save(coordinator, store, capture)

    for error in raised_by_ranks(3, fn):
        assert isinstance(error, RanksFailed)
        assert (
            str(error.members[0])
            == "rank 1 failed in stage 'plan': StateError: loader: cannot store a socket"
        )
    assert store.list() == []


def test_ranks_that_all_fail_alike_raise_the_error_itself() -> None:
    def capture() -> CapturedState:
        raise StateError("model: lives on the meta device")

    store = Store(place())
    for error in raised_by_ranks(2, lambda c: save(c, store, capture)):
        assert type(error) is StateError


@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_does_not_come_is_named(absent: int) -> None:
    store = Store(place())
    ready = threading.Event()

    def fn(coordinator: Coordinator) -> str:
        if coordinator.rank == absent:
            ready.wait(30)
            return ""
        with pytest.raises(CoordinationTimeout) as caught:
            save(coordinator, store, timeout_s=0.2)
        ready.set()
        return str(caught.value)

    for rank, message in enumerate(run_ranks(2, fn)):
        if rank != absent:
            assert f"rank {absent} " in message
            assert "'plan'" in message
    assert store.list() == []


def test_a_rank_that_dies_after_planning_is_named_with_its_stage() -> None:
    url = place()
    ready = threading.Event()

    def fn(coordinator: Coordinator) -> str:
        def stuck(point: str) -> None:
            if point.startswith("before close"):
                ready.wait(30)

        store = WatchedStore(url, stuck) if coordinator.rank == 1 else Store(url)
        with pytest.raises(CoordinationTimeout) as caught:
            save(coordinator, store, timeout_s=0.5)
        ready.set()
        return str(caught.value)

    for message in run_ranks(3, fn):
        assert "rank 1 did not finish stage 'write'" in message
    assert not Store(url).exists("manifest.json")


def test_of_many_savers_of_one_place_exactly_one_commits() -> None:
    url = place()
    outcomes = []
    barrier = threading.Barrier(4)

    def racer(index: int) -> None:
        def together(point: str) -> None:
            if point == "before create manifest.json":
                barrier.wait(20)

        try:
            whole = CapturedState(
                tensors=[held("t", TENSOR, [Box.whole((6, 4))])], objects={"model": index}, rank_objects={}
            )
            run_ranks(1, lambda c: save(c, WatchedStore(url, together), lambda: whole))
            outcomes.append(index)
        except* AlreadyCommitted:
            pass

    threads = [threading.Thread(target=racer, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(outcomes) == 1
    assert StoredCheckpoint.open(Store(url)).objects == {"model": outcomes[0]}


def test_objects_that_differ_are_named_by_path() -> None:
    store = Store(place())

    def fn(coordinator: Coordinator) -> None:
        loader = {"sources": [{"epoch": 1}, {"epoch": 2 if coordinator.rank == 2 else 3}]}
        save(coordinator, store, lambda: state(coordinator.rank, {"model": {}, "loader": loader}))

    for error in raised_by_ranks(3, fn):
        assert type(error) is ObjectsDiffer
        assert "loader.sources[1].epoch" in str(error)
        assert "rank 2" in str(error)


def test_ranks_that_save_to_different_places_are_told() -> None:
    urls = [place(), place()]
    for error in raised_by_ranks(2, lambda c: save(c, Store(urls[c.rank]))):
        assert type(error) is ObjectsDiffer
        assert urls[1] in str(error)


def test_boxes_with_a_gap_are_refused_naming_the_tensor() -> None:
    store = Store(place())
    for error in raised_by_ranks(2, lambda c: save(c, store)):  # two of the three rows of boxes
        assert type(error) is TilingError
        assert "model/t" in str(error)
    assert store.list() == []


def test_ranks_that_disagree_about_a_shape_are_told() -> None:
    store = Store(place())

    def fn(coordinator: Coordinator) -> None:
        tensor = torch.zeros(3 + coordinator.rank)
        one = held("t", tensor, [Box.whole(tensor.shape)])
        save(coordinator, store, lambda: CapturedState(tensors=[one], objects={}, rank_objects={}))

    for error in raised_by_ranks(2, fn):
        assert type(error) is StateError
        assert "[4] on rank 1, but float32 [3] on rank 0" in str(error)


def test_a_failed_async_save_is_raised_by_the_next_save_on_all_ranks_once() -> None:
    """Even where one rank has already asked the handle and so knows."""
    url, second, third = place(), place(), place()

    def full(point: str) -> None:
        if point.startswith("before data"):
            raise NoSpace("disk", "full")

    def fn(coordinator: Coordinator) -> None:
        saver = Saver(coordinator)

        def mine() -> CapturedState:
            return state(coordinator.rank)

        store = WatchedStore(url, full) if coordinator.rank == 1 else Store(url)
        handle = saver.save(store, mine, options(), background=True)
        assert handle.wait(20)
        if coordinator.rank == 2:
            with pytest.raises(RanksFailed):
                handle.result()
        with pytest.raises((AsyncSaveFailed, RanksFailed)) as caught:
            saver.save(Store(second), mine, options(), background=True)
        assert "NoSpace" in str(caught.value.__cause__ or caught.value) or isinstance(
            caught.value, RanksFailed
        )
        saver.save(Store(third), mine, options(), background=False)
        saver.wait(20)

    run_ranks(3, fn)
    assert Store(second).list() == []
    assert Store(third).exists("manifest.json")


def test_async_save_keeps_the_values_at_the_time_of_the_call() -> None:
    """The tensors may change at once, while nothing has been written yet."""
    url = place()
    changed = threading.Event()
    tensor = TENSOR.clone()
    whole = held("t", tensor, [Box.whole((6, 4))])

    def wait_for_change(point: str) -> None:
        assert changed.wait(20)

    def fn(coordinator: Coordinator) -> None:
        captured = CapturedState(tensors=[whole], objects={}, rank_objects={})
        handle = Saver(coordinator).save(
            WatchedStore(url, wait_for_change), lambda: captured, OPTIONS, background=True
        )
        tensor.zero_()
        assert not handle.done()
        changed.set()
        handle.result(20)

    run_ranks(1, fn)
    load_simulated(Store(url), 1, {"t": TENSOR}, {"t": [[Box.whole((6, 4))]]})


def test_many_async_saves_use_two_buffers_and_commit_in_order() -> None:
    urls = [place() for _ in range(6)]
    committed: list[int] = []
    whole = held("t", TENSOR, [Box.whole((6, 4))])

    def fn(coordinator: Coordinator) -> set[int]:
        saver = Saver(coordinator)
        for index, url in enumerate(urls):
            saver.save(
                Store(url),
                lambda: CapturedState(tensors=[whole], objects={}, rank_objects={}),
                OPTIONS,
                background=True,
                on_commit=lambda index=index: committed.append(index),
            )
        saver.wait(20)
        return {buffer.data_ptr() for buffer in saver._pool._free}

    (pointers,) = run_ranks(1, fn)
    assert committed == list(range(6))
    assert 1 <= len(pointers) <= 2


def test_what_is_committed_verifies() -> None:
    store = Store(place())
    save_simulated(store, 3, {"t": TENSOR}, {"t": ROWS})
    report = verify(StoredCheckpoint.open(store))
    assert (report.problems, report.num_files, report.num_bytes) == ((), 3, TENSOR.nbytes)
