"""A source that cannot be read any more leaves by a decision of the planner's own, or ends the stream."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from omniload import DataLoader, MixtureLoader
from omniload.errors import MixtureError
from omniload.ledger import Ledger
from omniload.mixture import Mixture
from omniload.pieces import Cursor, SampleChunk
from omniload.planner import Plan, Planner, StreamState
from omniload.planner.decisions import Decision, DropSource, SetWeights, SkipSteps, from_json, to_json
from storage.errors import Corrupt, Transient
from tests.omniload.mixtures import hard_mixture, on_both_runtimes
from tests.omniload.planning import FakeMetadata

SEQ_LEN, STEPS = 16, 14
NAMES = ["a", "b", "c"]
generator = np.random.default_rng(0)
ROWS = [[[int(n)] for n in generator.integers(1, most, 60)] for most in (40, 12, 25)]


def mixture(**keys: Any) -> Mixture:
    sources = {
        name: {
            "path": "unused",
            "weight": weight,
            "on_exhausted": "stop" if name == "b" else "repeat",
            "on_unreachable": "drop_source",
        }
        for name, weight in zip(NAMES, (0.5, 0.3, 0.2), strict=True)
    }
    return Mixture.load(
        {"seq_len": SEQ_LEN, "packs": 4, "lanes": 2, "steps": STEPS, "sources": sources, **keys}
    )


class Lost(FakeMetadata):
    """Reading some sources fails from some read on, each by its number."""

    def __init__(self, after: dict[int, int], chunk_samples: int = 7, error: type[Exception] = Transient):
        super().__init__(ROWS, SEQ_LEN, chunk_samples)
        self.__dict__.update(after=after, reads={}, error=error)

    def read(self, source: int, cursor: Cursor) -> SampleChunk:
        reads = self.__dict__["reads"]
        reads[source] = reads.get(source, 0) + 1
        if reads[source] > self.__dict__["after"].get(source, 1 << 30):
            raise self.__dict__["error"]("s3://bucket/x", "connection reset")
        return super().read(source, cursor)


def run(planner: Planner) -> tuple[list[Plan], list[StreamState], list[DropSource]]:
    """Plans, the states before each and after the last, and what the planner decided by itself."""
    plans, states, own = [], [planner.state], []
    while (plan := planner.next()) is not None:
        own += planner.own_decisions
        assert all(decision.step == plan.step for decision in planner.own_decisions)
        plans.append(plan)
        states.append(planner.state)
    # What came of the attempt at a step that cannot be filled.
    own += planner.own_decisions
    states[-1] = planner.state
    return plans, states, own


def hashes(plans: Sequence[Plan]) -> list[str]:
    return [plan.hash for plan in plans]


@given(
    st.dictionaries(st.integers(0, 1), st.integers(1, 12), min_size=1),
    st.integers(1, 9),
    st.lists(
        st.one_of(
            st.builds(SkipSteps, step=st.integers(0, STEPS - 1), count=st.integers(1, 2)),
            st.builds(SetWeights, step=st.integers(0, STEPS - 1), weights=st.just({"a": 0.2})),
        ),
        max_size=2,
    ),
)
@example(
    {0: 10}, 1, [SetWeights(step=0, weights={"a": 0.2})]
)  # the last source goes in the step that ends it
def test_the_stream_is_that_of_a_run_in_which_just_this_was_decided(
    after: dict[int, int], chunk_samples: int, decisions: list[Decision]
) -> None:
    made = mixture()
    written: list[DropSource] = []
    planner = Planner(made, Lost(after, chunk_samples), StreamState.initial(3), written.append)
    for decision in decisions:
        planner.decide(decision)
    plans, states, own = run(planner)
    assert written == own
    # Data that can be read, and the same decisions, told beforehand: those of a log.
    again = Planner(made, FakeMetadata(ROWS, SEQ_LEN), StreamState.initial(3))
    for decision in [*decisions, *own]:
        again.decide(from_json(json.loads(json.dumps(to_json(decision)))))
    replayed, ends, none = run(again)
    assert none == []
    assert hashes(replayed) == hashes(plans)
    assert ends[-1].to_json(NAMES) == states[-1].to_json(NAMES)
    for decision in own:
        source = NAMES.index(decision.source)
        later = [plan for plan in plans if plan.step >= decision.step]
        assert not any((plan.pieces["source"] == source).any() for plan in later)
    for account in Ledger.of(made, states[-1]).sources.values():
        assert account.emitted_tokens == (
            account.served_tokens + account.carried_tokens + account.skipped_tokens
        )
    if len(plans) > 2:  # a state knows who left
        middle = StreamState.from_json(json.loads(json.dumps(states[2].to_json(NAMES))), NAMES)
        resumed = Planner(made, FakeMetadata(ROWS, SEQ_LEN), middle)
        for decision in own:
            if decision.step >= 2:
                resumed.decide(decision)
        assert hashes(run(resumed)[0]) == hashes(plans)[2:]


def test_what_was_drawn_of_it_is_left_out_and_counted() -> None:
    _, states, [decision] = run(Planner(mixture(), Lost({0: 12}, chunk_samples=2), StreamState.initial(3)))
    before, after = states[decision.step], states[decision.step + 1]
    carried = before.carried[before.carried["source"] == 0]["length"].sum()
    assert carried > 0, "nothing of it was carried"
    assert after.sources[0].skipped_tokens == carried
    assert not (after.carried["source"] == 0).any()
    assert after.deficits[0] == 0
    assert after.decided.dropped == (0,)
    assert states[-1].step == STEPS, (
        "a source that leaves so does not end the stream, whatever on_exhausted says"
    )


def test_nothing_is_planned_before_the_decision_is_written_down() -> None:
    def full(decision: DropSource) -> None:
        raise OSError(28, "No space left on device")

    planner = Planner(mixture(), Lost({0: 12}, chunk_samples=2), StreamState.initial(3), full)
    with pytest.raises(OSError, match="No space"):
        run(planner)
    assert planner.state.decisions == ()


def test_the_last_source_does_not_leave() -> None:
    planner = Planner(mixture(), Lost({0: 3, 1: 3, 2: 3}, chunk_samples=2), StreamState.initial(3))
    with pytest.raises(Transient, match="connection reset"):
        run(planner)
    only = {"weights": {"a": 1.0, "b": 0.0, "c": 0.0}}
    planner = Planner(mixture(), Lost({0: 3}, chunk_samples=2), StreamState.initial(3))
    planner.decide(SetWeights(step=0, **only))
    with pytest.raises(Transient, match="connection reset"):
        run(planner)


def test_what_the_data_itself_is_to_blame_for_ends_the_stream_as_ever() -> None:
    with pytest.raises(Corrupt):
        run(Planner(mixture(), Lost({0: 3}, 2, Corrupt), StreamState.initial(3)))


def test_ranks_that_plan_by_themselves_cannot_decide_for_each_other(tmp_path: Path) -> None:
    spec = of_files(tmp_path)
    with pytest.raises(MixtureError, match=r"sources\.long\.on_unreachable: drop_source .* execution: ray"):
        DataLoader(spec, dp_rank=0, dp_size=2, execution="inline")


def of_files(folder: Path, policy: str = "drop_source") -> dict[str, Any]:
    spec = hard_mixture(folder, steps=40)
    spec["sources"]["long"]["on_unreachable"] = policy
    return spec


def hashes_of(loader: MixtureLoader, at: dict[int, Callable[[], object]] | None = None) -> dict[int, str]:
    found = {}
    with loader:
        for group in loader.steps():
            step = group[0]["step"]
            found[step] = loader.plan(step).hash
            (at or {}).get(step, lambda: None)()
    return found


@on_both_runtimes
def test_a_run_goes_on_without_files_that_are_gone_and_its_log_replays(tmp_path: Path) -> None:
    spec = of_files(tmp_path)
    loader = DataLoader(spec)
    found = hashes_of(loader, {3: lambda: shutil.move(tmp_path / "long", tmp_path / "gone")})
    assert sorted(found) == list(range(40))
    [decision] = loader.control.log
    assert isinstance(decision, DropSource)
    assert decision.source == "long"
    assert 3 < decision.step < 39
    assert "long" in decision.reason
    state = json.loads(json.dumps(loader.state_dict()))
    shutil.move(tmp_path / "gone", tmp_path / "long")
    replay = DataLoader(spec, execution="inline")
    replay.control.replay(state["decisions"]["past"])
    assert hashes_of(replay) == found
    assert replay.state_dict() == state
    with DataLoader(spec, execution="inline") as other:
        other.load_state_dict(state)
        assert other.state_dict() == state
        assert other.ledger() == replay.ledger()


@on_both_runtimes
def test_by_default_it_ends_the_run_with_the_error(tmp_path: Path) -> None:
    with DataLoader(of_files(tmp_path, "stop")) as loader:
        steps = loader.steps()
        for _ in range(3):
            next(steps)
        shutil.rmtree(tmp_path / "long")
        with pytest.raises(FileNotFoundError, match="long"):
            list(steps)
        assert loader.control.log == ()
