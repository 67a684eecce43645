"""What a cost function gave is checked before a plan is made of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniload.errors import PlanError
from omniload.planner.costs import checked

BAD = {
    "nan": ([[1.0, float("nan")]], "module 0: piece 1 costs nan; a cost is an integer of at least 0"),
    "infinite": ([[float("inf"), 1.0]], "piece 0 costs inf"),
    "negative": ([[3, -2]], "piece 1 costs -2; a cost is an integer of at least 0"),
    "minus infinity": ([[0.0, -float("inf")]], "piece 1 costs -inf"),
    "a fraction": ([[0.25, 1.0]], r"piece 0 costs 0.25; .*scale costs up, then round them"),
    "too large a float": ([[1.0, 2.0**63]], r"piece 1 costs 9.22\S+; scale costs down"),
    "too large unsigned": (np.array([[1, 2**63]], np.uint64), "piece 1 costs 9223372036854775808; scale"),
    "larger than any type": ([[1, 2**70]], "type object; a cost is an integer"),
    "too large together": ([[2**62, 2**62]], "cost 9223372036854775808 together, more than"),
    "text": ([["a", "b"]], "type <U1"),
    "flags": ([[True, False]], "type bool"),
    "nothing": (None, r"gave shape \[\] for 2 pieces; return \[1, 2\]"),
    "one too few": ([[1]], r"gave shape \[1, 1\] for 2 pieces; return \[1, 2\]"),
    "one too many": (np.arange(3), r"gave shape \[3\]"),
    "a module too many": ([[1, 2], [3, 4]], r"gave shape \[2, 2\]"),
    "ragged": ([[1, 2], [3]], "gave no array"),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_is_no_cost_is_refused_in_one_line(kind: str) -> None:
    cost, message = BAD[kind]
    with pytest.raises(PlanError, match=message) as caught:
        checked(cost, 1, 2, "my:cost")
    assert str(caught.value).startswith("cost 'my:cost': ")
    assert "\n" not in str(caught.value)


def test_the_module_of_a_bad_cost_is_named() -> None:
    with pytest.raises(PlanError, match="module 1: piece 2 costs -7"):
        checked(np.array([[1, 2, 3], [4, 5, -7]]), 2, 3, "it")


@given(st.lists(st.integers(0, 2**53), min_size=0, max_size=20))
def test_whole_numbers_pass_unchanged_whatever_their_type(values: list[int]) -> None:
    for given_as in (values, np.array(values, np.float64), np.array(values, np.uint64), [values]):
        cost = checked(given_as, 1, len(values), "it")
        assert cost.dtype == np.int64
        assert cost.tolist() == [values]


def test_costs_of_less_than_two_to_62_together_pass() -> None:
    assert checked([[2**62 - 1, 0]], 1, 2, "it").tolist() == [[2**62 - 1, 0]]
    assert checked(np.array([2**62 - 1], np.uint64), 1, 1, "it").tolist() == [[2**62 - 1]]


def test_costs_of_all_modules_together_are_bounded() -> None:
    """Or the cost of a pack, which is that of all its modules, would come out negative."""
    costs = [[2**62 - 1], [2**62 - 1], [2**62 - 1]]
    assert np.array(costs).sum() < 0
    with pytest.raises(
        PlanError, match=f"cost {3 * (2**62 - 1)} together, more than {2**62 - 1}; scale costs down"
    ):
        checked(costs, 3, 1, "it")


def test_no_pieces_cost_nothing() -> None:
    assert checked(np.zeros((2, 0)), 2, 0, "it").shape == (2, 0)
