"""Ascending numbers cut where one is left out."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from omniload.sources.runs import Runs


@given(st.sets(st.integers(0, 60), min_size=1))
def test_runs_hold_the_numbers_in_order_with_an_end_after_each(numbers: set[int]) -> None:
    runs = Runs.of(np.array(sorted(numbers)))
    spans = list(zip(runs.starts, runs.ends, strict=True))
    assert [i for start, end in spans for i in range(start, end)] == sorted(numbers)
    assert all(end not in numbers for end in runs.ends)
    assert runs.bounds.tolist() == [i for start, end in spans for i in range(start, end + 1)]
    assert runs.bounds[runs.first].tolist() == runs.starts
