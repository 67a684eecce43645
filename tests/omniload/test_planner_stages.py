"""The stages of planning one by one: weights, packing, choosing."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from omniload.planner.packing import MAX_WAIT_STEPS, best_fit_decreasing, choose_packs
from omniload.weights import WEIGHT_UNIT, integer_weights

weights = st.lists(st.floats(0, 1e6), min_size=1, max_size=20).filter(any)


@given(weights)
def test_integer_weights_add_up_and_stay_within_one_part(given_weights: list[float]) -> None:
    parts = integer_weights(given_weights)
    assert sum(parts) == WEIGHT_UNIT
    for part, weight in zip(parts, given_weights, strict=True):
        assert abs(part - weight / sum(given_weights) * WEIGHT_UNIT) <= 1.001
        assert part == 0 or weight > 0


@given(st.lists(st.integers(1, 64), max_size=200))
def test_best_fit_places_every_piece_once_and_no_pack_overflows(lengths: list[int]) -> None:
    array = np.array(lengths, np.int64)
    order, pack = best_fit_decreasing(array, 64)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    assert np.all(np.diff(array[order]) <= 0)
    if lengths:
        fill = np.bincount(pack, weights=array[order])
        assert fill.max() <= 64
        assert fill.min() > 0
        # No two packs could be one: best fit opens a pack only for a piece that fits in no other.
        assert np.sort(fill)[:2].sum() > 64 or len(fill) == 1


@given(st.lists(st.integers(1, 30), max_size=60))
def test_best_fit_is_the_textbook_algorithm(lengths: list[int]) -> None:
    room: list[int] = []
    expected = []
    for length in sorted(lengths, reverse=True):
        fitting = [(left, i) for i, left in enumerate(room) if left >= length]
        at = min(fitting)[1] if fitting else len(room)
        if not fitting:
            room.append(30)
        room[at] -= length
        expected.append(at)
    assert best_fit_decreasing(np.array(lengths, np.int64), 30)[1].tolist() == expected


def test_packs_with_a_piece_that_waited_come_first_oldest_first() -> None:
    step = 10
    born = np.array([step, step - MAX_WAIT_STEPS, step - 1, step - MAX_WAIT_STEPS - 1, step])
    length = np.array([100, 1, 90, 2, 95])
    pack = np.arange(5)
    assert choose_packs(pack, length, born, step=step, num_packs=4).tolist() == [3, 1, 0, 4]  # type: ignore[union-attr]


def test_too_few_packs_give_no_step() -> None:
    one = np.array([0])
    assert choose_packs(one, one + 5, one, step=0, num_packs=2) is None
    assert choose_packs(one[:0], one[:0], one[:0], step=0, num_packs=1) is None
