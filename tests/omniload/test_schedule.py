"""Schedules: stages and ramps by step, tokens and passes; exact, and a function of the state alone."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from omniload.errors import MixtureError
from omniload.mixture import Mixture
from omniload.planner import Planner, StreamState
from omniload.schedule import Stage, half_cosine, weights_in
from omniload.weights import WEIGHT_UNIT, integer_weights
from tests.omniload.planning import FakeMetadata

SEQ_LEN = 16
A, B = {"a": 1, "b": 0}, {"a": 0, "b": 1}


def mixture(schedule: list[dict[str, Any]], sources: dict[str, Any] | None = None, **keys: Any) -> Mixture:
    specs = {
        name: {"path": "unused", "weight": 1, "on_exhausted": "repeat"} | spec
        for name, spec in (sources or {"a": {}, "b": {}}).items()
    }
    return Mixture.load({"seq_len": SEQ_LEN, "packs": 4, "sources": specs, "schedule": schedule, **keys})


def shares(given_mixture: Mixture, step: int, **progress: Any) -> list[int]:
    return integer_weights(given_mixture.weights_at(step, **progress))


def states_of(given_mixture: Mixture, rows: list[list[list[int]]]) -> tuple[list[StreamState], list[str]]:
    """The state before every step, and the hash of its plan; with a resume at every step that has to agree."""
    metadata = FakeMetadata(rows, SEQ_LEN)
    planner = Planner(given_mixture, metadata, StreamState.initial(len(rows)))
    states, hashes = [planner.state], []
    while (plan := planner.next()) is not None:
        hashes.append(plan.hash)
        states.append(planner.state)
    for step, state in enumerate(states[:-1]):
        text = json.dumps(state.to_json(given_mixture.names))
        resumed = Planner(
            given_mixture, metadata, StreamState.from_json(json.loads(text), given_mixture.names)
        )
        plan = resumed.next()
        assert plan is not None
        assert plan.hash == hashes[step]
        assert json.dumps(resumed.state.to_json(given_mixture.names)) == json.dumps(
            states[step + 1].to_json(given_mixture.names)
        )
    return states, hashes


def test_a_ramp_leads_from_the_stage_before_to_its_own_weights_at_its_position() -> None:
    given_mixture = mixture(
        [{"step": 10, "weights": A}, {"step": 20, "ramp": "linear", "weights": B}, {"step": 30}]
    )
    half, unit = WEIGHT_UNIT // 2, WEIGHT_UNIT
    assert shares(given_mixture, 9) == [half, half], "the sources' own weights"
    assert shares(given_mixture, 10) == [unit, 0]
    assert shares(given_mixture, 15) == [half, half]
    assert shares(given_mixture, 20) == [0, unit]
    assert shares(given_mixture, 29) == [0, unit], "the next stage has no ramp"
    assert shares(given_mixture, 30) == shares(given_mixture, 10**9) == [half, half]
    own = mixture([{"step": 8, "ramp": "cosine", "weights": A}])
    assert shares(own, 0) == [half, half], "a first stage ramps from the sources' own weights, from step 0 on"
    assert shares(own, 8) == [unit, 0]
    back = mixture([{"step": 0, "weights": A}, {"step": 4, "ramp": "linear"}])
    assert shares(back, 2) == [3 * unit // 4, unit // 4], "a stage without weights ramps to the sources' own"


weights = st.lists(st.sampled_from([0.0, 1e-5, 0.1, 1.0, 40.0]), min_size=3, max_size=3).filter(any)


@settings(max_examples=1000, deadline=None)
@given(weights, weights, st.sampled_from(["linear", "cosine"]), st.integers(1, 10**13), st.data())
@example([1.0, 0.0, 0.0], [0.0, 1.0, 0.0], "cosine", 10**13, None)
def test_a_ramp_is_exact_parts_that_lie_between_its_ends(
    before: list[float], after: list[float], ramp: Any, whole: int, data: st.DataObject | None
) -> None:
    way = data.draw(st.integers(0, whole)) if data else whole // 3
    names = ["a", "b", "c"]
    stage = Stage(tokens=whole, ramp=ramp, weights=dict(zip(names, after, strict=True)))
    found = weights_in([stage], dict(zip(names, before, strict=True)), way)
    parts = integer_weights([found[name] for name in names])
    assert sum(parts) == WEIGHT_UNIT
    done = Fraction(way, whole) if ramp == "linear" else Fraction(half_cosine(way, whole), 2**32)
    ends = zip(integer_weights(before), integer_weights(after), strict=True)
    for part, (old, new) in zip(parts, ends, strict=True):
        assert abs(part - (old + (new - old) * done)) < 1
        assert min(old, new) <= part <= max(old, new)
    if way == whole:
        assert parts == integer_weights(after)


@settings(max_examples=1000)
@given(st.integers(1, 10**6), st.data())
def test_half_a_cosine_is_one_and_rises_all_along(whole: int, data: st.DataObject) -> None:
    way = data.draw(st.integers(0, whole))
    found = half_cosine(way, whole)
    assert found == pytest.approx(2**32 * (1 - math.cos(math.pi * way / whole)) / 2, abs=0.51)
    assert half_cosine(0, whole) == 0
    assert half_cosine(whole, whole) == 2**32
    assert way == whole or found <= half_cosine(way + 1, whole)


def test_half_a_cosine_is_the_same_everywhere() -> None:
    table = [half_cosine(way, 9973) for way in range(9974)]
    digest = hashlib.sha256(json.dumps(table).encode()).hexdigest()[:16]
    assert digest == "c9f0f9ecfce58e81"


def test_a_ramp_by_step_mixes_as_it_says() -> None:
    given_mixture = mixture(
        [{"step": 0, "weights": A}, {"step": 100, "ramp": "linear", "weights": B}], steps=120
    )
    states, _ = states_of(given_mixture, [[[8]] * 9, [[8]] * 9])
    emitted = np.array([[source.emitted_tokens for source in state.sources] for state in states])
    drawn = np.diff(emitted, axis=0)
    assert drawn[0, 1] == 0
    assert abs(drawn[:50, 1].sum() - drawn[:50].sum() * 0.245) <= 2 * 8  # the mean of 0, 0.01, … 0.49
    assert abs(drawn[:100, 1].sum() - drawn[:100].sum() * 0.495) <= 2 * 8
    assert drawn[101:, 0].sum() == 0


def test_a_stage_by_tokens_begins_with_the_first_step_before_which_so_many_entered_the_stream() -> None:
    given_mixture = mixture([{"tokens": 0, "weights": A}, {"tokens": 1000, "weights": B}], steps=40)
    states, _ = states_of(given_mixture, [[[7]] * 9, [[9]] * 9])
    emitted = np.array([[source.emitted_tokens for source in state.sources] for state in states])
    first = int(np.flatnonzero(emitted.sum(axis=1) >= 1000)[0])
    assert 0 < first < 40
    assert emitted[first, 1] == 0
    assert (np.diff(emitted[:, 1])[first:] > 0).all()
    assert emitted[-1, 0] == emitted[first, 0]


def test_a_ramp_by_tokens_goes_with_the_tokens_that_entered_the_stream() -> None:
    schedule = [{"tokens": 0, "weights": A}, {"tokens": 3000, "ramp": "cosine", "weights": B}]
    states, _ = states_of(mixture(schedule, steps=60), [[[7]] * 9, [[9]] * 9])
    share = []
    for state, after in itertools.pairwise(states):
        drawn = [
            now.emitted_tokens - was.emitted_tokens
            for was, now in zip(state.sources, after.sources, strict=True)
        ]
        declared = half_cosine(min(sum(s.emitted_tokens for s in state.sources), 3000), 3000) / 2**32
        share.append(declared)
        assert abs(drawn[1] - declared * sum(drawn)) <= 2 * 9 + 1
    assert share[0] == 0
    assert share[-1] == 1
    assert sum(0 < one < 1 for one in share) > 10


def test_a_stage_by_epoch_counts_the_passes_of_a_source_or_the_fewest_of_all() -> None:
    rows = [[[8]] * 20, [[8]] * 40]
    named = mixture([{"epoch": 0, "of": "a"}, {"epoch": 2, "of": "a", "weights": B}], steps=40)
    states, _ = states_of(named, rows)
    begun = [state.sources[0].cursor.epoch >= 2 for state in states]
    first = begun.index(True)
    assert first > 5
    assert states[-1].sources[0].emitted_samples == states[first].sources[0].emitted_samples
    fewest = mixture([{"epoch": 1, "weights": {"a": 2, "b": 1}}], steps=60)
    states, _ = states_of(fewest, rows)
    first = next(
        i for i, state in enumerate(states) if min(source.cursor.epoch for source in state.sources) >= 1
    )
    assert states[first].sources[0].cursor.epoch >= 1
    assert states[first].sources[1].cursor.epoch == 1
    drawn = [
        after.emitted_tokens - at.emitted_tokens
        for at, after in zip(states[first].sources, states[-1].sources, strict=True)
    ]
    assert drawn[0] == pytest.approx(2 * drawn[1], rel=0.05)


def test_a_source_that_left_has_made_all_of_its_passes() -> None:
    sources = {"a": {"repeat": 2, "on_exhausted": "drop_source"}, "b": {}, "c": {"weight": 0}}
    stages = [{"epoch": 2, "of": "a", "weights": {"a": 1, "b": 0, "c": 1}}]
    states, _ = states_of(mixture(stages, sources, steps=40), [[[8]] * 20, [[8]] * 40, [[8]] * 9])
    left = next(i for i, state in enumerate(states) if state.sources[0].exhausted)
    assert states[left].sources[2].emitted_samples == 0
    assert states[-1].sources[2].emitted_samples > 0
    assert states[-1].sources[1].emitted_samples == states[left].sources[1].emitted_samples


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (
            [{"weights": A}],
            r"schedule\.0: a stage is placed by one of step, tokens and epoch, and here by none",
        ),
        ([{"step": 1, "tokens": 2}], r"schedule\.0: .* and here by step and tokens"),
        ([{"step": 1, "of": "a"}], r"schedule\.0: of: goes with epoch, and this stage is placed by step"),
        (
            [{"step": 0}, {"tokens": 9}],
            "a stage at tokens 9 follows a stage at step 0: place all stages alike",
        ),
        (
            [{"epoch": 0, "of": "a"}, {"epoch": 1, "of": "b"}],
            "a stage at epoch 1 of b follows a stage at epoch 0 of a: place all stages alike",
        ),
        ([{"tokens": 5}, {"tokens": 5}], "stages must ascend, but tokens 5 follows tokens 5"),
        ([{"step": 0, "ramp": "linear", "weights": A}], "nothing before it to ramp from"),
        ([{"step": 3, "ramp": "square"}], "'linear' or 'cosine'"),
        ([{"epoch": 1, "of": "c"}], r"schedule, stage at epoch 1: no source 'c'; known are: a, b"),
        (
            [{"epoch": 1, "weights": A}, {"epoch": 2, "weights": B}],
            "no source has a weight in every stage, so there are no passes to count; name one by of:",
        ),
        ([{"epoch": -1}], "greater than or equal to 0"),
        ([{"tokens": 3, "weights": {"a": 1}}], "schedule, stage at tokens 3: no weight for source 'b'"),
        ([{"epoch": 1, "weights": {"a": 0, "b": 0}}], "schedule, stage at epoch 1: every weight is 0"),
    ],
)
def test_a_wrong_schedule_is_one_clear_line(schedule: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(MixtureError, match=message) as raised:
        mixture(schedule)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("policy", "epoch"), [("stop", 3), ("drop_source", 4)])
def test_a_stage_that_is_never_reached_is_refused(policy: str, epoch: int) -> None:
    sources = {"a": {"repeat": 3, "on_exhausted": policy}, "b": {}}
    with pytest.raises(
        MixtureError, match=f"epoch {epoch}: never reached, for of source 'a' at most {epoch - 1}"
    ):
        mixture([{"epoch": epoch}], sources)
    assert mixture([{"epoch": epoch - 1}], sources)
    assert mixture([{"epoch": epoch, "of": "b"}], sources)
