"""Plans of one stream, made a little ahead of the clients that take them, and kept until all of them have."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace

from omniload.errors import DecisionError, LoaderStopped
from omniload.observing.timing import Timing
from omniload.pieces import Failure
from omniload.planner import Plan, Planner, StreamState
from omniload.planner.decisions import Decision
from omniload.runtime.plan_log import PlanLog
from omniload.runtime.steps import End
from storage.background import BackgroundThread


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A step as it is planned."""

    plan: Plan
    """Its plan."""
    after: StreamState
    """The stream after it."""
    quarantined: tuple[Failure, ...]
    """Rows that the step consumed and that make no sample."""
    decided: tuple[Decision, ...] = ()
    """What the planner decided by itself about the step."""


Outcome = Planned | End | BaseException


class PlanStream:
    """Runs a planner in a thread, no further than ``ahead`` steps beyond the slowest client. Thread-safe.

    That bound is the one that decisions count on (`omniload.control`): a step is planned only when no client can decide
    anything about it any more. Clients that are not there yet bind nobody; who comes too late for a step that is let
    go of starts a stream of its own, which gives the same plans.

    Args:
        planner: plans the stream, from its state on.
        ahead: steps that may be begun beyond the one that the slowest client asks for.
        log: where the stream is written down, if it is.
        planning: told how long each plan took.
        keep_s: no step is let go of before; for clients of a planner that is gone, which this one has yet to hear of.
    """

    def __init__(
        self,
        planner: Planner,
        *,
        ahead: int,
        log: PlanLog | None = None,
        planning: Timing | None = None,
        keep_s: float = 0.0,
    ) -> None:
        self._planning = planning or Timing()
        self.stalled_s = 0.0
        """Time that clients waited for plans, as far as it is known here."""
        self._planner = planner
        self._ahead = ahead
        self._log = log
        self._keep_until = time.monotonic() + keep_s
        self._moved = threading.Condition()
        self._asked: dict[str, int] = {}
        self._before = {planner.state.step: planner.state}
        self._outcomes: dict[int, Planned] = {}
        self._last: End | BaseException | None = None
        self._next = planner.state.step
        self._waiting: dict[int, list[Future[Outcome]]] = {}
        self._decisions = list(planner.state.decisions)
        self._owed: dict[str, list[Decision]] = {}  # decisions of others that a client has yet to make
        self._stopping = False
        self._thread = BackgroundThread(self._run, name="omniload-plan", ask_to_end=self.stop)
        self._thread.start()

    @property
    def failed(self) -> bool:
        """Whether an error ended it."""
        return isinstance(self._last, BaseException)

    @property
    def clients(self) -> set[str]:
        """Who takes its steps."""
        return set(self._asked)

    @property
    def step(self) -> int:
        """The step that is planned next."""
        return self._next

    @property
    def first(self) -> int:
        """The first step that is kept, or else the one that is planned next."""
        with self._moved:
            return min(self._outcomes, default=self._next)

    @property
    def after(self) -> StreamState:
        """The stream before the step that is planned next."""
        return self._planner.state

    @property
    def last(self) -> Planned | None:
        """The step planned last, as long as it is kept."""
        return self._outcomes.get(self._next - 1)

    def join(self, client: str, state: StreamState) -> bool:
        """Let a client take the steps from a state on; False if they are not those of this stream, or let go of."""
        with self._moved:
            before = self._before.get(state.step)
            if before is None or self.failed or self._stopping or not _same(before, state):
                return False
            self._asked[client] = state.step
            self._owed[client] = []
            self._moved.notify_all()
            return True

    def leave(self, client: str) -> None:
        """A client takes no more."""
        with self._moved:
            self._asked.pop(client, None)
            self._owed.pop(client, None)
            self._let_go()
            self._moved.notify_all()

    def ask(self, asked: Mapping[str, int]) -> None:
        """Clients have come to ask for these steps, and are done with those before."""
        with self._moved:
            for client, step in asked.items():
                if client in self._asked:
                    self._asked[client] = max(step, self._asked[client])
            self._let_go()
            self._moved.notify_all()

    def planned(self, step: int) -> Future[Outcome]:
        """What becomes of a step: its plan, the end of the stream at or before it, or what ended the planning.

        `LoaderStopped` for one that was let go of, and where the planning was stopped: whoever wants it all the same
        begins a stream of its own.
        """
        future: Future[Outcome] = Future()
        with self._moved:
            if step in self._outcomes:
                future.set_result(self._outcomes[step])
            elif self._last is not None and step >= self._next:
                future.set_result(self._last)
            elif step < self._next:
                future.set_result(
                    LoaderStopped(f"step {step} was let go of, as every client was done with it")
                )
            else:
                self._waiting.setdefault(step, []).append(future)
        return future

    def adopt(self, client: str, step: int) -> None:
        """Let a client go on that took steps of this stream from a planner that is gone."""
        with self._moved:
            if client not in self._asked:
                self._asked[client], self._owed[client] = step, []
            self._moved.notify_all()

    def decide(self, client: str, decision: Decision, nth: int) -> None:
        """Note that a client made a decision; the first to do so makes it take effect.

        Args:
            client: the client.
            decision: what it decided.
            nth: how often it decided just this, this time included.

        Raises:
            LoaderStopped: it takes no steps of this stream.
        """
        with self._moved:
            if client not in self._owed:
                raise LoaderStopped("the rank is not of this stream any more; iterate again to go on")
            if nth <= self._decisions.count(decision):
                if decision in self._owed[client]:
                    self._owed[client].remove(decision)
                return
            if self._log is not None:
                self._log.decided(decision)  # durable before any rank sees a step that depends on it
            self._planner.decide(decision)
            self._decisions.append(decision)
            for other in self._owed.keys() - {client}:
                self._owed[other].append(decision)

    def join_thread(self, timeout_s: float) -> None:
        """Wait until it has ended, after `stop`."""
        self._thread.join(timeout_s)

    def stop(self) -> None:
        """End the planning; who waits gets `LoaderStopped`."""
        with self._moved:
            self._stopping = True
            self._moved.notify_all()

    def _run(self) -> None:
        try:
            while self._wait_for_turn():
                if not self._plan():
                    self._wait_for_stop()  # what is decided until then is written down all the same
                    return
            self._end(_closed())
        except BaseException as error:
            self._end(_closed() if self._stopping else error)
        finally:
            if self._log is not None:
                with suppress(Exception):  # it has said what is wrong, or is not needed any more
                    self._log.close()

    def _wait_for_turn(self) -> bool:
        """Wait until the next step may be begun; False when the planning is to end."""
        with self._moved:
            while not self._stopping:
                if self._asked and self._next <= min(self._asked.values()) + self._ahead:
                    self._check_decided()
                    return True
                self._moved.wait()
            return False

    def _wait_for_stop(self) -> None:
        with self._moved:
            self._moved.wait_for(lambda: self._stopping)

    def _check_decided(self) -> None:
        for client, owed in self._owed.items():
            for decision in owed:
                if decision.step <= self._next:
                    raise DecisionError(
                        f"step {self._next}: rank {client} did not decide {decision}, as another rank did; every rank"
                        " has to make the same decisions"
                    )

    def _plan(self) -> bool:
        """Plan the next step; False at the end of the stream."""
        began_s = time.perf_counter()
        plan = self._planner.next()
        took_s = time.perf_counter() - began_s
        self._planning.record(took_s)
        if min(self._asked.values(), default=-1) == self._next:
            self.stalled_s += took_s
        after, quarantined = self._planner.state, self._planner.quarantined
        if plan is None:
            self._end(End(after=after, quarantined=quarantined))
            return False
        own = self._planner.own_decisions
        planned = Planned(plan=plan, after=after, quarantined=quarantined, decided=own)
        if self._log is not None:
            self._log.planned(plan.step, plan.hash, after)
        with self._moved:
            assert plan.step == self._next, "steps are planned one after the other"
            self._outcomes[plan.step] = planned
            self._before[plan.step + 1] = after
            self._next = plan.step + 1
            waiting = self._waiting.pop(plan.step, ())
            self._let_go()
        for future in waiting:
            _settle(future, planned)
        return True

    def _end(self, last: End | BaseException) -> None:
        with self._moved:
            self._last = last
            waiting, self._waiting = self._waiting, {}
        for futures in waiting.values():
            for future in futures:
                _settle(future, last)

    def _let_go(self) -> None:
        """Forget the steps that every client is done with."""
        if time.monotonic() < self._keep_until:
            return
        least = min(self._asked.values(), default=self._next)
        self._outcomes = {step: one for step, one in self._outcomes.items() if step >= least}
        self._before = {step: one for step, one in self._before.items() if step >= least}
        if self._log is not None:
            self._log.release(least)


def _settle(future: Future[Outcome], outcome: Outcome) -> None:
    if future.set_running_or_notify_cancel():  # or nobody waits any more
        future.set_result(outcome)


def _closed() -> LoaderStopped:
    return LoaderStopped("the loader was closed while a step was waited for; iterate again to go on")


def _same(one: StreamState, other: StreamState) -> bool:
    """Whether the same steps follow two states."""
    alike = replace(one, carried=other.carried) == other
    return alike and one.carried.tobytes() == other.carried.tobytes()
