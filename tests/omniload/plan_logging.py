"""A simulated job whose planner dies now and then, over a store that fails, and what a run without it plans."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from omniload.errors import LoaderStopped
from omniload.mixture import Mixture
from omniload.planner import Plan, Planner, StreamState
from omniload.planner.decisions import Decision, SetCoefficients, SetWeights, SkipSteps
from omniload.runtime.plan_log import PlanLog
from storage import FileStat, StorageError, Store, Transient
from storage.buffers import Data
from tests.omniload.planning import FakeMetadata

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
