"""Plans of one stream, shared by clients that come, fall behind, decide, leave and come back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniload import Mixture
from omniload.errors import CorruptSource, DecisionError, LoaderStopped
from omniload.pieces import Cursor, SampleChunk
from omniload.planner import Planner, StreamState
from omniload.planner.decisions import SetWeights, SkipSteps
from omniload.runtime.plan_log import PlanLog
from omniload.runtime.plan_stream import Planned, PlanStream
from omniload.runtime.steps import End
from storage import Store
from tests.omniload.planning import FakeMetadata

STEPS, AHEAD, WAIT_S = 12, 2, 60.0
ROWS = [[[5, 11], [3], [17]] * 30, [[2], [7, 7]] * 40]
MIXTURE = Mixture.model_validate(
    {
        "seed": 3,
        "seq_len": 16,
        "packs": 2,
        "lanes": 2,
        "steps": STEPS,
        "sources": {
            "a": {"path": "memory", "weight": 0.5, "on_exhausted": "repeat"},
            "b": {"path": "memory", "weight": 0.5, "on_exhausted": "repeat"},
        },
    }
)
START = StreamState.initial(2)


class Metadata:
    """The sources; reading waits while the gate is closed, and fails once there is an error to raise."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None
        self._rows = FakeMetadata(ROWS, seq_len=16)

    def read(self, source: int, cursor: Cursor) -> SampleChunk:
        assert self.gate.wait(WAIT_S)
        if self.error is not None:
            raise self.error
        return self._rows.read(source, cursor)


def plans(state: StreamState = START) -> list[Planned]:
    """What a planner of its own makes of the rest of the stream."""
    planner, found = Planner(MIXTURE, Metadata(), state), []
    while (plan := planner.next()) is not None:
        found.append(Planned(plan=plan, after=planner.state, quarantined=()))
    return found


WHOLE = plans()


@pytest.fixture
def metadata() -> Metadata:
    return Metadata()


@pytest.fixture
def begin(metadata: Metadata) -> Iterator[Callable[..., PlanStream]]:
    """Begins streams that are stopped at the end."""
    begun = []

    def one(state: StreamState = START, **keys: Any) -> PlanStream:
        stream = PlanStream(Planner(MIXTURE, metadata, state), **{"ahead": AHEAD, **keys})
        begun.append(stream)
        return stream

    yield one
    metadata.gate.set()
    for stream in begun:
        stream.stop()


def outcome(stream: PlanStream, step: int) -> Any:
    return stream.planned(step).result(WAIT_S)


def take(stream: PlanStream, client: str, steps: range) -> list[str]:
    """The hashes of some steps, as a client takes one after the other."""
    found = []
    for step in steps:
        stream.ask({client: step})
        found.append(outcome(stream, step).plan.hash)
    return found


def gone(stream: PlanStream, step: int) -> bool:
    """Whether a step was let go of."""
    found = outcome(stream, step)
    return isinstance(found, LoaderStopped) and f"step {step} was let go of" in str(found)


def hashes(steps: range) -> list[str]:
    return [WHOLE[step].plan.hash for step in steps]


def settled(stream: PlanStream) -> int:
    """How far it goes by itself: the step after the last that it may begin."""
    last = min(stream._asked.values()) + stream._ahead
    outcome(stream, min(last, STEPS - 1))
    return stream.step


def test_every_client_gets_the_steps_of_the_stream_and_then_its_end(begin: Any) -> None:
    stream = begin()
    assert stream.join("one", START)
    assert stream.join("other", START)
    for step in range(STEPS):
        for client in ("one", "other"):
            assert take(stream, client, range(step, step + 1)) == hashes(range(step, step + 1))
    stream.ask({"one": STEPS, "other": STEPS})
    for step in (STEPS, STEPS + 5):
        end = outcome(stream, step)
        assert isinstance(end, End)
        assert end.after == WHOLE[-1].after


def test_a_client_joins_where_its_state_is_one_of_the_stream_s_and_nowhere_else(begin: Any) -> None:
    stream = begin()
    assert stream.join("one", START)
    take(stream, "one", range(3))
    assert stream.join("behind", WHOLE[1].after), "the slowest is asking for step 2"
    assert not stream.join("too late", WHOLE[0].after), "step 1 was let go of"
    assert not stream.join("too soon", WHOLE[9].after)
    decided = replace(WHOLE[1].after, decisions=(SkipSteps(step=8, count=1),))
    assert not stream.join("of another run", decided)
    other = replace(WHOLE[1].after, carried=WHOLE[1].after.carried[:0])
    assert len(WHOLE[1].after.carried)
    assert not stream.join("of other data", other)
    assert stream.clients == {"one", "behind"}


def test_it_plans_no_further_than_allowed_beyond_the_slowest_client(begin: Any) -> None:
    stream = begin()
    assert stream.join("one", START)
    assert stream.join("slow", START)
    assert settled(stream) == AHEAD + 1
    far = stream.planned(AHEAD + 1)
    stream.ask({"one": 5})
    assert not far.done()
    assert stream.step == AHEAD + 1
    stream.ask({"slow": 1})
    assert far.result(WAIT_S).plan.hash == WHOLE[AHEAD + 1].plan.hash
    assert settled(stream) == AHEAD + 2
    stream.leave("slow")
    assert outcome(stream, 5 + AHEAD).plan.hash == WHOLE[5 + AHEAD].plan.hash


def test_without_clients_nothing_is_planned(begin: Any) -> None:
    stream = begin()
    first = stream.planned(0)
    assert not first.done()
    assert stream.join("one", START)
    assert first.result(WAIT_S).plan.hash == WHOLE[0].plan.hash


def test_a_step_that_all_are_done_with_is_gone_and_one_that_somebody_needs_is_kept(begin: Any) -> None:
    stream = begin()
    assert stream.join("one", START)
    assert stream.join("other", START)
    take(stream, "one", range(3))
    assert outcome(stream, 0).plan.hash == WHOLE[0].plan.hash
    stream.ask({"other": 2})
    assert gone(stream, 1)
    stream.leave("other")
    stream.ask({"one": 1})
    assert outcome(stream, 2).plan.hash == WHOLE[2].plan.hash, "nobody goes back"


def test_after_a_recovery_steps_are_kept_for_clients_that_come_later(begin: Any) -> None:
    stream = begin(WHOLE[3].after, keep_s=3600.0)
    stream.adopt("ahead", 7)
    stream.ask({"ahead": 7})
    assert outcome(stream, 7).plan.hash == WHOLE[7].plan.hash
    stream.adopt("behind", 5)
    assert take(stream, "behind", range(5, 9)) == hashes(range(5, 9))
    forgetful = begin(WHOLE[3].after)
    forgetful.adopt("ahead", 7)
    assert outcome(forgetful, 7).plan.hash == WHOLE[7].plan.hash
    assert gone(forgetful, 5), "keep_s is what it is kept by"


def test_a_client_is_adopted_once_and_never_set_back(begin: Any) -> None:
    stream = begin()
    assert stream.join("one", START)
    take(stream, "one", range(4))
    stream.adopt("one", 1)
    assert gone(stream, 1)


def test_a_decision_that_all_clients_make_takes_effect_once(begin: Any) -> None:
    stream = begin()
    decision = SetWeights(step=AHEAD + 2, weights={"a": 0.9})
    for client in ("one", "other", "third"):
        assert stream.join(client, START)
    assert settled(stream) == AHEAD + 1
    for client in ("other", "one", "third"):
        stream.decide(client, decision, 1)
    found = []
    for step in range(STEPS):
        stream.ask(dict.fromkeys(("one", "other", "third"), step))
        found.append(outcome(stream, step).plan.hash)
    expected = [one.plan.hash for one in plans(replace(START, decisions=(decision,)))]
    assert found == expected
    assert found != hashes(range(STEPS))
    with pytest.raises(LoaderStopped, match="not of this stream"):
        stream.decide("nobody", decision, 1)


def test_a_decision_made_twice_takes_effect_twice(begin: Any) -> None:
    stream = begin()
    skip = SkipSteps(step=AHEAD + 2, count=1)
    assert stream.join("one", START)
    assert stream.join("other", START)
    for nth in (1, 2):
        stream.decide("one", skip, nth)
    for nth in (1, 2):
        stream.decide("other", skip, nth)
    stream.decide("other", skip, 2)  # said again, as the answer was lost
    stream.ask({"one": AHEAD + 2, "other": AHEAD + 2})
    expected = plans(replace(START, decisions=(skip, skip)))[AHEAD + 2].plan.hash
    assert outcome(stream, AHEAD + 2).plan.hash == expected


def test_a_decision_that_a_client_owes_ends_the_stream_for_all_and_names_it(begin: Any) -> None:
    stream = begin()
    decision = SetWeights(step=AHEAD + 2, weights={"a": 0.9})
    assert stream.join("one", START)
    assert stream.join("forgetful", START)
    stream.decide("one", decision, 1)
    waiting = [stream.planned(AHEAD + 2), stream.planned(AHEAD + 3)]
    stream.ask({"one": 2, "forgetful": 2})
    for future in waiting:
        error = future.result(WAIT_S)
        assert isinstance(error, DecisionError)
        assert f"step {AHEAD + 2}: rank forgetful did not decide SetWeights" in str(error)
    assert not stream.join("late", WHOLE[1].after), "who comes now begins a stream of its own"


def test_who_leaves_owes_nothing(begin: Any) -> None:
    stream = begin()
    assert stream.join("one", START)
    assert stream.join("gone", START)
    stream.decide("one", SkipSteps(step=AHEAD + 2, count=1), 1)
    stream.leave("gone")
    stream.ask({"one": 4})
    assert isinstance(outcome(stream, AHEAD + 2), Planned)


def test_an_error_reaches_everyone_who_waits_and_whoever_comes_later(begin: Any, metadata: Metadata) -> None:
    stream = begin(ahead=100)
    metadata.gate.clear()
    assert stream.join("one", START)
    waiting = [stream.planned(step) for step in (0, 1, 1, 5)]
    metadata.error = CorruptSource("it is no Parquet file")
    metadata.gate.set()
    found = {id(future.result(WAIT_S)) for future in waiting}
    assert found == {id(metadata.error)}
    assert outcome(stream, 7) is metadata.error
    assert stream.failed


def test_who_waits_when_it_is_stopped_is_told(begin: Any) -> None:
    stream = begin()
    assert stream.join("one", START)
    far = stream.planned(STEPS - 1)
    stream.stop()
    assert isinstance(far.result(WAIT_S), LoaderStopped)
    assert not stream.join("other", START)


def test_a_planner_that_takes_over_goes_on_with_the_plans_that_were_logged(begin: Any) -> None:
    store = Store("memory://plan-stream/takes-over")
    decision = SetWeights(step=6, weights={"a": 0.9})
    expected = [one.plan.hash for one in plans(replace(START, decisions=(decision,)))]
    log = PlanLog.begin(store, MIXTURE.names, START)
    first = begin(log=log)
    assert first.join("one", START)
    first.decide("one", decision, 1)
    assert take(first, "one", range(5)) == expected[:5]
    logged = settled(first)
    log.recover(0)  # everything is written now
    # The first planner dies here: it writes and says nothing more.
    log = PlanLog.open(store, MIXTURE.names)
    assert log is not None
    recovery = log.recover(4)
    assert recovery.state.decisions == (decision,)
    assert list(recovery.hashes) == list(range(logged))
    second = begin(recovery.state, log=log, keep_s=3600.0)
    second.adopt("one", 4)
    second.decide("one", decision, 1)  # its client says so again, and it is known
    assert take(second, "one", range(4, STEPS)) == expected[4:]


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["ask", "join", "leave"]), st.integers(0, 2)), min_size=1, max_size=40
)


@settings(max_examples=30)
@given(ACTIONS, st.integers(0, 3))
def test_whatever_clients_do_they_get_the_same_steps_and_nobody_waits_for_who_is_not_there(
    actions: list[tuple[str, int]], ahead: int
) -> None:
    stream = PlanStream(Planner(MIXTURE, Metadata(), START), ahead=ahead)
    at: dict[int, int] = {}
    asked: dict[int, int] = {}
    try:
        for action, client in actions:
            if action == "join" and client not in at:
                step = min(at.values(), default=0)
                if stream.join(str(client), WHOLE[step - 1].after if step else START):
                    at[client] = asked[client] = step
            elif action == "leave" and at.pop(client, None) is not None:
                del asked[client]
                stream.leave(str(client))
            elif action == "ask" and at.get(client, STEPS) < STEPS:
                step = asked[client] = at[client]
                stream.ask({str(client): step})
                if step <= min(asked.values()) + ahead:
                    assert outcome(stream, step).plan.hash == WHOLE[step].plan.hash
                    at[client] = step + 1
            assert stream.clients == set(map(str, at))
    finally:
        stream.stop()
        with suppress(TimeoutError):
            future: Future[Any] = stream.planned(STEPS + 1)
            future.result(WAIT_S)
