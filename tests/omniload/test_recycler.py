"""Memory is used again, and never while anything refers to it."""

from __future__ import annotations

import gc

import numpy as np
import psutil
import torch
from hypothesis import given
from hypothesis import strategies as st

from omniload.recycler import Recycler


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def test_memory_that_nobody_refers_to_is_used_again() -> None:
    recycler = Recycler()
    first = recycler.empty(100_000, np.int64)
    where = address(first)
    del first
    gc.collect()
    assert address(recycler.empty(100_000, np.int64)) == where


def test_any_kind_of_view_keeps_the_memory() -> None:
    recycler = Recycler()
    views = []
    for make in (
        lambda a: a[3:7],
        lambda a: a.reshape(10, 10_000)[2][5:].view(np.int32),
        lambda a: torch.from_numpy(a),
        lambda a: torch.from_numpy(a.reshape(10, 10_000))[4:6, 1:].T,
        lambda a: memoryview(a),
    ):
        array = recycler.empty(100_000, np.int64)
        array[:] = len(views)
        views.append(make(array))
        del array
    gc.collect()
    others = [recycler.empty(100_000, np.int64) for _ in range(20)]
    for other in others:
        other[:] = -1
    assert views[0].tolist() == [0] * 4
    assert set(views[1][::2].tolist()) == {1}
    assert set(views[2].tolist()) == {2}
    assert set(views[3].flatten().tolist()) == {3}
    assert set(views[4].tolist()) == {4}


@given(st.lists(st.tuples(st.integers(1, 4), st.booleans(), st.integers(0, 9)), max_size=60))
def test_live_arrays_never_share_memory(steps: list[tuple[int, bool, int]]) -> None:
    recycler = Recycler()
    live: list[tuple[np.ndarray, int]] = []
    for number, (length, release, which) in enumerate(steps):
        if release and live:
            del live[which % len(live)]
        array = recycler.empty(length * 100_000, np.int32)
        array[:] = number
        live.append((array[1:], number))
        assert all((view == value).all() for view, value in live)


@given(st.integers(0, 1 << 22), st.sampled_from([np.uint8, np.int32, np.int64]))
def test_an_array_has_the_length_asked_for(length: int, dtype: type[np.integer]) -> None:
    array = Recycler().empty(length, dtype)
    assert (array.shape, array.dtype, array.flags.writeable) == ((length,), dtype, True)


def test_sizes_that_differ_little_share_memory() -> None:
    recycler = Recycler()
    where = address(recycler.empty(2_050_000, np.uint8))
    for length in (2_060_000, 1_950_000, 2_300_000):
        gc.collect()
        assert address(recycler.empty(length, np.uint8)) == where


def test_no_more_memory_is_kept_than_was_said() -> None:
    recycler, process = Recycler(max_idle=2), psutil.Process()
    arrays = [recycler.empty(1 << 23, np.uint8) for _ in range(16)]
    for array in arrays:
        array[:] = 1
    held = process.memory_info().rss
    del arrays, array
    gc.collect()
    assert held - process.memory_info().rss > 12 << 23


def test_arrays_that_are_too_large_to_be_kept_are_of_numpy() -> None:
    recycler = Recycler(most_bytes=1 << 22)
    assert recycler.empty((1 << 22) + 1, np.uint8).flags.owndata
    assert not recycler.empty(1 << 22, np.uint8).flags.owndata
