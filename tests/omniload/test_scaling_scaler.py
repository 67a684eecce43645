"""Scaling follows the mixture and what is taken of it, ahead of shifts; it does not flap, and can be replayed."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from omniload.errors import PlanError
from omniload.mixture import Mixture
from omniload.planner import StreamState
from omniload.planner.decisions import SetWeights
from omniload.scaling import (
    Budget,
    Observation,
    Scaler,
    ScalerStart,
    ScalingDecision,
    ScalingPolicy,
    outlook,
    partition,
    replay,
)
from omniload.scaling.layout import UTILISATION
from tests.omniload.scaling import MIB, observed, profile

POLICY = ScalingPolicy(window=4, cool_down_steps=10)


def start(
    shares: dict[str, float],
    demand: float = 1000.0,
    *,
    rates: dict[str, float] | None = None,
    budget: Budget | None = None,
    policy: ScalingPolicy = POLICY,
) -> ScalerStart:
    """Sources whose readers give 100 tokens/s each, if nothing else is said."""
    sources = tuple(profile(name, (rates or {}).get(name, 100.0)) for name in shares)
    budget = budget or Budget(cpus=1000, memory_bytes=1 << 40)
    return ScalerStart(
        profiles=sources,
        shares=shares,
        partition=partition(sources, shares, demand, budget),
        budget=budget,
        policy=policy,
    )


def drive(scaler: Scaler, observation: Observation, steps: range) -> list[ScalingDecision]:
    """The same observation again and again."""
    return [decision for step in steps for decision in scaler.observe(step, observation)]


@given(st.data())
def test_inside_the_dead_band_nothing_changes(data: st.DataObject) -> None:
    """One source, so that its demand is what is observed; the readers are as many as the first demand wants."""
    first = data.draw(st.floats(10, 5000))
    scaler = Scaler(start({"a": 1.0}, first))
    readers = scaler.actors[0].readers[0].of
    low = POLICY.low * (readers - 1) * 100 + 1 if readers > 1 else 0.0
    noise = data.draw(st.lists(st.integers(int(low), int(POLICY.high * readers * 100 - 1)), max_size=40))
    assert [
        one
        for step, tokens in enumerate(noise)
        for one in scaler.observe(step, observed({"a": tokens}, ahead={"a": 1.0}))
    ] == []
    event(f"several readers: {readers > 1}")


@given(st.data())
def test_inside_the_dead_bands_of_many_sources_nothing_changes(data: st.DataObject) -> None:
    """Shares wander inside of their bands, each by itself; a source with room to spare takes the rest."""
    shares = {"a": 0.3, "b": 0.2, "c": 0.1, "rest": 0.4}
    given_start = start(shares, 10_000, rates={"rest": 1e6})
    scaler = Scaler(given_start)
    readers = given_start.partition.num_actors()
    assert readers == {"a": 38, "b": 25, "c": 13, "rest": 1}
    for step in range(data.draw(st.integers(1, 20))):
        tokens = {
            name: data.draw(
                st.integers(
                    int(POLICY.low * (readers[name] - 1) * 100) + 1,
                    int(POLICY.high * readers[name] * 100) - 1,
                )
            )
            for name in ("a", "b", "c")
        }
        tokens["rest"] = 10_000 - sum(tokens.values())
        assert scaler.observe(step, observed(tokens)) == ()


@st.composite
def histories(draw: st.DrawFn) -> tuple[ScalerStart, list[tuple[int, Observation]]]:
    """Anything that may be observed."""
    names = ["a", "b", "c"][: draw(st.integers(1, 3))]
    shares = {name: 1 / len(names) for name in names}
    begin = start(
        shares,
        draw(st.sampled_from([50.0, 500.0, 5000.0])),
        budget=Budget(
            cpus=draw(st.sampled_from([3.0, 30.0, 300.0])), memory_bytes=draw(st.integers(1, 40)) << 28
        ),
    )
    step, history = 0, []
    for _ in range(draw(st.integers(1, 25))):
        step += draw(st.integers(1, 4))
        shares = {name: draw(st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.9])) for name in names}
        history.append(
            (
                step,
                observed(
                    {name: draw(st.integers(0, 3000)) for name in names},
                    ahead=shares,
                    waited={name: draw(st.sampled_from([0.0, 0.0, 0.05, 3.0])) for name in names},
                    seconds=draw(st.sampled_from([0.5, 1.0, 60.0])),
                    stalled_s=draw(st.sampled_from([0.0, 0.0, 0.1, 0.5])),
                ),
            )
        )
    return begin, history


@given(histories())
def test_after_a_change_there_is_none_unless_the_schedule_asks_for_more(
    history: tuple[ScalerStart, list[tuple[int, Observation]]],
) -> None:
    begin, observations = history
    last: dict[str, ScalingDecision] = {}
    for decision in replay(begin, observations):
        before = last.get(decision.source)
        readers = begin.partition.num_actors()[decision.source] if before is None else before.actors_after
        assert decision.actors_before == readers
        assert decision.actors_after >= 1
        assert (decision.actors_after == readers) == (decision.reason == "crowded")
        if before is not None and decision.step - before.step < POLICY.cool_down_steps:
            assert decision.reason == "schedule"
            assert decision.actors_after > decision.actors_before
            assert decision.inputs.ahead > before.inputs.ahead
            event("sooner, by the schedule")
        last[decision.source] = decision
        event(f"{decision.reason}, {'more' if decision.actors_after > readers else 'fewer'}")


@given(histories())
def test_budgets_hold_and_the_actors_are_those_that_the_decisions_say(
    history: tuple[ScalerStart, list[tuple[int, Observation]]],
) -> None:
    begin, observations = history
    scaler = Scaler(begin)
    readers = begin.partition.num_actors()
    most = max(begin.budget.memory_bytes, begin.partition.memory_bytes)
    for step, observation in observations:
        for decision in scaler.observe(step, observation):
            readers[decision.source] = decision.actors_after
        assert sum(actor.memory_bytes for actor in scaler.actors) <= most
        indices: dict[str, list[int]] = {name: [] for name in readers}
        for actor in scaler.actors:
            for reader in actor.readers:
                assert reader.of == readers[reader.source]
                indices[reader.source].append(reader.index)
        assert {name: sorted(of) for name, of in indices.items()} == {
            name: list(range(count)) for name, count in readers.items()
        }
        event(f"held back: {bool(scaler.held_back)}")


@given(histories())
def test_a_log_gives_the_same_decisions_again(
    history: tuple[ScalerStart, list[tuple[int, Observation]]],
) -> None:
    begin, observations = history
    scaler = Scaler(begin)
    decided = [one for step, observation in observations for one in scaler.observe(step, observation)]
    log = json.dumps(
        [
            begin.to_json(),
            [(step, one.to_json()) for step, one in observations],
            [one.to_json() for one in decided],
        ]
    )
    of_start, of_observations, of_decisions = json.loads(log)
    again = replay(
        ScalerStart.from_json(of_start),
        [(step, Observation.from_json(one)) for step, one in of_observations],
    )
    assert list(again) == decided == [ScalingDecision.from_json(one) for one in of_decisions]
    event(f"decisions: {min(len(decided), 3)}")


def shifting(**keys: object) -> Mixture:
    """Mostly text, and from step 100 on mostly video."""
    return Mixture.load(
        {
            "seq_len": 100,
            "packs": 10,
            "sources": {
                "text": {"path": "nowhere", "weight": 9, "on_exhausted": "repeat"},
                "video": {"path": "nowhere", "weight": 1, "on_exhausted": "repeat"},
            },
            "schedule": [{"step": 0}, {"step": 100, "weights": {"text": 1, "video": 9}}],
            **keys,
        }
    )


def run(mixture: Mixture, begin: ScalerStart, steps: int, ahead: int) -> Iterator[ScalingDecision]:
    """A job that takes exactly what is scheduled, a step a second."""
    scaler = Scaler(begin)
    for step in range(1, steps):
        state = StreamState(step=step, **stream_at(mixture, step))
        look = outlook(mixture, state, begin.profiles, steps=ahead)
        yield from scaler.observe(
            step, observed({name: round(1000 * share) for name, share in look.now.items()}, ahead=look.ahead)
        )


def stream_at(mixture: Mixture, step: int) -> dict[str, object]:
    empty = StreamState.initial(len(mixture.names))
    return {"sources": empty.sources, "deficits": empty.deficits, "carried": empty.carried}


def test_readers_are_there_before_the_shift_and_go_after_it() -> None:
    decisions = list(run(shifting(), start({"text": 0.9, "video": 0.1}), 140, ahead=20))
    assert [(one.source, one.step, one.actors_before, one.actors_after) for one in decisions] == [
        ("video", 80, 2, 12),
        ("text", 100, 12, 9),  # text was still taken, in most of the steps that the average is over
        ("text", 110, 9, 2),
    ]
    assert [one.reason for one in decisions] == ["schedule", "schedule", "drift"]


def test_without_looking_ahead_readers_come_with_the_shift() -> None:
    decisions = [
        one
        for one in run(shifting(), start({"text": 0.9, "video": 0.1}), 140, ahead=0)
        if one.source == "video"
    ]
    assert [one.step for one in decisions] == [100]


def test_a_schedule_by_tokens_is_foreseen_too() -> None:
    mixture = shifting(schedule=[{"tokens": 0}, {"tokens": 100_000, "weights": {"text": 1, "video": 9}}])
    state = StreamState.initial(2)
    sources = [profile("text"), profile("video")]
    assert outlook(mixture, state, sources, steps=99).ahead == {"text": 0.9, "video": 0.1}
    assert outlook(mixture, state, sources, steps=100).ahead == {"text": 0.9, "video": 0.9}
    assert outlook(mixture, state, sources, steps=100).now == {"text": 0.9, "video": 0.1}


def test_a_decision_about_a_later_step_is_foreseen() -> None:
    state = StreamState.initial(2)
    state = StreamState(
        step=0,
        sources=state.sources,
        deficits=state.deficits,
        carried=state.carried,
        decisions=(SetWeights(step=5, weights={"video": 0.5}),),
    )
    sources = [profile("text"), profile("video")]
    assert outlook(shifting(), state, sources, steps=4).ahead["video"] == 0.1
    assert outlook(shifting(), state, sources, steps=5).ahead["video"] == pytest.approx(0.5)


@given(st.integers(0, 150), st.integers(0, 100), st.sampled_from(["linear", "cosine", None]))
def test_what_is_ahead_is_the_largest_of_every_step_to_come(step: int, steps: int, ramp: str | None) -> None:
    later = [
        {"step": 40, "weights": {"text": 2, "video": 1}},
        {"step": 70, "weights": {"text": 1, "video": 9}, **({"ramp": ramp} if ramp else {})},
        {"step": 120, "weights": {"text": 1, "video": 1}, **({"ramp": ramp} if ramp else {})},
    ]
    mixture = shifting(schedule=[{"step": 0}, *later])
    sources = [profile("text"), profile("video")]
    state = StreamState(step=step, **stream_at(mixture, step))
    looked = outlook(mixture, state, sources, steps=steps)
    each = []
    for ahead in range(steps + 1):
        weights = [float(weight) for weight in mixture.weights_at(step + ahead)]
        each.append([weight / sum(weights) for weight in weights])
    assert list(looked.now.values()) == each[0]
    assert list(looked.ahead.values()) == pytest.approx(list(map(max, zip(*each, strict=True))), rel=1e-9)


def test_weights_of_samples_are_shares_of_tokens_by_the_length_of_samples() -> None:
    sources = [profile("text"), profile("video", samples_per_s=10.0)]  # of 10 and of 100 tokens
    look = outlook(shifting(unit="samples"), StreamState.initial(2), sources, steps=0)
    assert look.now["text"] == pytest.approx(90 / 190)


def test_more_that_is_taken_than_scheduled_gets_readers() -> None:
    scaler = Scaler(start({"a": 0.5, "b": 0.5}))
    scheduled = {"a": 0.5, "b": 0.5}
    [decision] = drive(scaler, observed({"a": 900, "b": 100}, ahead=scheduled), range(8))
    assert (decision.source, decision.reason, decision.step) == ("a", "drift", POLICY.window - 1)
    assert decision.actors_after == -(-900 // (UTILISATION * 100))
    assert decision.cpus == 9.0


def test_a_source_that_lags_gets_one_more_and_keeps_it() -> None:
    scaler = Scaler(start({"a": 1.0}))
    slow = observed({"a": 1000}, waited={"a": 0.2}, stalled_s=0.05, seconds=1.05)
    [decision] = drive(scaler, slow, range(10))
    assert (decision.reason, decision.actors_before, decision.actors_after) == ("lag", 13, 14)
    assert decision.inputs.waited == pytest.approx(0.05 / 1.05)
    assert drive(scaler, observed({"a": 1000}), range(10, 200)) == []


def test_of_sources_that_lag_the_worst_is_helped_first() -> None:
    scaler = Scaler(start({"a": 0.3, "b": 0.7}))
    slow = observed({"a": 300, "b": 700}, waited={"a": 0.04, "b": 0.05}, stalled_s=0.05, seconds=1.05)
    decisions = drive(scaler, slow, range(9))
    assert [(one.source, one.reason, one.step) for one in decisions] == [("b", "lag", 3), ("a", "lag", 7)]


def test_waiting_that_no_client_sees_is_no_lag() -> None:
    scaler = Scaler(start({"a": 1.0}))
    assert drive(scaler, observed({"a": 1000}, waited={"a": 0.9}), range(100)) == []


def test_lag_that_more_readers_do_not_mend_ends() -> None:
    scaler = Scaler(start({"a": 1.0}, 100.0))
    slow = observed({"a": 100}, waited={"a": 0.5}, stalled_s=0.05, seconds=1.05)
    decisions = drive(scaler, slow, range(1000))
    assert [one.actors_after for one in decisions] == [3, 4, 5]


def test_a_shared_actor_that_has_too_much_to_do_loses_its_busiest_sources() -> None:
    names = [f"s{i}" for i in range(8)]
    scaler = Scaler(start(dict.fromkeys(names, 1 / 8), 320.0))
    [shared] = scaler.actors
    assert (shared.sources, shared.workers) == (tuple(names), 4)
    assert drive(scaler, observed(dict.fromkeys(names, 44)), range(20)) == []
    decisions = drive(scaler, observed({**dict.fromkeys(names, 50), "s5": 60, "s7": 55}), range(20, 60))
    assert [(one.source, one.reason, one.actors_before, one.actors_after) for one in decisions] == [
        ("s5", "crowded", 1, 1),
        ("s7", "crowded", 1, 1),
    ]
    assert [actor.sources for actor in scaler.actors] == [
        ("s0", "s1", "s2", "s3", "s4", "s6"),
        ("s5",),
        ("s7",),
    ]
    assert scaler.actors[0].workers == 4


def test_a_source_that_grows_leaves_the_actor_it_shares() -> None:
    scaler = Scaler(start({"a": 0.5, "b": 0.5}, 100.0))
    [shared] = scaler.actors
    assert shared.sources == ("a", "b")
    [decision] = drive(scaler, observed({"a": 150, "b": 50}), range(4))
    assert (decision.actors_before, decision.actors_after) == (1, 2)
    assert [actor.sources for actor in scaler.actors] == [("b",), ("a",), ("a",)]


def test_a_pause_of_the_trainer_changes_nothing() -> None:
    scaler = Scaler(start({"a": 1.0}))
    assert drive(scaler, observed({"a": 1000}), range(10)) == []
    assert scaler.observe(10, observed({"a": 1000}, seconds=600.0)) == ()
    assert drive(scaler, observed({"a": 1000}), range(11, 60)) == []


def test_what_stalls_hide_is_counted() -> None:
    """A trainer that waits half of its time would take twice as much."""
    scaler = Scaler(start({"a": 1.0}, 400.0))
    [decision] = drive(scaler, observed({"a": 400}, stalled_s=0.5), range(4))
    assert decision.inputs.stream_tokens_per_s == 800
    assert (decision.actors_before, decision.actors_after) == (5, 10)


def test_the_budget_holds_readers_back_and_says_so() -> None:
    memory = (7 * 228 + 227) * MIB  # an actor of one reader has 228 MiB, and there are 5
    scaler = Scaler(start({"a": 1.0}, 400.0, budget=Budget(cpus=1000, memory_bytes=memory)))
    [decision] = drive(scaler, observed({"a": 2000}), range(4))
    assert (decision.actors_before, decision.actors_after) == (5, 7)
    assert scaler.held_back == {"a": 18}
    scaler = Scaler(start({"a": 1.0}, 400.0, budget=Budget(cpus=5, memory_bytes=1 << 40)))
    assert drive(scaler, observed({"a": 2000}), range(100)) == []
    assert scaler.held_back == {"a": 20}


def test_what_one_source_gives_up_another_gets_at_once() -> None:
    shares = {"a": 0.5, "b": 0.5}
    begin = start(shares)
    begin = ScalerStart(
        profiles=begin.profiles,
        shares=shares,
        partition=begin.partition,
        budget=Budget(cpus=11, memory_bytes=begin.partition.memory_bytes),
        policy=POLICY,
    )
    decisions = drive(Scaler(begin), observed({"a": 900, "b": 100}), range(4))
    assert [(one.source, one.actors_after > one.actors_before) for one in decisions] == [
        ("b", False),
        ("a", True),
    ]


@pytest.mark.parametrize(
    "keys",
    [{"low": 0.85}, {"high": 0.8}, {"high": 1.5}, {"low": 0.0}, {"window": 0}, {"cool_down_steps": -1}],
)
def test_a_policy_that_would_flap_is_refused(keys: dict[str, float]) -> None:
    with pytest.raises(PlanError, match="scaling: "):
        ScalingPolicy(**keys)  # type: ignore[arg-type]
