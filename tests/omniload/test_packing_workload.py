"""Packs of equal work, of any length up to a bound."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniload.planner.packing import Packing, workload
from omniload.planner.packing.even_out import even_out
from omniload.planner.packing.workload import place, place_by_tokens

CAPACITY = 30


def linear_and_square(length: np.ndarray) -> np.ndarray:
    """What attention and the rest of a small decoder cost, in about its proportions."""
    return length * (length + 24_576)


def costs_of(packing: Packing, cost: np.ndarray, num_packs: int) -> np.ndarray:
    total = np.zeros(num_packs, np.int64)
    np.add.at(total, packing.pack, cost[packing.piece])
    return total


some_documents = st.lists(
    st.tuples(st.integers(1, CAPACITY), st.integers(0, 50), st.integers(0, 9), st.booleans()), max_size=60
)


@settings(max_examples=1000)
@given(some_documents, st.integers(1, 8))
def test_documents_are_placed_whole_within_the_bounds_and_no_pack_is_empty(
    documents: list[tuple[int, int, int, bool]], num_packs: int
) -> None:
    length, cost, patches, carried = np.array(documents, np.int64).reshape(-1, 4).T
    packing = workload(
        length,
        cost,
        num_packs=num_packs,
        capacity=CAPACITY,
        carried=carried.astype(bool),
        patches=patches,
        patch_capacity=9,
    )
    assert len(np.unique(packing.piece)) == len(packing.piece)
    assert np.array_equal(packing.length, length[packing.piece])
    assert not packing.start.any()
    assert np.all(np.diff(packing.pack) >= 0)
    assert len(np.unique(packing.pack)) == min(num_packs, len(documents))
    tokens = np.bincount(packing.pack, packing.length, num_packs)
    images = np.bincount(packing.pack, patches[packing.piece], num_packs)
    assert tokens.max() <= CAPACITY
    assert images.max() <= 9


@settings(max_examples=1000)
@given(some_documents, st.integers(1, 8))
def test_each_document_goes_into_the_cheapest_pack_that_holds_it_or_fits_in_none(
    documents: list[tuple[int, int, int, bool]], num_packs: int
) -> None:
    length, cost, patches, _ = np.array(documents, np.int64).reshape(-1, 4).T
    pack = place(np.stack([length, patches]), cost, num_packs, np.array([CAPACITY, 9]))
    state = [(0, 0, number, CAPACITY, 9) for number in range(num_packs)]
    for tokens, work, images, got in zip(
        length.tolist(), cost.tolist(), patches.tolist(), pack.tolist(), strict=True
    ):
        fitting = [one for one in state if one[3] >= tokens and one[4] >= images]
        assert got == (min(fitting)[2] if fitting else -1)
        if fitting:
            total, count, number, room, patch_room = min(fitting)
            state[number] = (total + work, count + 1, number, room - tokens, patch_room - images)


@settings(max_examples=1000)
@given(some_documents, st.integers(1, 8))
def test_without_images_the_faster_way_places_alike(
    documents: list[tuple[int, int, int, bool]], num_packs: int
) -> None:
    length, cost, _, _ = np.array(documents, np.int64).reshape(-1, 4).T
    expected = place(length[None], cost, num_packs, np.array([CAPACITY]))
    assert np.array_equal(place_by_tokens(length, cost, num_packs, CAPACITY), expected)


def test_long_and_short_documents_in_turn_take_no_longer_than_trying_every_pack() -> None:
    """No pack has room for the long ones at the end, so each would put all packs aside, and each short one back."""
    num_packs = 64
    length = np.tile([90, 1], 60 * num_packs)
    cost = np.ones_like(length)
    assert place_by_tokens(length, cost, num_packs, 1000) is None
    none = np.zeros(len(length), bool)
    packing = workload(length, cost, num_packs=num_packs, capacity=1000, carried=none)
    expected = place(length[None], cost, num_packs, np.array([1000]))
    assert (expected < 0).any()
    assert np.array_equal(np.sort(packing.piece), np.flatnonzero(expected >= 0))


def test_what_was_carried_is_placed_before_what_is_new() -> None:
    length = np.array([20, 20, 20, 20])
    carried = np.array([False, True, False, True])
    packing = workload(length, length, num_packs=2, capacity=CAPACITY, carried=carried)
    assert sorted(packing.piece.tolist()) == [1, 3]


@settings(max_examples=1000)
@given(some_documents.filter(bool), st.integers(1, 8), st.integers(0, 2**32))
def test_evening_out_never_makes_the_costliest_costlier_breaks_a_bound_or_empties_a_pack(
    documents: list[tuple[int, int, int, bool]], num_packs: int, seed: int
) -> None:
    length, cost, patches, _ = np.array(documents, np.int64).reshape(-1, 4).T
    load = np.stack([length, patches])
    before = np.random.default_rng(seed).integers(0, num_packs, len(length))
    loads = [np.bincount(before, one, num_packs) for one in load]
    cap = np.array([one.max() for one in loads], np.int64)
    given_before = before.copy()
    after = even_out(before, cost, load, num_packs=num_packs, cap=cap)
    assert np.array_equal(before, given_before)
    assert np.bincount(after, cost).max() <= np.bincount(before, cost).max()
    for one, most in zip(load, cap, strict=True):
        assert np.bincount(after, one, num_packs).max() <= most
    occupied = np.bincount(before, minlength=num_packs) > 0
    assert (np.bincount(after, minlength=num_packs) > 0)[occupied].all()


def test_evening_out_ends_a_move_or_an_exchange_before_the_bound() -> None:
    cost = np.array([50, 30, 10, 10])
    one_load = np.array([[5, 3, 1, 1]])
    even = even_out(np.array([0, 0, 1, 1]), cost, one_load, num_packs=2, cap=np.array([8]))
    assert np.bincount(even, cost).tolist() == [50, 50]
    full = even_out(np.array([0, 0, 1, 1]), cost, np.array([[1, 1, 1, 7]]), num_packs=2, cap=np.array([8]))
    assert np.bincount(full, cost).max() < 80
    assert np.bincount(full, np.array([1, 1, 1, 7])).max() <= 8


def heavy_tail(generator: np.random.Generator, size: int, longest: int) -> np.ndarray:
    """Lengths of which one in twelve is from a Pareto tail, the others lognormal."""
    body = generator.lognormal(6.4, 1.2, size)
    tail = (generator.pareto(1.2, size) + 1) * 2000
    lengths = np.where(generator.random(size) < 1 / 12, tail, body)
    return np.clip(lengths, 16, longest).astype(np.int64)


@pytest.mark.parametrize("longest", [4096, 16_384, 32_768, 131_072])
@pytest.mark.parametrize(("num_packs", "documents"), [(32, 8), (32, 64), (256, 8)])
def test_packs_of_a_heavy_tail_cost_no_more_than_mean_or_longest_document(
    longest: int, num_packs: int, documents: int
) -> None:
    for seed in range(5):
        generator = np.random.default_rng(seed)
        length = heavy_tail(generator, num_packs * documents, longest)
        cost = linear_and_square(length)
        keys: dict[str, Any] = {"carried": generator.random(len(length)) < 0.05, "num_packs": num_packs}
        capacity = max(longest, 3 * int(length.sum()) // (2 * num_packs))
        packing = workload(length, cost, capacity=capacity, **keys)
        assert len(packing.piece) > 0.99 * len(length)
        total = costs_of(packing, cost, num_packs)
        bound = max(total.mean(), cost[packing.piece].max())
        assert total.max() <= 1.005 * bound


def test_no_documents_make_no_packs() -> None:
    none = np.empty(0, np.int64)
    assert len(workload(none, none, num_packs=3, capacity=5, carried=none.astype(bool)).piece) == 0
