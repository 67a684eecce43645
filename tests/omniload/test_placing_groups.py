"""Wide groups of ranks for long sequences, single ranks for short ones."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniload.errors import PlaceError
from omniload.placing import HybridGroups, hybrid_groups, uniform_groups
from tests.elsewhere import printed

Step = dict[str, Any]


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Sequences that just fit or fit easily, and costs that follow the lengths or do not."""
    num_ranks = draw(st.integers(1, 13))
    lengths = draw(st.lists(st.one_of(st.integers(0, 9), st.integers(0, 60)), max_size=30))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    costs = [int(rng.integers(10**6)) if rng.random() < 0.2 else tokens * (tokens + 20) for tokens in lengths]
    spare = draw(st.sampled_from([100, 110, 150, 1000]))
    return {
        "length": np.array(lengths, np.int64),
        "cost": np.array(costs, np.int64),
        "num_ranks": num_ranks,
        "capacity": max(-(-sum(lengths) * spare // 100 // num_ranks), 1),
        "widths": draw(st.sampled_from([None, (1,), (1, 3, 6, 12), (1, 2, 10), (1, 13)])),
    }


def check(groups: HybridGroups, step: Step) -> None:
    """Every sequence is in one group, and groups are apart, aligned, of a width allowed and within capacity."""
    ranks = np.concatenate(
        [np.empty(0, np.int64), *map(np.arange, groups.first, groups.first + groups.width)]
    )
    assert len(set(ranks.tolist())) == len(ranks)
    assert set(ranks.tolist()) <= set(range(step["num_ranks"]))
    assert (np.diff(groups.first) > 0).all()
    assert not (groups.first % groups.width).any()
    assert set(groups.width.tolist()) <= set(step["widths"] or (2**power for power in range(8)))
    assert groups.group.shape == step["length"].shape
    inside = groups.group == np.arange(len(groups.first))[:, None]
    assert inside.any(1).all()
    assert inside.any(0).all()
    assert groups.cost.tolist() == (inside * step["cost"]).sum(1).tolist()
    assert groups.tokens.tolist() == (inside * step["length"]).sum(1).tolist()
    assert (groups.tokens <= groups.width * step["capacity"]).all()


@given(steps())
@settings(max_examples=1000)
def test_every_sequence_is_in_one_group_and_no_rank_over_its_capacity(step: Step) -> None:
    def uniform(**step: Any) -> HybridGroups:
        return uniform_groups(**{key: step[key] for key in step if key != "widths"}, width=step["num_ranks"])

    for make in (hybrid_groups, uniform):
        try:
            groups = make(**step)
        except PlaceError:
            # Only if it is tight: with room for one more longest sequence in every rank, all fit on single ranks.
            longest = int(step["length"].max())
            roomy = step["num_ranks"] * (step["capacity"] - longest) >= step["length"].sum()
            assert not roomy
        else:
            check(groups, step if make is hybrid_groups else {**step, "widths": [step["num_ranks"]]})


def heavy_tail(count: int, longest: int, seed: int) -> np.ndarray:
    """Lengths as of documents: most are short, few are as long as can be."""
    rng = np.random.default_rng(seed)
    short, long = rng.lognormal(6.3, 1.0, count), (rng.pareto(1.2, count) + 1) * 800
    length = np.clip(np.where(rng.random(count) < 0.15, long, short), 1, longest).astype(np.int64)
    length[count // 2] = longest
    return length


@pytest.mark.parametrize("seed", range(4))
def test_a_heavy_tail_is_even_over_ranks_with_far_fewer_tokens_exchanged_than_at_its_widest_degree(
    seed: int,
) -> None:
    length = heavy_tail(2048, 131_072, seed)
    step: Step = {
        "length": length,
        "cost": length * (length + 24_576),
        "num_ranks": 128,
        "capacity": 65_536,
    }
    groups = hybrid_groups(**step)
    check(groups, step | {"widths": None})
    widest, least = (uniform_groups(**step, width=width) for width in (int(groups.width.max()), 2))
    assert length.max() > step["capacity"], "the longest does not fit one rank"
    assert step["cost"].max() * 128 > 4 * step["cost"].sum(), "nor is it in balance with one"
    assert len(set(groups.width.tolist())) >= 3
    assert groups.width.min() == 1
    assert groups.imbalance <= 1.05
    assert least.imbalance > 2, "the degree that the longest needs to fit"
    assert widest.imbalance > 1, "the degree that it needs to be even"
    assert groups.exchanged_tokens * 3 < widest.exchanged_tokens
    assert groups.width[groups.group[length < 4096]].mean() < 1.2, (
        "short sequences are on one rank, nearly all"
    )


def test_without_long_sequences_every_rank_is_on_its_own() -> None:
    length = heavy_tail(512, 4096, 0)
    groups = hybrid_groups(length, length * (length + 24_576), num_ranks=32, capacity=32_768)
    assert groups.width.tolist() == [1] * 32
    assert groups.exchanged_tokens == 0
    assert groups.imbalance <= 1.005


def test_sequences_too_coarse_for_balance_share_a_wider_group() -> None:
    five = np.full(5, 10)
    groups = hybrid_groups(five, five, num_ranks=4, capacity=100)
    assert groups.width.tolist() == [4], (
        "on single ranks one would have two of them, and cost 1.6 times the mean"
    )
    assert groups.imbalance == 1
    assert hybrid_groups(five, five, num_ranks=4, capacity=100, widths=[1]).imbalance == 1.6


def test_fewer_sequences_than_ranks_are_widened() -> None:
    groups = hybrid_groups(np.array([9, 9, 9]), np.array([10, 10, 10]), num_ranks=8, capacity=9)
    assert groups.width.tolist() == [2, 2, 2]
    assert groups.first.tolist() == [0, 2, 4]


def test_sequences_that_have_no_ranks_for_groups_of_their_own_share_one() -> None:
    groups = hybrid_groups(np.array([21, 15]), np.array([1, 1]), num_ranks=4, capacity=10)
    assert groups.width.tolist() == [4]
    assert groups.group.tolist() == [0, 0]


def test_lengths_that_fit_in_one_order_only_are_fitted_by_first_fit_decreasing() -> None:
    # By cost, the second and third would share a rank, 9 tokens, and the last fit with neither them nor the first.
    length, cost = np.array([5, 4, 5, 6]), np.array([10, 6, 3, 1])
    groups = hybrid_groups(length, cost, num_ranks=2, capacity=10, widths=[1])
    assert groups.group.tolist() == [1, 0, 1, 0], "longest first"


def test_one_degree_for_all_must_divide_the_ranks() -> None:
    one = np.array([4])
    with pytest.raises(PlaceError, match=r"width: 4 does not divide 6 ranks; nearest that do: \[2, 3, 6\]"):
        uniform_groups(one, one, num_ranks=6, capacity=9, width=4)
    with pytest.raises(PlaceError, match="the widest group of 1 ranks holds 3"):
        uniform_groups(one, one, num_ranks=6, capacity=3, width=1)


def test_an_empty_step_has_no_groups() -> None:
    groups = hybrid_groups(np.empty(0, np.int64), np.empty(0, np.int64), num_ranks=4, capacity=10)
    assert len(groups.first) == len(groups.group) == groups.exchanged_tokens == 0
    assert groups.imbalance == 1


def test_every_field_is_in_the_hash() -> None:
    base = hybrid_groups(np.array([5, 5]), np.array([1, 1]), num_ranks=2, capacity=9)
    others = [
        hybrid_groups(np.array([5, 5]), np.array([1, 1]), num_ranks=3, capacity=9),
        hybrid_groups(np.array([5, 5]), np.array([2, 2]), num_ranks=2, capacity=9),
        hybrid_groups(np.array([4, 4]), np.array([1, 1]), num_ranks=2, capacity=9),
        hybrid_groups(np.array([5, 5, 0]), np.array([1, 1, 0]), num_ranks=2, capacity=9),
        uniform_groups(np.array([5, 4]), np.array([1, 1]), num_ranks=2, capacity=5, width=2),
    ]
    assert len({base.hash, *(other.hash for other in others)}) == 6


SCRIPT = """
import numpy as np
from omniload.placing import assign_encoders, hybrid_groups
rng = np.random.default_rng(0)
digests = []
for _ in range(20):
    length = np.minimum((rng.pareto(1.1, 300) * 900).astype(np.int64), 60_000) + 1
    groups = hybrid_groups(length, length * (length + 999), num_ranks=48, capacity=40_000)
    encoder = assign_encoders(length % 17, length, length % 12 * 4, num_ranks=48)
    digests.append((groups.hash, encoder.tolist()))
import hashlib; print(hashlib.sha256(repr(digests).encode()).hexdigest())
"""


def test_groups_and_encoders_are_the_same_under_any_hash_seed_and_instruction_set() -> None:
    found = {
        printed(SCRIPT, PYTHONHASHSEED="1").strip(),
        printed(SCRIPT, PYTHONHASHSEED="2", NPY_DISABLE_CPU_FEATURES="AVX512F AVX2 FMA3").strip(),
    }
    assert len(found) == 1
    assert len(found.pop()) == hashlib.sha256().digest_size * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"capacity": 4},
            "the step has 12 tokens, but 2 ranks of 4 hold 8; 3 ranks or a capacity of 6 would do",
        ),
        ({"length": np.array([7, 7]), "widths": [1], "capacity": 8}, None),
        (
            {"length": np.array([9, 1]), "widths": [1], "capacity": 8},
            "widest group of 1 ranks holds 8; allow wider",
        ),
        (
            {"length": np.array([3, 3, 3]), "cost": np.ones(3, int), "widths": [1], "capacity": 5},
            "found no way to hold",
        ),
        ({"length": np.array([-1, 2])}, "groups: length is -1 in row 0, below 0"),
        ({"cost": np.array([1.5, np.inf])}, "groups: cost is of float64; give whole numbers"),
        ({"cost": np.array([1])}, "columns have the shapes length [2], cost [1]"),
        ({"cost": np.array([2**62, 2**62])}, "cost adds up to more than 64 bits"),
        ({"length": np.array([2**62, 1]), "capacity": 2**63, "num_ranks": 4}, "do not count in 64 bits"),
        ({"capacity": 0}, "capacity is 0; a rank must hold 1 token or more"),
        ({"num_ranks": 0}, "num_ranks is 0, not in 1.."),
        ({"num_ranks": 2**50}, "not in 1.."),
        ({"widths": [2, 4]}, "widths: [2, 4] must begin with 1"),
        ({"widths": [1, 2, 3]}, "each be a multiple of the one before"),
        ({"widths": []}, "widths: [] must begin with 1"),
        ({"widths": [1, 1]}, "each be a multiple of the one before"),
    ],
)
def test_what_cannot_be_grouped_is_refused_in_one_line(change: Step, message: str | None) -> None:
    step: Step = {
        "length": np.array([6, 6]),
        "cost": np.array([1, 1]),
        "num_ranks": 2,
        "capacity": 10,
        **change,
    }
    if message is None:
        assert hybrid_groups(**step).group.tolist() == [0, 1]
        return
    with pytest.raises(PlaceError) as caught:
        hybrid_groups(**step)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
