"""Context-parallel slices take every token once, alike in number, and balance what they promise to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniload.errors import PlaceError, PlanError
from omniload.placing.slicing import (
    SLICINGS,
    Slices,
    choose_slicing,
    contiguous,
    per_document,
    received_tokens,
    slice_costs,
    zigzag,
)
from omniload.planner.costs import LINEAR_TOKENS, attention_cost

ROWS = st.lists(st.integers(0, 40), min_size=0, max_size=7)


def offsets(lengths: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(np.array(lengths, np.int64))])


def visible(lengths: list[int]) -> list[int]:
    """Keys that each token of the row sees."""
    return [p + 1 for length in lengths for p in range(length)]


def owners(slices: Slices) -> list[int]:
    owner = [-1] * int(slices.length.sum())
    for rank in range(slices.num_ranks):
        for token in slices.of(rank).tolist():
            assert owner[token] == -1, "a token has two ranks"
            owner[token] = rank
    assert -1 not in owner
    return owner


@given(ROWS, st.integers(1, 9), st.sampled_from(list(SLICINGS)))
@settings(max_examples=1000)
def test_every_token_has_one_rank_and_ranks_have_as_many(lengths: list[int], cp: int, method: str) -> None:
    slices = SLICINGS[method](offsets(lengths), cp)
    assert slices.method == method
    assert slices.num_ranks == cp
    owner = owners(slices)
    assert len(owner) == sum(lengths)
    counts = [len(slices.of(rank)) for rank in range(cp)]
    assert slices.num_tokens.tolist() == counts
    assert max(counts) - min(counts) <= (1 if sum(lengths) % cp else 0)
    for rank in range(cp):
        assert (np.diff(slices.of(rank)) > 0).all(), "tokens of a rank keep the order of the row"


@given(ROWS, st.integers(1, 6), st.sampled_from(list(SLICINGS)), st.integers(0, 10), st.integers(0, 10**6))
@settings(max_examples=1000)
def test_costs_are_those_of_the_tokens(
    lengths: list[int], cp: int, method: str, pair: int, token: int
) -> None:
    cu_seqlens = offsets(lengths)
    slices, seen = SLICINGS[method](cu_seqlens, cp), visible(lengths)
    expected = [sum(pair * seen[t] + token for t in slices.of(rank).tolist()) for rank in range(cp)]
    costs = slice_costs(slices, pair_cost=pair, token_cost=token)
    assert costs.dtype == np.int64
    assert costs.tolist() == expected


@given(ROWS, st.integers(1, 6), st.sampled_from(list(SLICINGS)))
@settings(max_examples=1000)
def test_received_tokens_are_the_keys_of_others_that_a_rank_sees(
    lengths: list[int], cp: int, method: str
) -> None:
    cu_seqlens = offsets(lengths)
    slices = SLICINGS[method](cu_seqlens, cp)
    owner, seen, received = owners(slices), visible(lengths), 0
    for rank in range(cp):
        needed = {k for t in slices.of(rank).tolist() for k in range(t + 1 - seen[t], t + 1)}
        received += sum(owner[k] != rank for k in needed)
    assert received_tokens(slices) == received


@given(st.integers(1, 40), st.integers(1, 12))
@settings(max_examples=1000)
def test_zigzag_shares_one_document_exactly(chunk: int, cp: int) -> None:
    cu_seqlens = offsets([chunk * 2 * cp])
    costs = slice_costs(zigzag(cu_seqlens, cp))
    assert costs.min() == costs.max()
    if cp > 1:
        uneven = slice_costs(contiguous(cu_seqlens, cp))
        assert uneven.max() > uneven.min()


@given(ROWS.filter(any), st.integers(1, 9))
@settings(max_examples=1000)
def test_documents_cut_each_for_itself_differ_by_what_does_not_divide(lengths: list[int], cp: int) -> None:
    cu_seqlens = offsets(lengths)
    pairs = slice_costs(per_document(cu_seqlens, cp), pair_cost=1, token_cost=0)
    # Of each document a rank gets at most two of the tokens that are dealt, the last ones, which see most.
    bound = sum(2 * length for length in lengths if length % (2 * cp))
    assert pairs.max() - pairs.min() <= bound
    divisible = offsets([length * 2 * cp for length in lengths])
    exact = slice_costs(per_document(divisible, cp))
    assert exact.min() == exact.max()


@given(ROWS.filter(any), st.integers(1, 9), st.integers(0, 5), st.integers(0, 100))
@settings(max_examples=1000)
def test_the_way_chosen_is_the_cheapest_then_the_quietest_then_the_simplest(
    lengths: list[int], cp: int, pair: int, token: int
) -> None:
    cu_seqlens = offsets(lengths)
    chosen = choose_slicing(cu_seqlens, cp, pair_cost=pair, token_cost=token)
    keys = []
    for i, make in enumerate(SLICINGS.values()):
        slices = make(cu_seqlens, cp)
        cost = slice_costs(slices, pair_cost=pair, token_cost=token)
        keys.append((int(cost.max()), received_tokens(slices), i))
    assert chosen.method == list(SLICINGS)[min(keys)[2]]


def test_each_way_is_chosen_where_it_is_best() -> None:
    alike = offsets([256] * 8)
    assert choose_slicing(alike, 4).method == "contiguous"
    assert choose_slicing(offsets([2048]), 4).method == "zigzag"
    assert choose_slicing(offsets([1600, 64, 64, 64, 64, 64, 64, 64]), 4).method == "per_document"
    assert choose_slicing(offsets([2048]), 1).method == "contiguous"
    assert choose_slicing(offsets([]), 4).method == "contiguous"


def test_chunks_lie_where_they_are_known_to() -> None:
    assert [contiguous(offsets([8]), 2).of(r).tolist() for r in (0, 1)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [zigzag(offsets([8]), 2).of(r).tolist() for r in (0, 1)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    # Documents of 5 and 4 tokens: chunks of one token, and token 4 dealt to rank 0.
    assert [per_document(offsets([5, 4]), 2).of(r).tolist() for r in (0, 1)] == [
        [0, 3, 4, 5, 8],
        [1, 2, 6, 7],
    ]


def test_all_ranks_together_cost_what_the_planner_says_the_documents_cost() -> None:
    lengths = [4096, 1, 0, 300]
    cu_seqlens = offsets(lengths)
    for make in SLICINGS.values():
        total = int(slice_costs(make(cu_seqlens, 4)).sum())
        # A pair costs 2, and a document of n tokens has n (n + 1) / 2: n more than attention_cost counts.
        assert total == int(attention_cost(np.array(lengths)).sum()) + sum(lengths)
        assert LINEAR_TOKENS * sum(lengths) < total


def test_offsets_of_any_integer_type_are_taken() -> None:
    for dtype in (np.int32, np.uint32, np.uint16, np.int64):
        cu_seqlens = offsets([5, 0, 40]).astype(dtype)
        for make in SLICINGS.values():
            assert len(owners(make(cu_seqlens, 3))) == 45
        assert choose_slicing(cu_seqlens, 3).num_ranks == 3


BAD: dict[str, tuple[Any, int, str]] = {
    "no ranks": (offsets([4]), 0, "cp: 0 ranks cannot share a row"),
    "fewer than no ranks": (offsets([4]), -2, "cp: -2 ranks"),
    "no offsets": (np.zeros(0, np.int64), 2, r"cu_seqlens: int64\[0\] are no offsets"),
    "floats": (np.array([0.0, 4.0]), 2, r"float64\[2\] are no offsets"),
    "not from 0": (np.array([1, 4]), 2, r"int64\[2\] are no offsets of documents: integers from 0 on"),
    "descending": (np.array([0, 8, 5], np.uint32), 2, "document 1 ends at 5 and begins at 8"),
    "longer than any": (np.array([0, 2**31]), 2, "a row of 2147483648 tokens; 2147483647 are the most"),
    "two dimensions": (np.zeros((1, 2), np.int64), 2, r"int64\[1, 2\] are no offsets"),
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("method", SLICINGS)
def test_what_is_no_row_is_refused_in_one_line(kind: str, method: str) -> None:
    cu_seqlens, cp, message = BAD[kind]
    with pytest.raises(PlaceError, match=message) as caught:
        SLICINGS[method](cu_seqlens, cp)
    assert "\n" not in str(caught.value)


def test_costs_larger_than_64_bits_are_refused() -> None:
    cu_seqlens = offsets([1000])
    with pytest.raises(PlanError, match="cost 'zigzag': a piece costs up to"):
        slice_costs(zigzag(cu_seqlens, 2), pair_cost=2**60)
