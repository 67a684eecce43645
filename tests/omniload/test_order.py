"""The order of rows is a permutation, pure in seed, name and epoch, and found without opening earlier files."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniload.sources.order import Feistel, Order, Window, key64, mix64
from omniload.sources.split import in_split

U64 = st.integers(0, 2**64 - 1)


def order(**keys: object) -> Order:
    return Order(**{"seed": 1, "name": "a", "shuffle": "window", "window_blocks": 3, **keys})  # type: ignore[arg-type]


def windows(one: Order, epoch: int, blocks: list[int]) -> list[tuple[tuple[int, int], Window]]:
    """All windows of an epoch with the places they start at."""
    found = []
    start: tuple[int, int] | None = (0, 0)
    while start is not None:
        window = one.window(epoch, *start, len(blocks), blocks.__getitem__)
        found.append((start, window))
        start = window.next_start
    return found


@settings(deadline=None)
@given(st.integers(1, 300), U64)
def test_feistel_is_a_permutation(size: int, key: int) -> None:
    permutation = Feistel(size, key)
    assert sorted(permutation(i) for i in range(size)) == list(range(size))


def test_feistel_of_a_huge_range_stays_inside_it() -> None:
    size = 10**15 + 37
    permutation = Feistel(size, 5)
    images = [permutation(i) for i in range(100)]
    assert len(set(images)) == 100
    assert all(0 <= image < size for image in images)


def test_feistel_moves_nearly_everything() -> None:
    permutation = Feistel(1000, 3)
    assert sum(permutation(i) == i for i in range(1000)) < 10


@settings(deadline=None)
@given(U64, st.lists(st.integers(0, 2**63 - 1), unique=True))
def test_mix_never_collides(key: int, values: list[int]) -> None:
    assert len(set(mix64(key, np.array(values, dtype=np.int64)).tolist())) == len(values)


def test_keys_do_not_run_together() -> None:
    assert len({key64("a", "bc"), key64("ab", "c"), key64("abc"), key64(1, 2), key64(12), key64("12")}) == 6


def test_the_order_is_the_same_on_every_machine_and_version() -> None:
    """Pinned: a change of these values breaks the resume of every run that exists."""
    assert key64(42, "code", 0, "files") == 13232745211456762819
    assert mix64(7, np.arange(3)).tolist() == [1346066267577507604, 7191089600892374487, 309689372594955804]
    assert [Feistel(10, 7)(i) for i in range(10)] == [1, 9, 8, 6, 7, 2, 3, 4, 5, 0]
    rows = order().rows(0, 0, 0, 8)
    assert rows is not None
    assert rows.tolist() == [1, 5, 7, 3, 2, 4, 0, 6]
    assert order().window(2, 0, 0, 3, lambda file: 2 + file).blocks == ((2, 3), (2, 2), (2, 1))


def test_mix_is_splitmix64() -> None:
    """The first outputs of the published generator for seed 0."""
    assert mix64(0, np.array([1, 2])).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=8),
    st.integers(1, 7),
    st.integers(0, 3),
    st.integers(0, 2**63 - 1),
    st.sampled_from(["none", "window"]),
)
def test_windows_are_disjoint_and_cover_every_block(
    blocks: list[int], width: int, epoch: int, seed: int, shuffle: str
) -> None:
    one = order(seed=seed, window_blocks=width, shuffle=shuffle)
    found = [window.blocks for _, window in windows(one, epoch, blocks)]
    seen = [address for window in found for address in window]
    assert sorted(seen) == [(file, block) for file, count in enumerate(blocks) for block in range(count)]
    assert all(len(window) == width for window in found[:-1] if seen[-1] not in window)


def test_windows_span_files() -> None:
    spanning = [{file for file, _ in window.blocks} for _, window in windows(order(), 0, [4, 4, 4, 4])]
    assert max(len(files) for files in spanning) == 2


def test_a_window_opens_only_the_files_it_touches() -> None:
    asked: list[int] = []

    def num_blocks(file: int) -> int:
        asked.append(file)
        return 4

    window = order().window(0, 500, 2, 1000, num_blocks)
    assert set(asked) == {file for file, _ in window.blocks}
    assert len(set(asked)) == 2


def test_without_shuffle_rows_come_as_stored() -> None:
    one = order(shuffle="none")
    seen = [address for _, window in windows(one, 1, [2, 1, 3]) for address in window.blocks]
    assert seen == [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (2, 2)]
    assert one.rows(1, 0, 0, 10) is None


@pytest.mark.parametrize("other", [{"seed": 2}, {"name": "b"}])
def test_seed_and_name_change_the_order(other: dict[str, object]) -> None:
    blocks = [5] * 20
    assert windows(order(), 0, blocks) != windows(order(**other), 0, blocks)
    assert not np.array_equal(order().rows(0, 0, 0, 50), order(**other).rows(0, 0, 0, 50))


def test_epochs_differ_in_files_blocks_and_rows() -> None:
    blocks = [5] * 20
    first, second = (
        [address for _, window in windows(order(), epoch, blocks) for address in window.blocks]
        for epoch in (0, 1)
    )
    assert list(dict.fromkeys(f for f, _ in first)) != list(dict.fromkeys(f for f, _ in second))
    assert [b for f, b in first if f == 3] != [b for f, b in second if f == 3]
    assert not np.array_equal(order().rows(0, 0, 0, 50), order().rows(1, 0, 0, 50))


@settings(deadline=None)
@given(st.integers(0, 10**6))
def test_rows_of_a_window_are_a_permutation(seed: int) -> None:
    rows = order(seed=seed).rows(0, 0, 0, 100)
    assert rows is not None
    assert sorted(rows.tolist()) == list(range(100))


@settings(deadline=None)
@given(st.floats(0, 1, exclude_max=True), st.integers(0, 2**62))
def test_each_row_is_in_exactly_one_split(fraction: float, seed: int) -> None:
    ids = np.arange(200, dtype=np.int64) * 977
    keys = {"seed": seed, "content": "x", "row_ids": ids}
    train = in_split("train", fraction, **keys)  # type: ignore[arg-type]
    held_out = in_split("held_out", fraction, **keys)  # type: ignore[arg-type]
    assert held_out is not None
    assert np.array_equal(np.ones(200, dtype=bool) if train is None else train, ~held_out)


def test_the_held_out_fraction_is_met() -> None:
    ids = np.arange(100_000, dtype=np.int64)
    held_out = in_split("held_out", 0.1, seed=1, content="x", row_ids=ids)
    assert held_out is not None
    assert 9_500 < held_out.sum() < 10_500
    other = in_split("held_out", 0.1, seed=1, content="y", row_ids=ids)
    assert not np.array_equal(held_out, other)
