"""The plan log: what a planner needs to go on where one that was killed left off, and to prove that it does.

A plan is a pure function of the state it starts from and of decisions. So the log of a stream holds its decisions,
each durable before anything can depend on it; snapshots of the state, now and then; and the hash of every plan, with
which the plans made again after a crash are compared. A checkpoint of the whole stream thus costs 18 bytes a step, and
a snapshot every ``snapshot_every`` steps.

::

    begin ── planned, decided, release … ─┬─► close
      or                                  │
    open ◄──────── crash ─────────────────┘
      └─ recover(step) ─► Planner(…, recovery.state) ─► next(), check(plan) … until it is at the step ─► planned …
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Self

from omniload.errors import DecisionError, PlanError
from omniload.planner.decisions import Decision, check_names
from omniload.planner.plan import Plan
from omniload.planner.state import StreamState
from omniload.runtime.plan_log_objects import HASH_BYTES, HASHES_EVERY
from omniload.runtime.plan_log_store import PlanLogStore, Recovery
from omniload.runtime.plan_log_thread import WriteBehind
from storage import Store

__all__ = ["PlanLog", "Recovery"]

SNAPSHOT_EVERY = 64
"""Steps from one snapshot to the next: at most so many, and those planned ahead, are planned again after a crash."""

TIMEOUT_S = 300.0
"""Limit of every wait: longer than a store repeats a request for."""

_DEPTH = 32
"""Writes that may wait: those of 256 steps."""


class PlanLog:
    """The differential checkpoint of one stream: decisions and plan hashes by step, and snapshots now and then.

    Made by `begin` or `open`. Its methods may be called by any thread; `planned` and `check` by one at a time. Hashes
    and snapshots are written behind, by a thread. What fails there, after the store has repeated it, is raised as a
    ``storage.StorageError`` by every later call of a method but `release`: open the log again.

    Of several planners that take themselves for the planner of a job, the one that opened the log last is in force. The
    others get `omniload.errors.LoaderStopped` when they write next, and what they write does not count.

    Args:
        stored: in force.
        names: of the sources.
        url: of the log, for messages.
        next_step: the first step that is open to decisions, as far as is known.
        snapshot_every: steps from one snapshot to the next.
        timeout_s: limit of every wait.
    """

    def __init__(
        self,
        stored: PlanLogStore,
        *,
        names: Sequence[str],
        url: str,
        next_step: int,
        snapshot_every: int,
        timeout_s: float,
    ) -> None:
        assert snapshot_every >= 1
        self._stored = stored
        self._names = names
        self._url = url
        self._snapshot_every = snapshot_every
        self._next_step = next_step
        self._released = 0
        self._expected: dict[int, str] = {}
        self._closed = False
        self._buffering = threading.Lock()
        self._buffer = bytearray()  # collected here, as to wake the thread takes longer than all the rest
        self._buffer_step = 0
        self._writer = WriteBehind(f"{url}: the plan log", depth=_DEPTH, timeout_s=timeout_s)

    @classmethod
    def begin(
        cls,
        store: Store,
        names: Sequence[str],
        state: StreamState,
        *,
        fingerprint: str = "",
        snapshot_every: int = SNAPSHOT_EVERY,
        timeout_s: float = TIMEOUT_S,
    ) -> Self:
        """A new log, of the stream from a state on, which is durable on return.

        Args:
            store: a directory of its own; with create-if-absent, as local files, ``s3://`` and ``memory://`` have it.
            names: of the sources, in the order of `Mixture.names`.
            state: where the stream starts; what is decided about later steps is taken over.
            fingerprint: of what the stream depends on besides state and decisions; `open` has to give the same.
            snapshot_every: steps from one snapshot to the next.
            timeout_s: limit of every wait.

        Raises:
            StateError: there is a log.
            StorageError: it cannot be written.
            LoaderStopped: another planner opened it meanwhile.
        """
        return cls(
            PlanLogStore.begin(store, names, fingerprint, state),
            names=names,
            url=store.url,
            next_step=state.step,
            snapshot_every=snapshot_every,
            timeout_s=timeout_s,
        )

    @classmethod
    def open(
        cls,
        store: Store,
        names: Sequence[str],
        *,
        fingerprint: str = "",
        snapshot_every: int = SNAPSHOT_EVERY,
        timeout_s: float = TIMEOUT_S,
    ) -> Self | None:
        """Take over the log that an earlier planner left; None if none was begun.

        Args:
            store: as `begin` was given it.
            names: as `begin` was given them.
            fingerprint: as `begin` was given it.
            snapshot_every: steps from one snapshot to the next, from now on.
            timeout_s: limit of every wait.

        Raises:
            StateError: it is of another stream, or what cannot be done without is damaged or gone; names the object.
            StorageError: it cannot be read, or not be written.
            LoaderStopped: another planner opened it meanwhile.
        """
        stored = PlanLogStore.open(store, names, fingerprint)
        if stored is None:
            return None
        return cls(
            stored,
            names=names,
            url=store.url,
            next_step=0,
            snapshot_every=snapshot_every,
            timeout_s=timeout_s,
        )

    @property
    def generation(self) -> int:
        """Counts how often the log was opened, `begin` included."""
        return self._stored.generation

    def decided(self, decision: Decision) -> None:
        """Log a decision. It is durable on return; only then may the planner be told, in the order of these calls.

        Raises:
            DecisionError: it does not fit the sources, or is about a step that is planned.
            LoaderTimeout: it was not written in time. Whether it will be is unknown: open the log again, and see.
            StorageError: it could not be written; the same holds.
        """
        self._writer.check()
        check_names(decision, self._names)
        if decision.step < self._next_step:
            raise DecisionError(
                f"step {decision.step} is planned already, as the plan log says; the earliest that can be decided about"
                f" is {self._next_step}"
            )
        self._writer.call(partial(self._stored.add_decision, decision))

    def planned(self, step: int, plan_hash: str, after: StreamState) -> None:
        """Log that a step is planned. Cheap: it is written later, and may be lost in a crash, which harms nothing.

        Args:
            step: of the plan.
            plan_hash: `Plan.hash`.
            after: the stream after the step.

        Raises:
            PlanError: another plan of the step is logged.
            LoaderTimeout: storage is so slow that too much is waiting to be written.
        """
        assert after.step == step + 1
        self._writer.check()
        known = self._check(step, plan_hash)
        self._next_step = max(self._next_step, after.step)
        snapshot = after if after.step % self._snapshot_every == 0 else None
        with self._buffering:
            if not known:
                if step != self._buffer_step + len(self._buffer) // HASH_BYTES:
                    self._flush()
                    self._buffer_step = step
                self._buffer += bytes.fromhex(plan_hash)
                assert len(self._buffer) % HASH_BYTES == 0
            if snapshot is not None or len(self._buffer) == HASHES_EVERY * HASH_BYTES:
                self._flush(snapshot)

    def recover(self, step: int) -> Recovery:
        """Where to plan on from, to come to a step again; what is to be compared by `check` is known from then on.

        Raises:
            StateError: steps so early were released, or no snapshot is left undamaged; names the object.
            LoaderTimeout: it was not read in time.
        """
        with self._buffering:
            self._flush()
        recovery = self._writer.call(partial(self._stored.recover, step))
        self._expected = dict(recovery.hashes)
        self._next_step = max([self._next_step, *(one + 1 for one in recovery.hashes)])
        return recovery

    def check(self, plan: Plan) -> None:
        """Compare a plan that is made again with the logged one, as far as `recover` found it.

        Raises:
            PlanError: it is another: the data changed, or a strategy or cost function is no function of its arguments.
        """
        self._writer.check()
        self._check(plan.step, plan.hash)

    def release(self, step: int) -> None:
        """Note that every rank is done with the steps before ``step``. Neither blocks nor raises.

        What is not needed to plan from there on is removed when the next snapshot is written.
        """
        self._released = max(self._released, step)

    def close(self) -> None:
        """Write what is waiting, and end. A second call does nothing.

        Raises:
            StorageError: something could not be written.
            LoaderTimeout: it was not written in time.
        """
        if self._closed:
            return
        self._closed = True
        try:
            with self._buffering:
                self._flush()
        finally:
            self._writer.close()

    def _check(self, step: int, plan_hash: str) -> bool:
        """Whether the plan is logged."""
        expected = self._expected.get(step)
        if expected not in (None, plan_hash):
            raise PlanError(
                f"{self._url}: step {step}: the plan made again has the hash {plan_hash}, the logged one {expected}:"
                " the data changed under the job, or a strategy, transform or cost function gives not always the same;"
                " resume with what the log was written with, or begin a log elsewhere"
            )
        return expected is not None

    def _flush(self, snapshot: StreamState | None = None) -> None:
        """Let what is collected be written, and a snapshot after it."""
        step, hashes = self._buffer_step, bytes(self._buffer)
        self._buffer_step += len(hashes) // HASH_BYTES
        self._buffer.clear()
        if hashes or snapshot is not None:
            self._writer.put(partial(self._write, step, hashes, snapshot))

    def _write(self, step: int, hashes: bytes, snapshot: StreamState | None) -> None:
        if hashes:
            self._stored.add_hashes(step, hashes)
        if snapshot is not None:
            if not self._stored.has_snapshot(snapshot.step):
                self._stored.add_snapshot(snapshot)
            self._stored.release(self._released)
