"""The delay queue for long documents."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from omniload.planner.packing import default_thresholds, delay_report, held_back

STEP = 20
some_documents = st.lists(st.tuples(st.integers(1, 100), st.integers(0, 12)), max_size=60)


def held(
    documents: Sequence[tuple[int, int]], *, lanes: int = 3, most: int = 10, levels: Sequence[int] = (40, 80)
) -> list[bool]:
    """Which of documents, given as length and steps waited, are held."""
    length, waited = np.array(documents, np.int64).reshape(-1, 2).T
    result: list[bool] = held_back(
        length, STEP - waited, step=STEP, thresholds=levels, num_lanes=lanes, max_delay_steps=most
    ).tolist()
    return result


def test_outliers_wait_until_there_is_one_for_every_lane() -> None:
    assert held([(50, 0), (60, 1), (5, 0)]) == [True, True, False]
    assert held([(50, 0), (60, 1), (5, 0), (40, 0)]) == [False] * 4


def test_each_level_waits_for_itself() -> None:
    assert held([(50, 0), (60, 1), (80, 0), (79, 0)]) == [False, False, True, False]


def test_of_more_than_go_evenly_the_youngest_wait() -> None:
    assert held([(50, 0), (50, 3), (50, 2), (50, 2)]) == [True, False, False, False]
    assert held([(50, 1)] * 4) == [False, False, False, True]


def test_one_that_waited_long_enough_takes_its_level_along() -> None:
    assert held([(50, 10), (60, 0), (90, 9)]) == [False, False, True]


@settings(max_examples=1000)
@given(some_documents, st.integers(1, 6), st.integers(0, 8))
def test_none_waits_too_long_and_what_goes_early_goes_in_rounds(
    documents: list[tuple[int, int]], lanes: int, most: int
) -> None:
    waits = held(documents, lanes=lanes, most=most)
    for (length, waited), one in zip(documents, waits, strict=True):
        assert not one or (waited < most and length >= 40)
    for low, high in ((40, 80), (80, 101)):
        level = [
            (waited, one)
            for (length, waited), one in zip(documents, waits, strict=True)
            if low <= length < high
        ]
        gone = [waited for waited, one in level if not one]
        left = [waited for waited, one in level if one]
        assert len(left) < lanes, "who could go, went"
        assert not left or len(gone) % lanes == 0
        assert min(gone, default=99) >= max(left, default=0), "the oldest first"
    assert held([], lanes=lanes) == []


def test_a_stream_delivers_every_outlier_within_the_bound() -> None:
    generator = np.random.default_rng(0)
    waiting = np.empty((0, 2), np.int64)
    delays: list[int] = []
    for step in range(200):
        new = np.stack([generator.integers(1, 101, 5), np.full(5, step)], axis=1)
        waiting = np.concatenate([waiting, new])
        hold = held_back(
            waiting[:, 0], waiting[:, 1], step=step, thresholds=(90, 97), num_lanes=8, max_delay_steps=6
        )
        report = delay_report(*waiting[~hold].T, step=step)
        delays += report.delay.tolist()
        assert report.max_delay == max(report.delay, default=0) <= 6
        waiting = waiting[hold]
    assert max(delays) == 6
    assert len(delays) + len(waiting) == 1000


def test_the_delay_is_reported_by_document_and_by_token() -> None:
    report = delay_report(np.array([10, 30], np.uint32), np.array([5, 3], np.uint32), step=5)
    assert report.delay.tolist() == [0, 2]
    assert report.mean_token_delay == 1.5
    assert report.max_delay == 2
    nothing = delay_report(np.empty(0, np.int64), np.empty(0, np.int64), step=5)
    assert (nothing.mean_token_delay, nothing.max_delay) == (0.0, 0)


def test_by_default_documents_of_a_quarter_and_of_half_the_longest_are_levels() -> None:
    assert default_thresholds(131_072) == (32_768, 65_536)
    assert default_thresholds(1) == (1, 1)
