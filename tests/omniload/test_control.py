"""Control of a running loader: the rule for when, and that every rank, every restart and a replay see the same."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from omniload import Chaos, DataLoader, MixtureLoader
from omniload.errors import DecisionError, StateError
from omniload.planner.decisions import Decision, SetWeights, SkipSteps, to_json
from tests.omniload.mixtures import LANES, hard_mixture, on_both_runtimes, write_parquet

STEPS = 24


def loader_of(mixture: dict[str, Any], **keys: Any) -> MixtureLoader:
    loader = DataLoader(mixture, **keys)
    assert isinstance(loader, MixtureLoader)
    return loader


def hashes_of(loader: MixtureLoader) -> dict[int, str]:
    """Hashes of the plans of what is left of a stream."""
    with loader:
        return {group[0]["step"]: loader.plan(group[0]["step"]).hash for group in loader.steps()}


def controlled(loader: MixtureLoader) -> dict[int, str]:
    """A run that decides as it goes, always as early as it may."""
    found = {}
    with loader:
        for group in loader.steps():
            step = group[0]["step"]
            found[step] = loader.plan(step).hash
            at = step + loader.control.delay_steps
            if step % 5 == 1:
                loader.control.set_weights({"long": 0.1 + step / 40}, at)
            if step % 7 == 2:
                loader.control.skip_steps(2, at)
    return found


@pytest.mark.parametrize("prefetch_steps", [1, 3])
def test_the_earliest_step_is_never_planned_however_far_planning_has_come(
    tmp_path: Path, prefetch_steps: int
) -> None:
    mixture = hard_mixture(tmp_path, steps=STEPS)
    reached = 0
    with loader_of(mixture, prefetch_steps=prefetch_steps) as loader:
        assert loader.control.earliest_step == 0
        for group in loader.steps():
            step = group[0]["step"]
            assert loader.control.earliest_step == step + prefetch_steps + 2
            planner = loader._runtime._planner  # type: ignore[union-attr]
            planned = planner.state.step - 1  # the step planned last
            assert planned <= step + prefetch_steps + 1
            reached = max(reached, planned - step)
            if step == 8:
                # Let the planner come as far as it can: the rule leaves no step more than it has to.
                for _ in range(200):
                    if planner.state.step == step + prefetch_steps + 2:
                        break
                    loader._runtime._threads[0].join(0.05)  # type: ignore[union-attr]
                reached = max(reached, planner.state.step - 1 - step)
            with pytest.raises(DecisionError, match=f"the earliest is {step + prefetch_steps + 2}"):
                loader.control.skip_steps(1, loader.control.earliest_step - 1)
        assert loader.control.log == ()
    assert reached == prefetch_steps + 1, "the planner never came as far as it can"


@on_both_runtimes
@pytest.mark.chaos
def test_neither_timing_nor_ranks_nor_a_replay_of_the_log_change_what_decisions_do(
    execution: str, tmp_path: Path
) -> None:
    mixture = hard_mixture(tmp_path, steps=STEPS)
    quiet = loader_of(mixture)
    reference = controlled(quiet)
    assert len(reference) == STEPS
    assert len(quiet.control.log) > 5
    log = [json.loads(json.dumps(to_json(decision))) for decision in quiet.control.log]
    for seed in range(2 if execution == "inline" else 1):
        chaotic = loader_of(mixture, chaos=Chaos(seed=seed, max_delay_s=0.002))
        assert controlled(chaotic) == reference
        assert chaotic.control.digest == quiet.control.digest
    for rank, dp_size in ((0, 2), (1, 2), (2, 3)) if execution == "inline" else ((1, 2),):
        part = loader_of(mixture, dp_rank=rank, dp_size=dp_size)
        assert controlled(part) == reference
        assert part.control.log == quiet.control.log
    replay = loader_of(mixture, prefetch_steps=5)
    replay.control.replay(log)
    assert replay.control.log == quiet.control.log
    assert hashes_of(replay) == reference
    assert hashes_of(loader_of(mixture)) != reference, "the decisions decided nothing"


@on_both_runtimes
def test_a_resume_at_any_step_knows_what_is_decided_and_pending(execution: str, tmp_path: Path) -> None:
    mixture = hard_mixture(tmp_path, steps=STEPS)
    found, states = {}, []
    with loader_of(mixture) as loader:
        for group in loader.steps():
            step = group[0]["step"]
            found[step] = loader.plan(step).hash
            if step in (2, 3, 10):
                loader.control.set_weights({"long": 0.6, "short": 0.1})
                loader.control.skip_steps(1)
            if step == 14:
                loader.control.set_weights(None, 19)
            states.append(json.loads(json.dumps(loader.state_dict())))
        last = loader.state_dict()
        log = loader.control.log
    assert any(state["stream"].get("decisions") for state in states), "nothing was pending at any step"
    assert any("decided" in state["stream"] for state in states)
    for step in range(0, STEPS, 1 if execution == "inline" else 11):
        state, dp_size = states[step], [1, 2, 3, 4][step % 4]
        with loader_of(mixture, dp_rank=step % dp_size, dp_size=dp_size) as resumed:
            resumed.load_state_dict(state)
            assert resumed.state_dict() == state
            assert resumed.control.earliest_step == step + 1
            for group in resumed.steps():
                now = group[0]["step"]
                assert resumed.plan(now).hash == found[now]
                # Decisions made after the state was saved are made again, as the same program does.
                if now in (2, 3, 10):
                    at = now + resumed.control.delay_steps
                    resumed.control.set_weights({"long": 0.6, "short": 0.1}, at)
                    resumed.control.skip_steps(1, at)
                if now == 14:
                    resumed.control.set_weights(None, 19)
            assert resumed.control.log == log
            assert resumed.state_dict() == last


@on_both_runtimes
def test_inside_a_step_that_step_is_planned_and_the_next_is_open_once_closed(tmp_path: Path) -> None:
    mixture = hard_mixture(tmp_path, steps=8)
    whole = hashes_of(loader_of(mixture))
    with loader_of(mixture) as loader:
        iterator = iter(loader)
        for _ in range(2 * LANES + 5):
            next(iterator)
        assert loader.control.earliest_step == 2 + 4
        loader.close()
        assert loader.control.earliest_step == 3
        with pytest.raises(DecisionError, match="step 2 is already planned"):
            loader.control.skip_steps(1, at_step=2)
        decision = loader.control.skip_steps(1)
        assert decision == SkipSteps(step=3, count=1)
        state = json.loads(json.dumps(loader.state_dict()))
        rest = [(lane["step"], lane["lane"]) for lane in loader]
        assert rest == [(step, lane) for step in range(2, 8) for lane in range(LANES)][5:]
        hashes = {step: loader.plan(step).hash for step in range(3, 8)}
    assert hashes[3] != whole[3]
    with loader_of(mixture) as resumed:
        resumed.load_state_dict(state)
        assert resumed.control.earliest_step == 3
        assert hashes_of(resumed) | {2: whole[2]} == {2: whole[2]} | hashes


@on_both_runtimes
def test_a_state_taken_inside_a_step_repeats_what_was_decided_for_it(tmp_path: Path) -> None:
    mixture = hard_mixture(tmp_path, steps=6)
    with loader_of(mixture) as loader:
        loader.control.skip_steps(2, 3)
        loader.control.set_weights({"long": 0.7}, 3)
        iterator = iter(loader)
        for _ in range(3 * LANES + 5):
            next(iterator)
        state = json.loads(json.dumps(loader.state_dict()))
        hashes = [loader.plan(group[0]["step"]).hash for group in loader.steps()]  # of this step first
        last = loader.state_dict()
    assert state["stream"]["step"] == 3
    with loader_of(mixture) as resumed:
        resumed.load_state_dict(state)
        assert [resumed.plan(group[0]["step"]).hash for group in resumed.steps()] == hashes
        assert resumed.state_dict() == last


@on_both_runtimes
def test_loading_a_state_takes_back_what_was_decided_since(tmp_path: Path) -> None:
    mixture = hard_mixture(tmp_path, steps=8)
    with loader_of(mixture) as loader:
        steps = loader.steps()
        next(steps)
        loader.control.set_weights({"long": 0.9}, 5)
        state = loader.state_dict()
        kept = loader.control.log
        next(steps)
        loader.control.skip_steps(3, 6)
        later = loader.state_dict()
        loader.load_state_dict(state)
        assert loader.control.log == kept
        loader.load_state_dict(later)
        assert loader.control.log == (*kept, SkipSteps(step=6, count=3))


@on_both_runtimes
def test_weights_that_leave_nothing_end_in_one_line_and_are_mended_where_they_are(tmp_path: Path) -> None:
    mixture = hard_mixture(tmp_path, steps=9)
    with loader_of(mixture) as loader:
        only = dict.fromkeys(loader.mixture.names, 0) | {"long": 1}
        loader.control.set_weights(only, 3)
        loader.control.set_weights({"long": 0}, 5)
        with pytest.raises(DecisionError, match="decided for step 5 leave no source a weight"):
            list(loader)
        assert loader.control.earliest_step == 5
        loader.control.set_weights({"filtered": 0.5, "tripled": 0.5})
        rest = [group[0]["step"] for group in loader.steps()]
    assert rest == [5, 6, 7, 8]


@on_both_runtimes
def test_another_thread_may_decide_at_any_time_and_the_log_replays(tmp_path: Path) -> None:
    mixture = hard_mixture(tmp_path, steps=60)
    loader = loader_of(mixture, chaos=Chaos(seed=1, max_delay_s=0.002))
    ended = threading.Event()
    failed: list[BaseException] = []

    def decide() -> None:
        try:
            while not ended.is_set():
                loader.control.set_weights({"long": 0.2 + len(loader.control.log) % 5 / 10})
                loader.state_dict()
                ended.wait(0.005)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=decide)
    thread.start()
    try:
        found = hashes_of(loader)
    finally:
        ended.set()
        thread.join()
    assert not failed
    assert len(loader.control.log) > 5
    replay = loader_of(mixture)
    replay.control.replay(loader.control.log)
    assert hashes_of(replay) == found


def test_several_ranks_have_to_name_the_step(tmp_path: Path) -> None:
    with loader_of(hard_mixture(tmp_path, steps=8), dp_rank=0, dp_size=2) as loader:
        with pytest.raises(DecisionError, match="at_step: needed with dp_size 2"):
            loader.control.skip_steps(1)
        assert loader.control.set_weights({"long": 1}, 0).step == 0


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"lnog": 1}, r"weights: no source 'lnog'; did you mean 'long'\?"),
        (
            {"long": 0.7, "short": 0.4},
            "shares of the stream, since not all sources are named, and add up to more",
        ),
        ({"long": 2}, "shares of the stream"),
        (dict.fromkeys(["long", "short", "filtered", "tripled"], 0), "weights: every weight is 0"),
        ({"long": 1e-9, "short": 1, "filtered": 1, "tripled": 1}, "the weight of 'long', 1e-09, is below"),
        ({"long": float("nan")}, "must be finite"),
        ({}, "a weight by name of source"),
    ],
)
def test_wrong_weights_are_refused_in_one_line_and_nothing_is_decided(
    tmp_path: Path, weights: dict[str, float], message: str
) -> None:
    with loader_of(hard_mixture(tmp_path)) as loader:
        with pytest.raises(DecisionError, match=message) as raised:
            loader.control.set_weights(weights)
        assert "\n" not in str(raised.value)
        assert loader.control.log == ()


def test_coefficients_are_refused_where_a_cap_is_in_the_unit_of_the_costs_they_replace(
    tmp_path: Path,
) -> None:
    loader = loader_of(hard_mixture(tmp_path, caps={"cost": 10**12}))
    with pytest.raises(DecisionError, match=r"another unit than caps\.cost"):
        loader.control.set_cost_coefficients({"tokens": 1})
    with pytest.raises(DecisionError, match=r"another unit than caps\.cost"):
        loader.control.replay([{"step": 3, "kind": "coefficients", "coefficients": {"tokens": 1}}])
    assert loader.control.log == ()


def test_a_replay_is_taken_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    with loader_of(hard_mixture(tmp_path)) as loader:
        next(iter(loader))
        log: list[Decision] = [SkipSteps(step=9, count=1), SetWeights(step=1, weights={"long": 1})]
        with pytest.raises(DecisionError, match="step 1 is already planned, or may be on some rank"):
            loader.control.replay(log)
        assert loader.control.log == ()
        loader.control.replay(log[:1])
        assert loader.control.log == tuple(log[:1])


@pytest.mark.parametrize(
    "damage",
    [
        {"decisions": None},
        {"decisions": {"past": [], "digest": "0"}},
        {"decisions": {"past": 3}},
        {"decisions": {"past": [{"step": 0, "kind": "skip", "count": 5}]}},
        {"decisions": {"past": ["x"]}},
    ],
)
def test_a_state_whose_decisions_are_not_those_made_is_refused(
    tmp_path: Path, damage: dict[str, Any]
) -> None:
    with loader_of(hard_mixture(tmp_path)) as loader:
        loader.control.skip_steps(1)
        state = loader.state_dict()
        with pytest.raises(StateError, match="its decisions are not those that were made"):
            loader.load_state_dict({**state, **damage})
        loader.load_state_dict(state)


def test_a_state_of_the_version_before_decisions_is_refused(tmp_path: Path) -> None:
    with loader_of(hard_mixture(tmp_path)) as loader:
        state = {**loader.state_dict(), "version": 2}
        with pytest.raises(StateError, match="has version 2, this omniload reads 3"):
            loader.load_state_dict(state)


@on_both_runtimes
def test_bad_rows_of_skipped_steps_are_counted_and_written_down(tmp_path: Path) -> None:
    rows: list[list[int]] = [[1] * 20 if i % 5 else [] for i in range(200)]
    write_parquet(tmp_path / "data.parquet", rows)
    mixture = {
        "seq_len": 64,
        "packs": 2,
        "quarantine": str(tmp_path / "bad.jsonl"),
        "shuffle": "none",
        "sources": {"a": {"path": str(tmp_path / "data.parquet"), "weight": 1}},
    }
    with loader_of(mixture) as loader:
        loader.control.skip_steps(5, at_step=1)
        steps = loader.steps()
        next(steps)
        before = loader.ledger().sources["a"]
        next(steps)
        after = loader.ledger().sources["a"]
    assert before.skipped_tokens == 0
    assert after.skipped_tokens >= 4 * 2 * 60
    assert after.emitted_tokens == after.served_tokens + after.carried_tokens + after.skipped_tokens
    assert after.failures - before.failures >= 5
    written = [json.loads(line) for line in (tmp_path / "bad.jsonl").read_text().splitlines()]
    assert len(written) == after.failures
    assert {line["step"] for line in written} == {0, 1}


def test_without_decisions_the_state_says_nothing_of_them(tmp_path: Path) -> None:
    with loader_of(hard_mixture(tmp_path)) as loader:
        state = loader.state_dict()
    assert "decisions" not in state
    assert not state["stream"].keys() & {"decided", "decisions"}
