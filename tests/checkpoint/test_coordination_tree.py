"""Messages through a tree of ranks: what a flat gather and scatter would give, and nobody missing goes unnamed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore

from checkpoint.engine.coordination import Coordinator
from checkpoint.engine.messages import pack, unpack, unpack_all
from checkpoint.engine.tree import Tree
from checkpoint.errors import CoordinationTimeout, RanksFailed, StateError

DEEP = Tree(world_size=40, node_size=3, fan_out=3)  # leaders at every third, ninth and 27th rank


@pytest.fixture(scope="module")
def threads() -> Iterator[ThreadPoolExecutor]:
    """One for each simulated rank."""
    with ThreadPoolExecutor(200) as pool:
        yield pool


def ranks_of(
    threads: ThreadPoolExecutor, tree: Tree, fn: Callable[[Coordinator], Any], store: HashStore | None = None
) -> list[Any]:
    """What each rank returns, or what it raises."""
    keys = store or HashStore()

    def work(rank: int) -> Any:
        try:
            return fn(Coordinator(keys, rank, tree.world_size, tree=tree))
        except BaseException as error:
            return error

    return [one.result(60) for one in [threads.submit(work, rank) for rank in range(tree.world_size)]]


@given(st.integers(1, 700), st.integers(2, 40), st.integers(2, 40))
def test_a_tree_has_every_rank_once_in_order_and_below_the_rank_it_reports_to(
    world_size: int, node_size: int, fan_out: int
) -> None:
    tree = Tree(world_size=world_size, node_size=node_size, fan_out=fan_out)

    def walk(rank: int, depth: int) -> Iterator[int]:
        yield rank
        end = rank + 1
        for child in tree.children(rank):
            assert child == end, "the subtrees of a rank follow each other"
            assert tree.parent(child) == rank
            assert tree.height(child) < tree.height(rank)
            end = tree.end(child)
            yield from walk(child, depth + 1)
        assert end == tree.end(rank)

    assert list(walk(0, 0)) == list(range(world_size))


def test_no_rank_of_a_large_job_hears_from_more_than_a_few_dozen() -> None:
    tree = Tree(world_size=8960)
    assert max(len(tree.children(rank)) for rank in range(8960)) == 7 + 31 + 31 + 1
    assert [len(tree.children(rank)) for rank in (0, 8192, 256, 8, 1)] == [70, 40, 38, 7, 0]


@given(st.lists(st.lists(st.binary(max_size=5), min_size=1, max_size=6), min_size=1, max_size=4))
def test_joined_messages_come_apart_again(parts: list[list[bytes]]) -> None:
    every = [message for part in parts for message in part]
    assert unpack(pack(every)) == every
    assert unpack_all(map(pack, parts)) == every


def test_equal_messages_travel_as_one() -> None:
    assert len(pack([b"x" * 1000] * 500)) < 1000 + 500 * 4 + 100


def test_a_tree_gathers_and_scatters_what_a_flat_round_does(threads: ThreadPoolExecutor) -> None:
    """For every number of ranks up to 200, with messages that differ, and leaves no key behind."""
    for world_size in range(1, 201):
        seen: list[list[bytes]] = []

        def decide(messages: list[bytes], seen: list[list[bytes]] = seen) -> bytes | list[bytes]:
            seen.append(messages)
            return b"to all" if len(messages) % 3 == 0 else [b"to " + message for message in messages]

        def fn(coordinator: Coordinator, decide: Any = decide) -> bytes:
            message = b"" if coordinator.rank % 5 == 0 else str(coordinator.rank).encode()
            return coordinator.round("x", "gather", lambda: message, decide, timeout_s=30)

        deep = Tree(world_size=world_size, node_size=3, fan_out=4)
        flat = Tree(world_size=world_size, node_size=max(2, world_size))
        assert deep.height(0) > 2 or world_size <= 12
        assert flat.children(0) == list(range(1, world_size))
        stores = HashStore(), HashStore()
        results = [
            ranks_of(threads, tree, fn, store) for tree, store in zip((deep, flat), stores, strict=True)
        ]
        assert results[0] == results[1]
        assert seen[0] == seen[1]
        assert results[0][-1] == (b"to " + seen[0][-1] if world_size % 3 else b"to all")
        assert [store.num_keys() for store in stores] == [0, 0]


# The rank that does not come, by what it is in the tree.
_ABSENT = {
    "leaf of rank 0": 1,
    "leaf": 29,
    "leader": 30,
    "leader of leaders": 36,
    "top leader": 27,
    "root": 0,
}


@pytest.mark.parametrize("absent", _ABSENT.values(), ids=_ABSENT)
def test_a_rank_that_does_not_come_is_named_on_all_others_and_to_itself(
    threads: ThreadPoolExecutor, absent: int
) -> None:
    over = threading.Semaphore(0)
    start = threading.Barrier(DEEP.world_size - 1)

    def fn(coordinator: Coordinator) -> bytes:
        if coordinator.rank == absent:
            for _ in range(DEEP.world_size - 1):
                assert over.acquire(timeout=30)
        else:
            start.wait(30)
        try:
            return coordinator.round("x", "plan", bytes, lambda _: b"", timeout_s=1 if absent else 0.2)
        finally:
            over.release()

    raised = ranks_of(threads, DEEP, fn)
    named = (
        f"rank {absent} did not finish stage 'plan'" if absent else "rank 0 gave no outcome of stage 'plan'"
    )
    for rank, error in enumerate(raised):
        if rank or absent:  # rank 0, when it comes, finds all the others' messages
            assert type(error) is CoordinationTimeout, (rank, error)
            assert str(error).startswith(named), (rank, error)


def test_ranks_that_do_not_come_on_several_levels_are_all_named(threads: ThreadPoolExecutor) -> None:
    """Also those below a leader that is missing itself; and those that have come are not."""
    absent = {5, 27, 30, 31, 39}
    start = threading.Barrier(DEEP.world_size - len(absent))

    def fn(coordinator: Coordinator) -> bytes:
        if coordinator.rank in absent:
            return b""
        start.wait(30)
        return coordinator.round("x", "plan", bytes, lambda _: b"", timeout_s=1)

    raised = ranks_of(threads, DEEP, fn)
    for rank in set(range(40)) - absent:
        assert type(raised[rank]) is CoordinationTimeout
        assert "ranks 5, 27, 30, 31, 39 did not finish" in str(raised[rank]), rank


def test_a_leader_that_dies_after_it_came_is_named(threads: ThreadPoolExecutor) -> None:
    """Its receipt is there, its report is not."""
    keys = HashStore()
    keys.set("x/plan/here/27", "1")
    start = threading.Barrier(DEEP.world_size - 1)

    def fn(coordinator: Coordinator) -> bytes:
        if coordinator.rank == 27:
            return b""
        start.wait(30)
        return coordinator.round("x", "plan", bytes, lambda _: b"", timeout_s=0.5)

    raised = ranks_of(threads, DEEP, fn, keys)
    for rank in set(range(40)) - {27}:
        assert "rank 27 did not finish stage 'plan'" in str(raised[rank]), rank


@pytest.mark.parametrize("failing", [{1}, {27}, {39}, {0, 30, 31}])
def test_ranks_that_fail_anywhere_in_the_tree_fail_all_alike(
    threads: ThreadPoolExecutor, failing: set[int]
) -> None:
    def fn(coordinator: Coordinator) -> bytes:
        def local() -> bytes:
            if coordinator.rank in failing:
                raise StateError(f"no state on {coordinator.rank}")
            return b""

        return coordinator.round("x", "plan", local, lambda _: b"", timeout_s=20)

    raised = ranks_of(threads, DEEP, fn)
    for error in raised:
        assert isinstance(error, RanksFailed)
        assert [(one.rank, one.reason) for one in error.members] == [
            (rank, f"no state on {rank}") for rank in sorted(failing)
        ]


@pytest.mark.parametrize("interrupted", [0, 27, 30, 39])
def test_a_rank_that_is_interrupted_tells_all_others(threads: ThreadPoolExecutor, interrupted: int) -> None:
    """Those below it hear of it from whom it would have reported to."""

    def fn(coordinator: Coordinator) -> bytes:
        def local() -> bytes:
            if coordinator.rank == interrupted:
                raise KeyboardInterrupt
            return b""

        return coordinator.round("x", "plan", local, lambda _: b"", timeout_s=20)

    for rank, error in enumerate(ranks_of(threads, DEEP, fn)):
        if rank == interrupted:
            assert isinstance(error, KeyboardInterrupt)
        else:
            assert isinstance(error, RanksFailed)
            (member,) = error.members
            assert (member.rank, member.kind) == (interrupted, "KeyboardInterrupt")


def test_what_rank_0_runs_into_while_it_decides_reaches_all(threads: ThreadPoolExecutor) -> None:
    def decide(_: list[bytes]) -> bytes:
        raise StateError("no plan")

    for error in ranks_of(threads, DEEP, lambda one: one.round("x", "plan", bytes, decide, timeout_s=20)):
        assert type(error) is StateError
        assert str(error) == "no plan"


def test_a_message_larger_than_the_store_takes_passes_every_level(threads: ThreadPoolExecutor) -> None:
    """Rank 39 is three messages from rank 0."""
    large = bytes(range(256)) * (36 << 10)  # 9 MiB: three parts
    answers = ranks_of(
        threads,
        DEEP,
        lambda one: one.round(
            "x", "plan", lambda: large if one.rank == 39 else b"", lambda all_: all_[::-1], timeout_s=20
        ),
    )
    assert answers == [large, *[b""] * 39]
