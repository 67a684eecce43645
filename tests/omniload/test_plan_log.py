"""The plan log: whenever a planner dies, its successor makes the same plans, or is told that it cannot."""

from __future__ import annotations

import functools
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniload.errors import DecisionError, LoaderStopped, LoaderTimeout, PlanError, StateError
from omniload.mixture import Mixture
from omniload.planner import Plan, Planner, SourceState, StreamState
from omniload.planner.decisions import Decision, SetCoefficients, SetWeights, SkipSteps
from omniload.runtime.plan_log import PlanLog
from storage import FileStat, StorageError, Store, Transient
from storage.buffers import Data
from tests.omniload.planning import FakeMetadata
from tests.storage.seaweed import S3Server

SEQ_LEN = 16
NAMES = ["a", "b", "c"]
generator = np.random.default_rng(0)
ROWS = [[[int(n)] for n in generator.integers(1, most, 60)] for most in (40, 12, 25)]
T = TypeVar("T")


def new_planner(state: StreamState, rows: Sequence[Sequence[Sequence[int]]] = ROWS) -> Planner:
    specs = {
        name: {"path": "unused", "weight": weight, "on_exhausted": "repeat"}
        for name, weight in zip(NAMES, (0.5, 0.3, 0.2), strict=True)
    }
    mixture = Mixture.load({"seq_len": SEQ_LEN, "packs": 4, "lanes": 2, "sources": specs})
    return Planner(mixture, FakeMetadata(rows, SEQ_LEN), state)


def next_plan(planner: Planner) -> Plan:
    plan = planner.next()
    assert plan is not None
    return plan


def plan_steps(log: PlanLog, planner: Planner, count: int) -> list[str]:
    """Plan and log so many steps; the hashes of their plans."""
    hashes = []
    for _ in range(count):
        plan = next_plan(planner)
        log.check(plan)
        log.planned(plan.step, plan.hash, planner.state)
        hashes.append(plan.hash)
    return hashes


_undisturbed: dict[str, tuple[Planner, list[str]]] = {}


def undisturbed(steps: int, decisions: Sequence[Decision] = ()) -> list[str]:
    """The hashes of the plans of a run in which nothing happens."""
    if repr(decisions) not in _undisturbed:
        planner = new_planner(StreamState.initial(3))
        for decision in decisions:
            planner.decide(decision)
        _undisturbed[repr(decisions)] = planner, []
    planner, hashes = _undisturbed[repr(decisions)]
    while len(hashes) < steps:
        hashes.append(next_plan(planner).hash)
    return hashes[:steps]


class FaultyStore(Store):
    """A store whose operations can be preceded by something, or be the last that its process lives for."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.operations: list[str] = []
        self.dies_at = -1
        self.after_effect = False
        self.dead = False
        self.before: Callable[[int], None] = lambda number: None

    def die(self) -> None:
        self.dead = True

    def _do(self, name: str, operation: Callable[[], T]) -> T:
        self.operations.append(name)
        self.before(len(self.operations))
        if len(self.operations) == self.dies_at:
            if self.after_effect and not self.dead:
                with suppress(StorageError):
                    operation()
            self.dead = True
        if self.dead:
            raise Transient(self.url, "the process is gone")
        return operation()

    def read(self, path: str) -> bytes:
        return self._do("read", lambda: super(FaultyStore, self).read(path))

    def write(self, path: str, data: Data) -> None:
        self._do("write", lambda: super(FaultyStore, self).write(path, data))

    def create(self, path: str, data: Data) -> None:
        self._do("create", lambda: super(FaultyStore, self).create(path, data))

    def list(self, prefix: str = "") -> list[FileStat]:
        return self._do("list", lambda: super(FaultyStore, self).list(prefix))

    def stat(self, path: str) -> FileStat:
        return self._do("stat", lambda: super(FaultyStore, self).stat(path))

    def delete(self, path: str) -> None:
        self._do("delete", lambda: super(FaultyStore, self).delete(path))


@contextmanager
def memory() -> Iterator[str]:
    """A directory in memory."""
    url = f"memory://plan-log-{uuid.uuid4().hex}"
    try:
        yield f"{url}/log"
    finally:
        Store(url).delete_tree("log")


@pytest.fixture
def url() -> Iterator[str]:
    with memory() as made:
        yield made


def begin(store: Store, **keys: Any) -> tuple[PlanLog, Planner]:
    state = StreamState.initial(3)
    return PlanLog.begin(store, NAMES, state, **keys), new_planner(state)


def reopen(store: Store, **keys: Any) -> PlanLog:
    log = PlanLog.open(store, NAMES, **keys)
    assert log is not None
    return log


def abandon(log: PlanLog, store: FaultyStore) -> None:
    """As if the process of the log were killed."""
    store.die()
    with suppress(StorageError, LoaderStopped):
        log.close()


# -- whatever happens


class Job:
    """A job whose planner dies now and then. What a generation planned, any rank may have trained on."""

    def __init__(self, url: str, snapshot_every: int) -> None:
        self.url = url
        self.snapshot_every = snapshot_every
        self.served: list[str] = []
        self.decisions: list[
            Decision
        ] = []  # by step, those of one step in the order made; each of them returned
        self.doubtful: list[Decision] = []
        self.released = 0
        self.num_deaths = 0
        self.num_compared = 0
        self.store = FaultyStore(url)
        self.log: PlanLog | None = None
        self.planner = new_planner(StreamState.initial(3))

    def run(self, action: tuple[str, int, int]) -> None:
        """Do something; if the planner dies of it, the next action finds no planner."""
        kind, one, other = action
        if kind == "dies":
            self.store.dies_at, self.store.after_effect = len(self.store.operations) + 1 + one, bool(other)
            return
        try:
            if self.log is None:
                self.start(one)
            getattr(self, kind)(one, other)
        except StorageError:
            assert self.store.dead
            self.num_deaths += 1
            if self.log is not None:
                abandon(self.log, self.store)
            self.log, self.store = None, FaultyStore(self.url)

    def start(self, back: int) -> None:
        log = PlanLog.open(self.store, NAMES, snapshot_every=self.snapshot_every)
        if log is None:
            assert not self.served, "a log that was begun is there"
            self.log, self.planner = begin(self.store, snapshot_every=self.snapshot_every)
            return
        step = max(self.released, len(self.served) - back)
        try:
            recovery = log.recover(step)
        except StorageError:
            abandon(log, self.store)
            raise
        self.log = log
        state = recovery.state
        assert state.step <= step
        for logged, plan_hash in recovery.hashes.items():
            assert self.served[logged] == plan_hash
        self.num_compared += len(recovery.hashes)
        promised = [decision for decision in self.decisions if decision.step >= state.step]
        found = list(state.decisions)
        for decision in self.doubtful:
            if found.count(decision) > promised.count(decision):
                # It was on its way when the planner died, and made it: from now on it counts.
                before = sum(one.step <= decision.step for one in self.decisions)
                self.decisions.insert(before, decision)
                promised = [one for one in self.decisions if one.step >= state.step]
        self.doubtful = []
        assert found == promised
        self.planner = new_planner(state)

    def plan(self, count: int, _: int) -> None:
        assert self.log is not None
        for _ in range(count):
            plan = next_plan(self.planner)
            self.log.check(plan)
            if plan.step < len(self.served):
                assert plan.hash == self.served[plan.step]
            else:
                self.served.append(plan.hash)
            self.log.planned(plan.step, plan.hash, self.planner.state)

    def decide(self, ahead: int, which: int) -> None:
        assert self.log is not None
        step = max(len(self.served), self.planner.state.step) + ahead
        decision: Decision = (
            SetWeights(step=step, weights={"a": which / 10}),
            SkipSteps(step=step, count=1 + which),
            SetCoefficients(step=step, coefficients={"tokens": 1 + which, "tokens_squared": 1}),
        )[which % 3]
        try:
            self.log.decided(decision)
        except StorageError:
            self.doubtful.append(decision)
            raise
        self.planner.decide(decision)
        self.decisions.insert(sum(one.step <= step for one in self.decisions), decision)

    def release(self, behind: int, _: int) -> None:
        assert self.log is not None
        self.released = max(self.released, self.planner.state.step - behind)
        self.log.release(self.released)

    def reopen(self, _: int, __: int) -> None:
        """An orderly end."""
        assert self.log is not None
        self.log.close()
        self.log = None

    def vanish(self, _: int, __: int) -> None:
        """The planner dies between two operations; what it has not written is lost."""
        self.store.die()
        raise Transient(self.url, "the process is gone")


small = st.integers(0, 9)
actions = st.lists(
    st.tuples(st.just("plan"), st.integers(1, 18), st.just(0))
    | st.tuples(st.just("decide"), st.integers(0, 6), small)
    | st.tuples(st.just("release"), st.integers(0, 12), st.just(0))
    | st.tuples(st.just("dies"), st.integers(0, 30), st.integers(0, 1))
    | st.tuples(st.sampled_from(["reopen", "vanish"]), st.just(0), st.just(0)),
    max_size=12,
)


@settings(max_examples=80, deadline=None)
@given(actions, st.sampled_from([1, 3, 8, 16]))
def test_a_planner_that_dies_at_any_moment_is_replaced_by_one_that_makes_the_same_plans(
    chosen: list[tuple[str, int, int]], snapshot_every: int
) -> None:
    with memory() as url:
        job = Job(url, snapshot_every)
        for action in [*chosen, ("plan", 3, 0), ("plan", 3, 0)]:
            job.run(action)
        assert job.served == undisturbed(len(job.served), job.decisions)
        if job.log is not None:
            abandon(job.log, job.store)


def test_a_death_at_each_operation_of_a_run_is_survived() -> None:
    script = [
        ("plan", 9, 0),
        ("decide", 3, 1),  # about step 12, of which there will be a snapshot
        ("plan", 6, 0),
        ("release", 2, 0),  # so that the log begins with it
        ("decide", 0, 3),
        ("plan", 9, 0),
        ("reopen", 0, 0),
        ("plan", 9, 0),
        ("release", 1, 0),
        ("plan", 9, 0),
        ("plan", 5, 0),
    ]
    num_deaths = num_compared = doubtful = 0
    for point in range(1000):
        for after_effect in (0, 1):
            with memory() as url:
                job = Job(url, 4)
                job.run(("dies", point, after_effect))
                for action in script:
                    job.run(action)
                    doubtful += len(job.doubtful)
                assert job.served == undisturbed(len(job.served), job.decisions)
                if job.log is not None:
                    abandon(job.log, job.store)
            num_deaths += job.num_deaths
            num_compared += job.num_compared
        if not job.num_deaths:
            break
    assert num_deaths >= 100
    assert num_compared >= 1000, "plans made again were compared with logged hashes"
    assert doubtful >= 2, "a planner died of storing a decision"


def work(url: str, acknowledged: str) -> None:
    """Plan and decide until killed; the second file tells what was decided and planned."""
    log = PlanLog.open(Store(url), NAMES, snapshot_every=8)
    if log is None:
        log, planner = begin(Store(url), snapshot_every=8)
    else:
        past = Path(acknowledged).read_text().splitlines()
        step = sum(line.startswith("planned") for line in past)
        planner = new_planner(log.recover(max(0, step - 5)).state)
    with Path(acknowledged).open("a", buffering=1) as file:
        while True:
            step = planner.state.step
            if step % 7 == 0 and not any(one.step > step for one in planner.state.decisions):
                decision = SkipSteps(step=step + 3, count=1 + step % 2)
                log.decided(decision)
                planner.decide(decision)
                file.write(f"decided {decision.step} {decision.count}\n")
            [plan_hash] = plan_steps(log, planner, 1)
            if step >= sum(
                line.startswith("planned") for line in Path(acknowledged).read_text().splitlines()
            ):
                file.write(f"planned {plan_hash}\n")
            log.release(step - 20)


@pytest.mark.chaos
def test_processes_that_are_killed_on_a_local_disk_lose_no_decision_and_plan_alike(tmp_path: Path) -> None:
    acknowledged = tmp_path / "acknowledged"
    acknowledged.touch()
    program = f"from tests.omniload.test_plan_log import work; work({str(tmp_path / 'log')!r}, {str(acknowledged)!r})"
    dice = random.Random(3)
    logged: dict[int, Decision] = {}
    for _ in range(4):
        before = acknowledged.stat().st_size
        child = subprocess.Popen([sys.executable, "-c", program], cwd=Path(__file__).parents[2])
        try:
            deadline = time.monotonic() + 60
            while acknowledged.stat().st_size < before + dice.randrange(500, 1500):
                assert child.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.002)
        finally:
            child.kill()
        assert child.wait() == -signal.SIGKILL
        log = reopen(Store(tmp_path / "log"))
        recovery = log.recover(
            sum(line.startswith("planned") for line in acknowledged.read_text().splitlines())
        )
        logged |= {one.step: one for one in recovery.state.decisions}
        log.close()
    lines = [line.split() for line in acknowledged.read_text().splitlines()]
    planned = [words[1] for words in lines if words[0] == "planned"]
    decisions = [
        SkipSteps(step=int(words[1]), count=int(words[2])) for words in lines if words[0] == "decided"
    ]
    assert len(planned) > 50
    promised = {one.step for one in decisions if one.step >= recovery.state.step}
    assert promised <= {one.step for one in recovery.state.decisions}
    # What was decided and not told of, as a process died of telling it, is in force too.
    by_step = {one.step: one for one in decisions} | logged
    assert planned == undisturbed(len(planned), list(by_step.values()))


# -- two planners that take themselves for the only one


def test_a_planner_thought_dead_is_stopped_and_harms_nothing_at_whichever_operation_it_wakes_up(
    url: str,
) -> None:
    """It sleeps before each of its operations in turn, while another one takes over, and then goes on."""
    seen, asleep = set(), set()
    for point in range(1, 1000):
        place = Store(url).sub(str(point)).url
        old_store = FaultyStore(place)
        old, planner = begin(old_store, snapshot_every=4)
        first = len(old_store.operations)
        taken_over: list[tuple[int, tuple[Decision, ...]]] = []

        def take_over(
            number: int,
            at: int = first + point,
            place: str = place,
            taken_over: list[tuple[int, tuple[Decision, ...]]] = taken_over,
        ) -> None:
            if number != at:
                return
            new = reopen(Store(place), snapshot_every=4)
            recovery = new.recover(14)
            successor = new_planner(recovery.state)
            known = max(recovery.hashes, default=13) + 1
            plan_steps(new, successor, max(14, known) - recovery.state.step)
            # About a step that the old planner may have planned, but not logged: now there is another plan of it.
            decision = SkipSteps(step=successor.state.step, count=1)
            new.decided(decision)
            successor.decide(decision)
            plan_steps(new, successor, 2)
            new.release(13)
            new.close()
            taken_over.append((successor.state.step, (*recovery.state.decisions, decision)))

        old_store.before = take_over
        stopped = ""
        try:
            plan_steps(old, planner, 9)
            decision = SkipSteps(step=18, count=2)
            old.decided(decision)
            planner.decide(decision)
            plan_steps(old, planner, 4)
            old.release(12)
            plan_steps(old, planner, 9)
            old.close()
        except LoaderStopped as error:
            stopped = str(error)
        if not taken_over:
            break
        with suppress(LoaderStopped):
            old.close()
        [(step, decisions)] = taken_over
        log = reopen(Store(place))
        recovery = log.recover(14)
        assert set(recovery.state.decisions) == set(decisions)
        assert max(recovery.hashes) == step - 1
        planned = plan_steps(log, new_planner(recovery.state), step + 10 - recovery.state.step)
        log.close()
        assert planned == undisturbed(step + 10, recovery.state.decisions)[recovery.state.step :]
        assert not stopped or "opened again elsewhere, as generation 2; this planner, of" in stopped
        seen.add((bool(stopped), len(decisions)))
        asleep.add(old_store.operations[first + point - 1])
    assert point > 30
    assert asleep >= {"write", "stat", "delete"}
    assert {(True, 1), (True, 2)} <= seen, "the decision of the old planner was in time or was not"


def test_of_many_that_open_a_log_at_once_one_is_in_force(url: str) -> None:
    begin(Store(url))[0].close()
    outcomes: list[PlanLog | Exception] = []

    def open_one() -> None:
        try:
            outcomes.append(reopen(Store(url)))
        except LoaderStopped as error:
            outcomes.append(error)

    threads = [threading.Thread(target=open_one) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    logs = [one for one in outcomes if isinstance(one, PlanLog)]
    assert len(outcomes) == 8
    assert logs
    working = []
    for log in logs:
        try:
            log.decided(SkipSteps(step=5, count=1))
            working.append(log)
        except LoaderStopped:
            pass
    assert [log.generation for log in working] == [9]
    for log in logs:
        with suppress(LoaderStopped):
            log.close()


# -- what is damaged


DECISIONS = [
    SkipSteps(step=24, count=1),
    SetWeights(step=75, weights={"a": 0.1}),
    SkipSteps(step=80, count=2),
]


@functools.cache
def good_log() -> dict[str, bytes]:
    """The objects of a log of three generations that ended in different ways, by path."""
    with memory() as url:
        store = FaultyStore(url)
        log, planner = begin(store, snapshot_every=8)
        plan_steps(log, planner, 20)
        log.decided(DECISIONS[0])
        planner.decide(DECISIONS[0])
        plan_steps(log, planner, 15)
        abandon(log, store)
        for decision, last in zip(DECISIONS[1:], (67, 71), strict=True):
            log = reopen(Store(url), snapshot_every=8)
            planner = new_planner(log.recover(33).state)
            plan_steps(log, planner, 5)
            log.decided(decision)
            planner.decide(decision)
            log.release(17)
            plan_steps(log, planner, last - planner.state.step)
            log.close()
        return {one.path: Store(url).read(one.path) for one in Store(url).list()}


def newest(kind: str) -> str:
    """The path of the last object of a kind."""
    return max(path for path in good_log() if f"-{kind}-" in path)


@functools.cache
def good_states() -> list[dict[str, Any]]:
    """The stream before each step of that log."""
    planner, states = new_planner(StreamState.initial(3)), []
    for decision in DECISIONS:
        planner.decide(decision)
    for _ in range(72):
        states.append(planner.state.to_json(NAMES))
        planner.next()
    return states


def recovers_rightly(objects: dict[str, bytes]) -> bool:
    """Whether a log is recovered; if it is, then rightly, else the error is one line that names the store."""
    with memory() as url:
        for path, data in objects.items():
            Store(url).write(path, data)
        log, problem = None, ""
        try:
            log = reopen(Store(url))
            recovery = log.recover(60)
        except StateError as error:
            problem = str(error)
        finally:
            if log is not None:
                log.close()
        if problem:
            assert "\n" not in problem
            assert problem.startswith(url)
            return False
        assert recovery.state.to_json(NAMES) == good_states()[recovery.state.step]
        hashes = undisturbed(71, DECISIONS)
        assert all(hashes[step] == plan_hash for step, plan_hash in recovery.hashes.items())
        return True


def test_the_log_to_be_damaged_is_recovered_when_it_is_not() -> None:
    assert recovers_rightly(good_log())
    for kind in ("head", "snapshot", "decision", "hashes"):
        assert newest(kind)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_damaged_object_is_never_taken_for_a_good_one(data: st.DataObject) -> None:
    objects = good_log()
    path = data.draw(st.sampled_from(sorted(objects)))
    content = objects[path]
    how = data.draw(st.sampled_from(["cut", "flip", "extend", "swap"]))
    if how == "cut":
        damaged = content[: data.draw(st.integers(0, len(content) - 1))]
    elif how == "flip":
        at, bit = data.draw(st.integers(0, len(content) - 1)), data.draw(st.integers(0, 7))
        damaged = content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]
    elif how == "extend":
        damaged = content + data.draw(st.binary(min_size=1, max_size=20))
    else:
        damaged = objects[data.draw(st.sampled_from(sorted(objects)))]
    recovers_rightly({**objects, path: damaged})


def test_an_object_that_is_gone_is_missed_but_the_last() -> None:
    paths = [path for path in good_log() if not path.startswith("claims")]
    assert len(paths) > 10
    assert max(paths) == newest("hashes"), "what comes last is not missed, and needs not be"
    for path in paths:
        rest = {one: data for one, data in good_log().items() if one != path}
        assert recovers_rightly(rest) == (path == max(paths)), path


@pytest.mark.parametrize(
    ("kind", "recovered"), [("head", False), ("decision", False), ("hashes", True), ("snapshot", True)]
)
def test_what_cannot_be_done_without_is_named_and_the_rest_is_done_without(
    url: str, kind: str, recovered: bool, caplog: pytest.LogCaptureFixture
) -> None:
    path = newest(kind)
    for one, data in good_log().items():
        Store(url).write(one, data[:-1] if one == path else data)
    if not recovered:
        with pytest.raises(StateError, match=f"{path}: this part of the plan log is damaged: its digest"):
            reopen(Store(url))
        return
    log = reopen(Store(url))
    recovery = log.recover(68)
    log.close()
    assert path in caplog.text
    assert recovery.state.step == (56 if kind == "snapshot" else 64)


def test_a_log_of_which_every_snapshot_is_damaged_says_so_each_time(url: str) -> None:
    for one, data in good_log().items():
        Store(url).write(one, b"" if "-snapshot-" in one else data)
    log = reopen(Store(url))
    for _ in range(2):
        with pytest.raises(
            StateError, match=r"-snapshot-\d+: this part of the plan log is damaged: it is empty"
        ):
            log.recover(68)
    log.close()


def test_a_damaged_snapshot_is_stored_again_when_its_step_is_planned_again(url: str) -> None:
    for one, data in good_log().items():
        Store(url).write(one, data[:-1] if one == newest("snapshot") else data)
    log = reopen(Store(url), snapshot_every=8)
    plan_steps(log, new_planner(log.recover(68).state), 10)
    assert log.recover(68).state.step == 64
    log.close()


# -- what is promised to who calls


def test_a_decision_is_durable_when_the_call_returns_and_hashes_may_not_be(url: str) -> None:
    store = FaultyStore(url)
    log, planner = begin(store)
    plan_steps(log, planner, 3)
    decision = SetWeights(step=5, weights={"a": 0.1})
    log.decided(decision)
    abandon(log, store)
    log = reopen(Store(url))
    recovery = log.recover(3)
    log.close()
    assert recovery.state.decisions == (decision,)
    assert recovery.hashes == {}


def test_decisions_that_the_start_state_holds_are_in_the_log(url: str) -> None:
    planner = new_planner(StreamState.initial(3))
    decision = SkipSteps(step=4, count=1)
    planner.decide(decision)
    PlanLog.begin(Store(url), NAMES, planner.state).close()
    log = reopen(Store(url))
    state = log.recover(0).state
    log.close()
    assert state.decisions == (decision,)


def test_a_decision_about_a_step_that_is_planned_is_refused(url: str) -> None:
    log, planner = begin(Store(url))
    plan_steps(log, planner, 9)
    with pytest.raises(DecisionError, match=r"step 8 is planned already, .* the earliest .* is 9"):
        log.decided(SkipSteps(step=8, count=1))
    with pytest.raises(DecisionError, match="no source 'x'"):
        log.decided(SetWeights(step=9, weights={"x": 1}))
    log.decided(SkipSteps(step=9, count=1))
    log.close()
    log = reopen(Store(url))
    assert log.recover(0).state.decisions == (SkipSteps(step=9, count=1),)
    with pytest.raises(DecisionError, match="step 8 is planned already"):
        log.decided(SkipSteps(step=8, count=1))
    log.close()


def test_a_plan_that_is_made_again_otherwise_is_noticed(url: str) -> None:
    log, planner = begin(Store(url))
    plan_steps(log, planner, 8)
    log.close()
    log = reopen(Store(url))
    others = new_planner(log.recover(5).state, [[[9]] * 60, *ROWS[1:]])  # source a has other rows
    plan = next_plan(others)
    for notice in (lambda: log.check(plan), lambda: log.planned(0, plan.hash, others.state)):
        with pytest.raises(
            PlanError, match=r"step 0: the plan made again has the hash \w+, the logged one"
        ) as raised:
            notice()
        assert "\n" not in str(raised.value)
    log.close()


def test_what_every_rank_is_done_with_is_removed_and_the_rest_is_not(url: str) -> None:
    log, planner = begin(Store(url), snapshot_every=8)
    most = 0
    for _ in range(40):
        plan_steps(log, planner, 8)
        log.decided(SkipSteps(step=planner.state.step + 1, count=1))
        planner.decide(SkipSteps(step=planner.state.step + 1, count=1))
        log.release(planner.state.step - 12)
        most = max(most, len(Store(url).list()))
    assert most <= 20, "3 intervals of 3 objects, heads and the claim"
    log.close()
    log = reopen(Store(url))
    for step in (308, 315, 320):
        assert log.recover(step).state.step == step // 8 * 8
    assert set(log.recover(308).hashes) == set(range(304, 320))
    with pytest.raises(
        StateError, match="step 295 cannot be planned again, as the plan log begins at step 296"
    ):
        log.recover(295)
    log.close()


def test_one_place_holds_one_log(url: str) -> None:
    assert PlanLog.open(Store(url), NAMES) is None
    assert Store(url).list() == []
    log, _ = begin(Store(url), fingerprint="this")
    with pytest.raises(StateError, match="a plan log is here already; open it"):
        begin(Store(url))
    with pytest.raises(StateError, match="of 3 sources, the mixture has 2, and they are not the same"):
        PlanLog.open(Store(url), ["a", "b"])
    with pytest.raises(StateError, match="of another stream: its mixture or its data were others"):
        PlanLog.open(Store(url), NAMES, fingerprint="that")
    log.decided(SkipSteps(step=0, count=1))  # whoever was refused did not take it over
    log.close()


def test_what_else_lies_there_stays(url: str) -> None:
    Store(url).write("README", b"mine")
    log, planner = begin(Store(url), snapshot_every=1)
    for _ in range(3):
        plan_steps(log, planner, 2)
        log.release(planner.state.step)
    log.close()
    reopen(Store(url)).close()
    assert Store(url).read("README") == b"mine"


def test_an_outage_is_reported_by_every_later_call_but_release(url: str) -> None:
    store = FaultyStore(url)
    log, planner = begin(store)
    store.die()
    with pytest.raises(Transient, match="the process is gone"):
        log.decided(SkipSteps(step=3, count=1))
    plan = next_plan(planner)
    for call in (
        lambda: log.decided(SkipSteps(step=3, count=1)),
        lambda: log.planned(0, plan.hash, planner.state),
        lambda: log.check(plan),
        lambda: log.recover(0),
        log.close,
    ):
        with pytest.raises(Transient, match="the process is gone"):
            call()
    log.release(3)
    log.close()


def test_what_fails_behind_is_reported_by_the_next_call(url: str) -> None:
    store = FaultyStore(url)
    log, planner = begin(store)
    failed = threading.Event()
    store.before = lambda _: failed.set()
    store.die()
    plan_steps(log, planner, 8)
    assert failed.wait(60)
    with pytest.raises(Transient):
        plan_steps(log, planner, 1000)
    with suppress(StorageError):
        log.close()


def test_storage_that_hangs_holds_up_neither_planning_nor_anybody_for_ever(url: str) -> None:
    store, others = FaultyStore(url), set(threading.enumerate())
    log, planner = begin(store, timeout_s=0.2)
    [thread] = set(threading.enumerate()) - others
    hanging = threading.Event()
    store.before = lambda _: hanging.wait(60) or None
    plan_steps(log, planner, 100)  # written behind
    log.release(50)
    with pytest.raises(LoaderTimeout, match=r"plan log: not written within 0\.2 s; open it again"):
        log.decided(SkipSteps(step=200, count=1))
    with pytest.raises(LoaderTimeout, match="not written within"):
        log.decided(SkipSteps(step=201, count=1))
    with pytest.raises(LoaderTimeout):
        log.close()
    hanging.set()
    thread.join(60)
    log = reopen(Store(url))
    assert log.recover(0).state.decisions == (), "what nobody waits for any more is not written late"
    log.close()


def test_planning_is_held_up_by_slow_storage_for_so_long_and_then_stopped(url: str) -> None:
    store = FaultyStore(url)
    log, planner = begin(store, timeout_s=0.2)
    hanging = threading.Event()
    store.before = lambda _: hanging.wait(60) or None
    with pytest.raises(LoaderTimeout, match="32 writes are waiting and none was done within"):
        plan_steps(log, planner, 400)
    hanging.set()
    log.close()
    log = reopen(Store(url))
    recovery = log.recover(0)
    log.close()
    assert len(recovery.hashes) >= 256
    assert list(recovery.hashes.values()) == undisturbed(400)[: len(recovery.hashes)]


def test_a_closed_log_says_so(url: str) -> None:
    log, planner = begin(Store(url))
    log.close()
    log.close()
    for call in (
        lambda: log.recover(0),
        lambda: log.decided(SkipSteps(step=3, count=1)),
        lambda: plan_steps(log, planner, 1),
    ):
        with pytest.raises(LoaderStopped, match="the plan log is closed; open it again"):
            call()


def test_a_decision_made_while_the_log_is_closed_is_durable_or_refused(url: str) -> None:
    log, _ = begin(Store(url))
    returned, refused = [], []
    busy = threading.Event()

    def decide() -> None:
        for step in range(1, 10_000):
            try:
                log.decided(SkipSteps(step=step, count=1))
            except LoaderStopped:
                refused.append(step)
                return
            returned.append(step)
            if len(returned) > 20:
                busy.set()

    threads = [threading.Thread(target=decide) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert busy.wait(60)
    log.close()
    for thread in threads:
        thread.join(60)
    assert len(refused) == 4
    log = reopen(Store(url))
    found = sorted(decision.step for decision in log.recover(0).state.decisions)
    log.close()
    for step in returned:
        found.remove(step)
    assert set(found) <= set(refused), "of those refused some may have been written"


def test_a_step_costs_18_bytes_and_a_source_in_a_snapshot_128_at_most(url: str) -> None:
    log, planner = begin(Store(url))
    plan_steps(log, planner, 256)
    log.close()
    sizes = [one.size for one in Store(url).list() if "-hashes-" in one.path]
    assert sum(sizes) == 256 * 18

    names = [f"source-{i}" for i in range(300)]
    counts = np.random.default_rng(1).integers(0, 2**40, (300, 7)).tolist()
    state = StreamState.initial(300)
    sources = tuple(
        SourceState(
            rows=a, read_tokens=b, truncated_tokens=c, emitted_samples=d, skipped_tokens=e, failures=f
        )
        for a, b, c, d, e, f, _ in counts
    )
    many = Store(url).sub("many")
    PlanLog.begin(
        many,
        names,
        StreamState(step=0, sources=sources, deficits=tuple(one[6] for one in counts), carried=state.carried),
    ).close()
    [size] = [one.size for one in many.list() if "-snapshot-" in one.path]
    assert size <= 300 * 128


@pytest.mark.parametrize("kind", ["local", "s3"])
def test_a_log_elsewhere_is_the_same(tmp_path: Path, s3: S3Server, kind: str) -> None:
    place = str(tmp_path / "log") if kind == "local" else f"s3://{s3.bucket}/{tmp_path.name}"
    store = Store(place, {} if kind == "local" else s3.storage_options)
    log, planner = begin(store)
    plan_steps(log, planner, 200)
    log.recover(0)  # waits for what is being written
    successor = reopen(store)
    with pytest.raises(LoaderStopped, match="this planner, of generation 1, must not go on"):
        log.decided(SkipSteps(step=300, count=1))
    recovery = successor.recover(150)
    successor.close()
    with pytest.raises(LoaderStopped):
        log.close()
    assert recovery.state.step == 128
    assert [*recovery.hashes.values()] == undisturbed(200)[128:]
