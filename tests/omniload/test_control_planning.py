"""What decisions do to plans: only from their step on, whenever they were made, exactly, and with nothing lost."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniload.errors import DecisionError, PlanError, StateError
from omniload.ledger import Ledger
from omniload.mixture import Mixture
from omniload.planner import Plan, Planner, StreamState
from omniload.planner.decisions import (
    Decided,
    Decision,
    SetCoefficients,
    SetWeights,
    SkipSteps,
    digest_of,
    from_json,
    to_json,
)
from omniload.planner.graph import DGraph
from omniload.weights import WEIGHT_UNIT, integer_weights
from tests.omniload.planning import FakeMetadata

SEQ_LEN = 16
NAMES = ["a", "b", "c"]
STEPS = 12
generator = np.random.default_rng(0)
ROWS = [[[int(n)] for n in generator.integers(1, most, 60)] for most in (40, 12, 25)]


def mixture(**keys: Any) -> Mixture:
    policies = {"a": "repeat", "b": "drop_source", "c": "repeat"}
    specs = {
        name: {"path": "unused", "weight": weight, "on_exhausted": policies[name]}
        for name, weight in zip(NAMES, (0.5, 0.3, 0.2), strict=True)
    }
    return Mixture.load(
        {"seq_len": SEQ_LEN, "packs": 4, "lanes": 2, "steps": STEPS, "sources": specs, **keys}
    )


def plans_of(
    given_mixture: Mixture, decisions: Sequence[Decision] = (), told_at: Sequence[int] = ()
) -> tuple[list[Plan], list[StreamState]]:
    """The plans of a run, and the state before each step; decision i is made before step ``told_at[i]`` is planned."""
    told_at = [*told_at, *[0] * (len(decisions) - len(told_at))]
    planner = Planner(given_mixture, FakeMetadata(ROWS, SEQ_LEN), StreamState.initial(3))
    plans, states = [], []
    for step in range(STEPS + 1):
        for decision, at in zip(decisions, told_at, strict=True):
            if at == step:
                planner.decide(decision)
        states.append(planner.state)
        plan = planner.next()
        if plan is None:
            states[-1] = planner.state  # says that it has ended, if it has before the last step
            break
        plans.append(plan)
    return plans, states


def hashes(plans: list[Plan]) -> list[str]:
    return [plan.hash for plan in plans]


weights = st.sampled_from([0.0, 0.001, 0.25, 0.3])
set_weights = st.builds(
    SetWeights,
    step=st.integers(0, STEPS - 1),
    weights=st.none()
    | st.dictionaries(st.sampled_from(NAMES), weights, min_size=1).filter(
        lambda chosen: len(chosen) < 3 or any(chosen.values())
    ),
)
skips = st.builds(SkipSteps, step=st.integers(0, STEPS - 1), count=st.integers(1, 3))
coefficients = st.builds(
    SetCoefficients, step=st.integers(0, STEPS - 1), coefficients=st.just({"tokens": 3, "tokens_squared": 1})
)
logs = st.lists(set_weights | skips | coefficients, max_size=4).map(
    lambda log: sorted(log, key=lambda one: one.step)
)


@settings(max_examples=60, deadline=None)
@given(logs, st.data())
def test_plans_depend_on_the_step_of_a_decision_and_not_on_when_it_was_made(
    log: list[Decision], data: st.DataObject
) -> None:
    given_mixture = mixture()
    told_at = [data.draw(st.integers(0, decision.step)) for decision in log]
    # Of one step, the order given counts, and it is that of the log.
    for i, (one, other) in enumerate(itertools.pairwise(log)):
        if one.step == other.step:
            told_at[i + 1] = max(told_at[i], told_at[i + 1])
    try:
        at_once, _ = plans_of(given_mixture, log)
    except DecisionError:
        with pytest.raises(DecisionError):
            plans_of(given_mixture, log, told_at)
        return
    in_time, _ = plans_of(given_mixture, log, told_at)
    assert hashes(in_time) == hashes(at_once)
    undisturbed, _ = plans_of(given_mixture)
    first = log[0].step if log else STEPS
    assert hashes(at_once)[:first] == hashes(undisturbed)[:first]


@settings(max_examples=60, deadline=None)
@given(logs, st.integers(0, STEPS - 1))
def test_a_state_with_what_is_decided_gives_the_rest_of_the_stream(log: list[Decision], step: int) -> None:
    given_mixture = mixture(
        schedule=[{"tokens": 200}, {"tokens": 500, "ramp": "cosine", "weights": dict.fromkeys(NAMES, 1)}]
    )
    try:
        plans, states = plans_of(given_mixture, log)
    except DecisionError:
        return
    step = min(step, len(plans))  # what is decided may leave too little data for all steps
    state = states[step]
    assert state.decisions == tuple(one for one in log if one.step >= step)
    text = json.dumps(state.to_json(NAMES))
    restored = StreamState.from_json(json.loads(text), NAMES)
    planner = Planner(given_mixture, FakeMetadata(ROWS, SEQ_LEN, 3), restored)
    rest = []
    while (plan := planner.next()) is not None:
        rest.append(plan.hash)
    assert rest == hashes(plans)[step:]
    assert json.dumps(planner.state.to_json(NAMES)) == json.dumps(states[-1].to_json(NAMES))


@settings(max_examples=60, deadline=None)
@given(logs)
def test_every_token_is_served_carried_or_skipped(log: list[Decision]) -> None:
    given_mixture = mixture()
    try:
        plans, states = plans_of(given_mixture, log)
    except DecisionError:
        return
    served = np.zeros(3, np.int64)
    for plan, state in zip(plans, states[1:], strict=False):
        np.add.at(served, plan.pieces["source"], plan.pieces["length"].astype(np.int64))
        ledger = Ledger.of(given_mixture, state)
        carried = np.zeros(3, np.int64)
        np.add.at(carried, state.carried["source"], state.carried["length"].astype(np.int64))
        for name, was_served, waits in zip(NAMES, served, carried, strict=True):
            account = ledger.sources[name]
            assert account.served_tokens == was_served
            assert account.carried_tokens == waits
            assert account.emitted_tokens == was_served + waits + account.skipped_tokens
    due = sum(one.count for one in log if isinstance(one, SkipSteps) and one.step < len(plans))
    skipped = sum(source.skipped_tokens for source in states[-1].sources)
    assert (skipped > 0) == (due > 0) or len(plans) < STEPS
    assert skipped <= (due + 4) * 4 * SEQ_LEN


def undated(plan: Plan) -> bytes:
    pieces = plan.pieces.copy()
    pieces["born"] = 0
    return pieces.tobytes()


@pytest.mark.parametrize("count", [1, 4])
def test_a_skip_leaves_out_exactly_the_steps_that_would_have_come(count: int) -> None:
    at = 5
    whole, _ = plans_of(mixture(steps=STEPS), [])
    plans, states = plans_of(mixture(steps=STEPS), [SkipSteps(step=at, count=count)])
    assert [plan.step for plan in plans] == list(range(STEPS)), "step numbers go on"
    assert hashes(plans)[:at] == hashes(whole)[:at]
    for plan, other in zip(plans[at:], whole[at + count :], strict=False):
        assert undated(plan) == undated(other)
        assert (plan.step - plan.pieces["born"].astype(int)).tolist() == (
            other.step - other.pieces["born"].astype(int)
        ).tolist(), "what waits has waited as long"
        assert plan.offsets.tolist() == other.offsets.tolist()
    left_out = np.concatenate([plan.pieces for plan in whole[at : at + count]])
    tokens = np.zeros(3, np.int64)
    np.add.at(tokens, left_out["source"], left_out["length"].astype(np.int64))
    assert [source.skipped_tokens for source in states[at + 1].sources] == tokens.tolist()
    assert any((plan.pieces["born"] < plan.step).any() for plan in plans[at:]), "nothing ever waited"


def test_a_skip_past_the_end_ends_the_stream_with_everything_counted() -> None:
    specs = {"a": {"path": "unused", "weight": 1}}
    given_mixture = Mixture.load({"seq_len": SEQ_LEN, "packs": 4, "sources": specs})
    metadata = FakeMetadata([[[9]] * 100], SEQ_LEN)
    planner = Planner(given_mixture, metadata, StreamState.initial(1))
    planner.decide(SkipSteps(step=2, count=10**6))
    plans = []
    while (plan := planner.next()) is not None:
        plans.append(plan)
    assert len(plans) == 2
    account = Ledger.of(given_mixture, planner.state).sources["a"]
    assert planner.state.ended
    assert planner.next() is None
    assert account.skipped_tokens > 0
    assert (
        account.emitted_tokens
        == account.served_tokens + account.skipped_tokens + account.dropped_at_end
        == 900
    )


def test_weights_decided_hold_from_their_step_on_until_the_schedule_is_returned_to() -> None:
    log = [
        SetWeights(step=3, weights={"a": 0, "b": 0, "c": 7}),
        SetWeights(step=6, weights=None),
    ]
    plans, states = plans_of(mixture(), log)
    born = np.concatenate([plan.pieces for plan in plans])
    assert set(born["source"][(born["born"] >= 3) & (born["born"] < 6)]) == {2}
    assert set(born["source"][born["born"] < 3]) == set(born["source"][born["born"] >= 6]) == {0, 1, 2}
    assert [Ledger.of(mixture(), state).sources["c"].weight for state in states[3:8]] == [0.2, 1, 1, 1, 0.2]


def test_a_share_decided_leaves_the_rest_to_the_others_in_proportion() -> None:
    unit = WEIGHT_UNIT

    def after(*changes: dict[str, float] | None, start: Decided | None = None) -> tuple[int, ...] | None:
        log = [SetWeights(step=1, weights=change) for change in changes]
        return (start or Decided()).after(log, NAMES, [0.5, 0.3, 0.2]).weights

    assert after({"a": 0.5}) == tuple(integer_weights([0.5, 0.3, 0.2]))
    assert after({"a": 0.0}) == tuple(integer_weights([0, 3, 2]))
    assert after({"c": 0.5}) == tuple(integer_weights([Fraction(5, 16), Fraction(3, 16), Fraction(1, 2)]))
    assert after({"a": 0.1, "b": 0.9}) == tuple(integer_weights([1, 9, 0])), "they leave nothing"
    assert after({"a": 1}, {"b": 0.5}) == (unit // 2, unit // 2, 0), "the second builds on the first"
    assert after({"a": 1, "b": 0, "c": 0}, {"a": 0.25}) == (unit, 0, 0), "nobody else has a weight"
    assert after({"a": 1}, None) is None
    assert after(start=Decided(weights=(1, unit - 1, 0))) == (1, unit - 1, 0)


def test_weights_that_leave_nothing_to_draw_end_in_one_line_and_can_be_decided_again() -> None:
    log = [SetWeights(step=3, weights={"a": 1, "b": 0, "c": 0}), SetWeights(step=4, weights={"a": 0})]
    planner = Planner(mixture(), FakeMetadata(ROWS, SEQ_LEN), StreamState.initial(3))
    for decision in log:
        planner.decide(decision)
    for _ in range(4):
        assert planner.next() is not None
    state = planner.state
    with pytest.raises(
        DecisionError, match="decided for step 4 leave no source a weight; decide on them again"
    ):
        planner.next()
    again = Planner(mixture(), FakeMetadata(ROWS, SEQ_LEN), state)
    again.decide(SetWeights(step=4, weights={"b": 1}))
    assert again.next() is not None


def test_weights_that_max_fraction_makes_no_stream_of_end_in_one_line_and_not_the_stream() -> None:
    made = mixture()
    a = made.sources["a"].model_copy(update={"max_fraction": 0.5})
    made = made.model_copy(update={"sources": {**made.sources, "a": a}})
    planner = Planner(made, FakeMetadata(ROWS, SEQ_LEN), StreamState.initial(3))
    planner.decide(SetWeights(step=2, weights={"a": 1.0}))
    assert planner.next() is not None
    assert planner.next() is not None
    with pytest.raises(
        DecisionError, match=r"decided for step 2: by max_fraction .* at most 0\.5 of the tokens"
    ):
        planner.next()


@pytest.mark.parametrize(
    ("given_weights", "message"),
    [
        ({"a": 0}, "every weight is 0"),
        ({}, "every weight is 0"),
        ({"a": "x"}, "the weight of 'a' is 'x'; give a number from 0 on"),
        ({"a": float("nan")}, "the weight of 'a' is nan"),
        ([1, 2, 3], "give a weight by name of source"),
        ({"aa": 1}, "no source 'aa'; did you mean 'a'"),
    ],
)
def test_a_strategy_that_mixes_by_no_weights_is_told_so_and_the_stream_does_not_end(
    given_weights: Any, message: str
) -> None:
    made = mixture(strategy="tests.omniload.test_control_planning:mixed_by")
    mixed_by.weights = given_weights  # type: ignore[attr-defined]
    planner = Planner(made, FakeMetadata(ROWS, SEQ_LEN), StreamState.initial(3))
    with pytest.raises(PlanError, match=f"strategy .*:mixed_by: mix: .*{message}"):
        planner.next()


def mixed_by(graph: DGraph) -> Plan:
    return graph.mix(mixed_by.weights).pack().balance().plan()  # type: ignore[attr-defined]


def test_coefficients_are_kept_for_the_cost_model() -> None:
    _, states = plans_of(mixture(), [SetCoefficients(step=4, coefficients={"documents": 3})])
    assert [state.decided.coefficients for state in states[3:6]] == [None, None, {"documents": 3}]


@settings(max_examples=1000, deadline=None)
@given(logs, st.lists(st.integers(1, 2**32), min_size=3, max_size=3))
def test_what_is_decided_survives_json(log: list[Decision], parts: list[int]) -> None:
    again = [from_json(json.loads(json.dumps(to_json(one)))) for one in log]
    assert again == log
    assert digest_of(again) == digest_of(log)
    assert not log or digest_of(log[1:]) != digest_of(log)
    decided = Decided(weights=tuple(integer_weights(parts)), coefficients={"frames": parts[0]})
    assert Decided.from_json(json.loads(json.dumps(decided.to_json())), 3) == decided


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (None, "a decision has a step and one of the kinds weights, skip, coefficients, drop, got None"),
        ({"step": 3, "kind": "lose"}, "one of the kinds"),
        (
            {"step": 3, "kind": "drop", "source": 1, "reason": ""},
            "the name of a source and a reason are needed",
        ),
        ({"step": 3, "kind": "skip"}, "a decision of kind skip has step and count"),
        ({"step": 3, "kind": "skip", "count": 1, "why": "x"}, "a decision of kind skip has step and count"),
        ({"step": -1, "kind": "skip", "count": 1}, "a step from 0 on, and -1 is none"),
        ({"step": 1.0, "kind": "skip", "count": 1}, "a step from 0 on"),
        ({"step": True, "kind": "skip", "count": 1}, "a step from 0 on"),
        ({"step": 2**32, "kind": "skip", "count": 1}, "a step from 0 on"),
        ({"step": 3, "kind": "skip", "count": 0}, "a number of steps from 1 on"),
        ({"step": 3, "kind": "weights", "weights": {}}, "a weight by name of source"),
        ({"step": 3, "kind": "weights", "weights": [1]}, "a weight by name of source"),
        ({"step": 3, "kind": "weights", "weights": {"a": "1"}}, "got '1' for 'a'"),
        ({"step": 3, "kind": "weights", "weights": {"a": -1}}, "must be finite and not negative, got -1"),
        ({"step": 3, "kind": "weights", "weights": {"a": float("nan")}}, "got nan"),
        ({"step": 3, "kind": "weights", "weights": {"a": float("inf")}}, "got inf"),
        ({"step": 3, "kind": "weights", "weights": {"a": 10**400}}, "must be finite"),
        ({"step": 3, "kind": "weights", "weights": {5: 1}}, "got 1 for 5"),
        (
            {"step": 3, "kind": "coefficients", "coefficients": {"tokens": 1.5}},
            "tokens: 1.5 is not an integer",
        ),
        ({"step": 3, "kind": "coefficients", "coefficients": {"frames": -1}}, "frames: -1 is not an integer"),
        ({"step": 3, "kind": "coefficients", "coefficients": {"token": 1}}, "did you mean 'tokens'"),
        ({"step": 3, "kind": "coefficients", "coefficients": 7}, "an integer by name is needed, got 7"),
    ],
)
def test_what_is_no_decision_is_refused_in_one_line(values: Any, message: str) -> None:
    with pytest.raises(DecisionError, match=message) as raised:
        from_json(values)
    assert "\n" not in str(raised.value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "tokens", "é"]), inner),
    max_leaves=5,
)


@settings(max_examples=1000, deadline=None)
@given(
    st.fixed_dictionaries(
        {
            "step": st.just(3) | json_values,
            "kind": st.sampled_from(["weights", "skip", "coefficients", "drop"]) | json_values,
        },
        optional=dict.fromkeys(("weights", "count", "coefficients", "source", "reason"), json_values),
    )
    | json_values
)
def test_any_json_is_a_decision_or_refused_as_none(values: Any) -> None:
    try:
        decision = from_json(values)
    except DecisionError:
        return
    assert from_json(json.loads(json.dumps(to_json(decision)))) == decision


def test_a_decision_does_not_change_with_what_it_was_made_from() -> None:
    weights = {"a": 0.5}
    decision = SetWeights(step=1, weights=weights)
    weights["a"] = 0.7
    assert decision.weights == {"a": 0.5}


@pytest.mark.parametrize(
    "damage",
    [
        {"decisions": [{"step": 1, "kind": "skip"}]},
        {"decisions": [{"step": 9, "kind": "skip", "count": 1}, {"step": 8, "kind": "skip", "count": 1}]},
        {"step": 5, "decisions": [{"step": 4, "kind": "skip", "count": 1}]},
        {"decisions": [{"step": 4, "kind": "weights", "weights": {"x": 1}}]},
        {"decisions": 5},
        {"decided": {"weights": [1, 2, 3], "coefficients": None}},
        {"decided": {"weights": [WEIGHT_UNIT], "coefficients": None}},
        {"decided": {"weights": None, "coefficients": {"tokens": 0.5}}},
        {"decided": {}},
    ],
)
def test_a_state_with_damaged_decisions_is_refused(damage: dict[str, Any]) -> None:
    with pytest.raises(StateError, match="damaged"):
        StreamState.from_json({**StreamState.initial(3).to_json(NAMES), **damage}, NAMES)
