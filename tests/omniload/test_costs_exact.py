"""Costs are exact integers, whatever their size."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniload.errors import PlanError
from omniload.planner.costs import AttentionCost, Decoder, Encoder, TokenCost, attention_cost
from omniload.planner.costs.exact import LARGEST, weighted_sum
from omniload.planner.costs.flops import causal_pairs, full_pairs

LENGTHS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=8)


@given(
    st.lists(st.integers(0, 2**70), min_size=3, max_size=3),
    st.lists(st.tuples(*[st.integers(0, 2**62)] * 3), min_size=1, max_size=5),
    st.sampled_from([1, 7, 1000, 10**6, 2**30]),
)
@settings(max_examples=1000)
def test_a_weighted_sum_is_that_of_unbounded_integers_or_refused(
    weights: list[int], rows: list[tuple[int, ...]], unit: int
) -> None:
    columns = [np.array(column, np.int64) for column in zip(*rows, strict=True)]
    expected = [-(-sum(w * v for w, v in zip(weights, row, strict=True)) // unit) for row in rows]
    bound = sum(w * int(column.max()) for w, column in zip(weights, columns, strict=True))
    if bound > LARGEST * unit:
        with pytest.raises(PlanError, match="cost 'it': a piece costs up to"):
            weighted_sum(weights, columns, unit, "it")
    else:
        assert weighted_sum(weights, columns, unit, "it").tolist() == expected


def test_a_result_of_63_bits_is_reached_exactly() -> None:
    values = [np.array([2**62, 1]), np.array([2**62 - 1, 0])]
    assert weighted_sum([1000, 1000], values, 1000, "it").tolist() == [LARGEST, 1]
    assert weighted_sum([10**40], [np.zeros(2, np.int64)], 1, "it").tolist() == [0, 0]
    with pytest.raises(PlanError, match=str(LARGEST)):
        weighted_sum([1000, 1001], values, 1000, "it")


@given(LENGTHS)
@settings(max_examples=200)
def test_costs_of_any_length_below_2_to_31_are_exact(lengths: list[int]) -> None:
    length, none = np.array(lengths, np.uint32), np.zeros(len(lengths), np.int64)
    assert attention_cost(length).tolist() == [n * (n + 24576) for n in lengths]
    assert AttentionCost().cost(length, none, none).tolist() == [attention_cost(length).tolist()]
    assert TokenCost().cost(length, none, none).tolist() == [lengths]


@given(LENGTHS, st.integers(1, 2**31))
@settings(max_examples=200)
def test_pairs_of_attention_are_exact(lengths: list[int], bound: int) -> None:
    length = np.array(lengths, np.int64)
    assert causal_pairs(length).tolist() == [n * (n + 1) // 2 for n in lengths]
    assert full_pairs(length).tolist() == [n * n for n in lengths]
    windowed = [min(n, bound) * (min(n, bound) + 1) // 2 + max(n - bound, 0) * bound for n in lengths]
    assert causal_pairs(length, bound).tolist() == windowed
    assert full_pairs(length, bound).tolist() == [n // bound * bound**2 + (n % bound) ** 2 for n in lengths]


@pytest.mark.parametrize(("length", "bound"), [(0, 3), (1, 1), (2, 3), (7, 3), (9, 3), (6, 100)])
def test_pairs_are_those_of_the_masks(length: int, bound: int) -> None:
    query, key = np.indices((length, length))
    n = np.array([length])
    assert causal_pairs(n) == (key <= query).sum()
    assert causal_pairs(n, bound) == ((key <= query) & (key > query - bound)).sum()
    assert full_pairs(n, bound) == (query // bound == key // bound).sum()


def test_a_step_of_the_largest_models_at_128k_stays_far_from_64_bits() -> None:
    decoder = Decoder(
        hidden_size=16384,
        num_hidden_layers=126,
        num_attention_heads=128,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=53248,
        vocab_size=128256,
    )
    assert decoder.num_parameters > 4e11
    step = np.full(10**8 // 131072, 131072)
    assert sum(decoder.flops(step).tolist()) < 2**58
    encoder = Encoder(hidden_size=3200, num_hidden_layers=45, intermediate_size=12800)
    assert sum(encoder.flops(np.full(1000, 10**5)).tolist()) < 2**58


def test_a_piece_too_long_for_64_bits_is_refused_in_one_line() -> None:
    encoder = Encoder(hidden_size=2**20, num_hidden_layers=1000, intermediate_size=2**20)
    with pytest.raises(
        PlanError, match=r"^cost 'encoder': a piece costs up to \d+, more than \d+; cut [^\n]+$"
    ):
        encoder.flops(np.array([5, 2**31 - 1]))
