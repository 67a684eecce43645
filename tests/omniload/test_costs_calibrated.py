"""Coefficients found in measured times predict times, and give exact integer costs."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniload.errors import PlanError
from omniload.planner.costs import FEATURES, CalibratedCost, TimeFit

TRUE = CalibratedCost(
    tokens=200 * 10**12,
    tokens_squared=3 * 10**9,
    patches=50 * 10**12,
    patches_squared=2 * 10**9,
    frames=10**12,
    frames_squared=10**7,
    documents=4 * 10**15,
    lanes=10**18,
)


def vector(cost: CalibratedCost) -> np.ndarray:
    return np.array([getattr(cost, name) for name in FEATURES], np.float64)


def seconds(cost: CalibratedCost, features: np.ndarray) -> float:
    return float(vector(cost) @ features) / 1e21


def lane(rng: np.random.Generator, *, encoders: bool = True) -> np.ndarray:
    """Features of a lane with a heavy tail of lengths."""
    length = np.minimum(rng.lognormal(7, 1.4, rng.integers(2, 40)).astype(np.int64) + 1, 131072)
    patches, frames = (
        rng.integers(0, 3, (2, len(length))) * rng.integers(100, 4000, (2, len(length)))
    ) * encoders
    return TimeFit.features(length, patches, frames)


def test_coefficients_of_exact_times_are_found() -> None:
    rng, fit = np.random.default_rng(0), TimeFit()
    for _ in range(300):
        features = lane(rng)
        fit.observe(features, seconds(TRUE, features))
    found = CalibratedCost.from_mapping(fit.coefficients())
    assert vector(found) == pytest.approx(vector(TRUE), rel=1e-2)
    assert fit.median_error is not None
    assert fit.median_error < 1e-4


def test_noise_and_stalls_move_the_prediction_little() -> None:
    rng, fit = np.random.default_rng(1), TimeFit()
    stalls = 0
    for _ in range(2000):
        features = lane(rng, encoders=False)
        stall = rng.random() < 0.02
        stalls += stall
        fit.observe(features, seconds(TRUE, features) * rng.normal(1, 0.03) * (20 if stall else 1))
    assert stalls > 20
    assert fit.median_error is not None
    assert 0.01 < fit.median_error < 0.05, "the noise itself is 3 %, of which half lies within 2 %"
    found = CalibratedCost.from_mapping(fit.coefficients())
    features = np.array([lane(rng, encoders=False) for _ in range(100)])
    ratio = (features @ vector(found)) / (features @ vector(TRUE))
    assert 0.9 < ratio.min() <= ratio.max() < 1.1
    assert (found.patches, found.frames) == (0, 0), "what was never seen explains nothing"


def test_the_error_is_of_times_not_yet_learnt() -> None:
    fit = TimeFit()
    one = TimeFit.features(np.array([100]), np.array([0]), np.array([0]))
    fit.observe(one, 1.0)
    assert fit.median_error is None
    fit.observe(one, 2.0)  # predicted to take 1
    assert fit.median_error == pytest.approx(0.5, rel=1e-6)


def test_old_times_are_forgotten() -> None:
    def errors(memory: float) -> float:
        rng, fit = np.random.default_rng(2), TimeFit(memory=memory)
        for step in range(600):
            features = lane(rng, encoders=False)
            fit.observe(features, seconds(TRUE, features) * (3 if step >= 300 else 1))
        features = lane(rng, encoders=False)
        now = seconds(CalibratedCost.from_mapping(fit.coefficients()), features)
        return abs(now / (3 * seconds(TRUE, features)) - 1)

    assert errors(30) < 0.01 < errors(10_000)


def test_features_that_always_vary_together_share_what_they_explain() -> None:
    rng, fit = np.random.default_rng(3), TimeFit()
    for _ in range(200):
        cuts = np.sort(rng.choice(131071, 7, replace=False)) + 1
        length = np.diff(np.concatenate([[0], cuts, [131072]]))
        features = TimeFit.features(length, np.zeros(8), np.zeros(8))
        fit.observe(features, seconds(TRUE, features) * rng.normal(1, 0.01))
    found = CalibratedCost.from_mapping(fit.coefficients())
    # Tokens, documents and lanes are constant: only their sum can be known, and the squares apart from it.
    assert found.tokens_squared == pytest.approx(TRUE.tokens_squared, rel=0.05)
    constant = 131072 * TRUE.tokens + 8 * TRUE.documents + TRUE.lanes
    assert 131072 * found.tokens + 8 * found.documents + found.lanes == pytest.approx(constant, rel=0.05)
    assert min(found.tokens, found.documents, found.lanes) > 0


@given(st.integers(0, 2**32), st.integers(1, 30), st.floats(1e-9, 1e9))
@settings(max_examples=200)
def test_coefficients_are_never_negative_whatever_the_times(seed: int, count: int, scale: float) -> None:
    rng, fit = np.random.default_rng(seed), TimeFit()
    for _ in range(count):
        fit.observe(lane(rng, encoders=bool(seed % 2)), rng.random() * scale + 1e-9)
    coefficients = fit.coefficients()
    assert list(coefficients) == list(FEATURES)
    assert all(type(value) is int and value >= 0 for value in coefficients.values())
    CalibratedCost.from_mapping(json.loads(json.dumps(coefficients)))


@pytest.mark.parametrize("time", [0.0, -1.0, float("nan"), float("inf"), -float("inf"), 1e-300])
def test_a_time_that_is_none_is_refused_and_nothing_learnt(time: float) -> None:
    fit = TimeFit()
    features = TimeFit.features(np.array([100, 5]), np.array([0, 0]), np.array([0, 0]))
    fit.observe(features, 1.0)
    before = fit.coefficients()
    with pytest.raises(PlanError, match=r"^seconds: [^\n]*; leave this measurement out$"):
        fit.observe(features, time)
    assert fit.coefficients() == before
    assert fit.median_error is None


@pytest.mark.parametrize(
    "features",
    [
        np.zeros(8),
        np.ones(7),
        np.ones((2, 8)),
        np.full(8, np.nan),
        np.full(8, np.inf),
        np.array([1.0] * 7 + [-1.0]),
    ],
)
def test_features_that_are_none_are_refused(features: np.ndarray) -> None:
    with pytest.raises(PlanError, match=r"^features: [^\n]* are none; make them with TimeFit\.features$"):
        TimeFit().observe(features, 1.0)


def test_a_fit_without_times_or_memory_is_refused() -> None:
    with pytest.raises(PlanError, match="no time has been observed"):
        TimeFit().coefficients()
    for memory in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(PlanError, match=r"memory: .* is not a positive number of observations"):
            TimeFit(memory=memory)


@given(
    st.lists(st.integers(0, 10**27), min_size=8, max_size=8),
    st.lists(st.tuples(*[st.integers(0, 2**17)] * 3), min_size=1, max_size=4),
)
@settings(max_examples=1000)
def test_costs_are_exact_whatever_the_coefficients(
    numbers: list[int], pieces: list[tuple[int, int, int]]
) -> None:
    model = CalibratedCost(**dict(zip(FEATURES, numbers, strict=True)))
    units = [np.array(column, np.int64) for column in zip(*pieces, strict=True)]
    t, t2, p, p2, f, f2, d, _ = numbers
    exact = [
        [-(-(n * t + n * n * t2 + d) // 10**9) for n in units[0].tolist()],
        [-(-(n * p + n * n * p2) // 10**9) for n in units[1].tolist()],
        [-(-(n * f + n * n * f2) // 10**9) for n in units[2].tolist()],
    ]
    n, k, m = (max(column.tolist()) for column in units)
    bound = max(n * t + n * n * t2 + d, k * p + k * k * p2, m * f + m * m * f2)
    if bound > (2**63 - 1) * 10**9:
        with pytest.raises(PlanError, match="cost 'calibrated': a piece costs up to"):
            model.cost(*units)
    else:
        assert model.cost(*units).tolist() == exact


@pytest.mark.parametrize(
    ("coefficients", "message"),
    [
        ({"tokens": -1}, "coefficients: tokens: -1 is not an integer of at least 0"),
        ({"tokens": 1.5}, "tokens: 1.5 is not an integer"),
        ({"patches": float("nan")}, "patches: nan is not an integer"),
        ({"token": 1}, "unknown 'token'; did you mean 'tokens'"),
        ({"lanes": None}, "lanes: None is not an integer"),
    ],
)
def test_coefficients_that_are_none_are_refused_in_one_line(
    coefficients: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        CalibratedCost.from_mapping(coefficients)


def test_coefficients_survive_json() -> None:
    assert CalibratedCost.from_mapping(json.loads(json.dumps(TRUE.to_json()))) == TRUE
