"""The runtime of a rank in a circle: a thread that goes through the steps together with those of the other ranks.

Only these threads communicate, each over the groups of its own circle, so nothing comes between the collectives of the
training loop. What a thread does is the same on all ranks of a circle, message by message:

1. all agree that they stand at the same place of the stream;
2. once all have room for a step, the source sends it;
3. the end of the stream, an error, or a rank that stops ends it on all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from omniload.connecting.handoff import HandOff, Item
from omniload.connecting.messages import StepReader, StepWriter
from omniload.connecting.peers import Outcome, Peers, Status, Verdict, digest_of
from omniload.errors import DecisionError, LoaderStopped, LoaderTimeout, StateError
from omniload.observing.timing import Timing
from omniload.planner import StreamState
from omniload.planner.decisions import Decision
from omniload.runtime.steps import Ready, Runtime, Step, bytes_of
from storage.background import BackgroundThread

AHEAD_STEPS = 2
"""Steps that a source has asked its runtime for beyond what its own training loop has: one is ready, one in hand."""
_PULSE_S = 1.0
"""How often, at least, a rank whose training loop is busy tells the others that it lives."""
_CLOSE_S = 5.0
"""Closing does not wait longer than this for ranks that are not there; the thread ends when its wait does."""


class CircleRuntime(ABC):
    """A `omniload.runtime.steps.Runtime` whose steps come and go with those of the other ranks.

    Args:
        peers: the circle.
        state: the stream to go on from.
        names: of the sources of the mixture.
    """

    def __init__(self, peers: Peers, state: StreamState, names: list[str]) -> None:
        self._peers = peers
        self._state = state
        self._digest = digest_of(state.to_json(names))
        self._step = state.step
        """The step that the thread is at."""
        self._asked = state.step
        self._hand_off = HandOff()
        self._busy: int | None = None  # a rank that others wait for
        self._pulse_s = min(_PULSE_S, peers.timeout_s / 4)
        self._thread = BackgroundThread(self._run, name="omniload-connect", ask_to_end=self.abandon)

    def next_step(self) -> Item:
        """The next step, the end of the stream, or what stopped it; see `Runtime.next_step`.

        Raises:
            LoaderTimeout: another rank has not come for its step in time.
        """
        timeout_s = self._peers.timeout_s
        item = self._hand_off.get(timeout_s)
        if item is None and self._busy is None:
            item = self._hand_off.get(2 * timeout_s)  # what the thread waits for ends before
        if item is None:
            waiting = "a rank" if self._busy is None else f"rank {self._busy}"
            raise LoaderTimeout(
                f"step {self._asked}: {waiting} has not asked for the steps before it within {timeout_s:g} s; ranks"
                " that share lanes go through the steps together: iterate on all of them, or raise timeout_s of connect"
            )
        if isinstance(item, Step):
            self._asked = item.plan.step + 1
        return item

    @abstractmethod
    def ready(self) -> Ready:
        """What is held ready; see `Runtime.ready`."""

    @abstractmethod
    def decide(self, decision: Decision) -> None:
        """Take note of a decision; see `Runtime.decide`."""

    def stop(self) -> None:
        """End the steps, on all ranks of the circle; see `Runtime.stop`."""
        self._hand_off.stop()
        self._hand_off.finish(
            LoaderStopped("the loader was closed while a step was waited for; iterate again to go on")
        )
        self._thread.join(_CLOSE_S)

    def abandon(self) -> None:
        """See `Runtime.abandon`."""
        self._hand_off.abandon()

    @abstractmethod
    def _serve(self) -> Item:
        """Go through the steps; returns what ended them."""

    def _run(self) -> None:
        try:
            with self._peers.turn:
                self._agree()
                last = self._serve()
        except BaseException as error:
            last = error
        assert not isinstance(last, Step)
        self._hand_off.finish(last)

    def _agree(self) -> None:
        other = self._peers.agree(self._step, self._digest, about=f"step {self._step}")
        if other is not None:
            rank, its, first = other
            where = (
                f"before step {its}"
                if its != first
                else f"before step {its} too, with other pieces or decisions"
            )
            raise StateError(
                f"rank {self._peers.circle.source} stands before step {first} and rank {rank} {where}; load the same"
                " state, and make the same decisions, on all ranks"
            )

    def _round(self, sizes: Sequence[int] = ()) -> Outcome:
        """Wait until all ranks have room for a step, and hear of it.

        Raises:
            LoaderStopped: a rank stops.
            LoaderTimeout: a rank does not answer.
        """
        while True:
            room = self._hand_off.wait_for_room(self._pulse_s)
            status = Status.CLOSING if self._hand_off.stopping else Status.READY if room else Status.BUSY
            outcome = self._peers.round(status, sizes, f"step {self._step}")
            if outcome.verdict == Verdict.GO:
                self._busy = None
                return outcome
            if outcome.verdict == Verdict.CLOSED:
                raise LoaderStopped(
                    f"step {self._step}: rank {outcome.rank} closed its loader, or failed, and this rank shares lanes"
                    " with it; close, load and iterate on all ranks alike"
                )
            self._busy = outcome.rank

    def _leave(self) -> None:
        """Tell the others that this rank stops for a reason of its own."""
        self._hand_off.stop()
        try:
            self._round([0] * len(self._peers.audiences))
        except (LoaderStopped, LoaderTimeout):
            return


class SourceRuntime(CircleRuntime):
    """Of the rank that loads.

    Args:
        peers: the circle.
        state: the stream to go on from.
        names: of the sources of the mixture.
        runtime: makes the steps; it is this one's to stop.
        writer: makes messages of them.
    """

    def __init__(
        self, peers: Peers, state: StreamState, names: list[str], runtime: Runtime, writer: StepWriter
    ) -> None:
        super().__init__(peers, state, names)
        self._runtime = runtime
        self._writer = writer
        self._views = [view for view, _ in peers.audiences]
        self._thread.start()

    def ready(self) -> Ready:
        """What is held ready here and by the runtime that makes the steps."""
        held, inner = self._hand_off.held(), self._runtime.ready()
        return replace(
            inner, steps=inner.steps + len(held), num_bytes=inner.num_bytes + sum(map(bytes_of, held))
        )

    def decide(self, decision: Decision) -> None:
        """Let a decision take effect."""
        self._runtime.decide(decision)

    def stop(self) -> None:
        """End the steps."""
        self._hand_off.stop()
        self._runtime.stop()
        super().stop()

    def abandon(self) -> None:
        """End the steps as soon as it is seen."""
        super().abandon()
        self._runtime.abandon()

    def _serve(self) -> Item:
        while True:
            try:
                item = self._runtime.next_step()
            except Exception as error:
                item = error
            try:
                written = self._writer.write(item, self._views, own=self._peers.circle.views[0])
            except BaseException:
                self._leave()
                raise
            what = f"step {self._step}"
            self._round([len(message) for message in written.messages])
            self._peers.send(written.messages, what)
            if not isinstance(written.item, Step):
                return written.item
            self._hand_off.put(written.item)
            self._step += 1


class ReceiverRuntime(CircleRuntime):
    """Of a rank that receives.

    Args:
        peers: the circle.
        state: the stream to go on from.
        names: of the sources of the mixture.
        reader: makes steps of messages.
    """

    def __init__(self, peers: Peers, state: StreamState, names: list[str], reader: StepReader) -> None:
        super().__init__(peers, state, names)
        self._reader = reader
        self._decisions = list(state.decisions)
        self._receiving = Timing()
        self._thread.start()

    def next_step(self) -> Item:
        """The next step; an error if it was planned by other decisions than were made on this rank."""
        item = super().next_step()
        if isinstance(item, Step):
            step = item.plan.step
            if [one for one in self._decisions if one.step == step] != list(item.before.decisions):
                return DecisionError(
                    f"step {step}: rank {self._peers.circle.source}, which plans it, and this rank have decided on it"
                    " differently; make every decision on all ranks"
                )
        return item

    def ready(self) -> Ready:
        """What is held ready; a step is asked for when all ranks have room for it."""
        held = self._hand_off.held()
        return Ready(steps=len(held), num_bytes=sum(map(bytes_of, held)), fetch_p50_ms=self._receiving.p50_ms)

    def decide(self, decision: Decision) -> None:
        """Note a decision; the source's makes it take effect."""
        self._decisions.append(decision)

    def _serve(self) -> Item:
        state = self._state
        while True:
            outcome = self._round()
            try:
                with self._receiving.measure():
                    item = self._receive(outcome.size, state)
            except LoaderTimeout:
                raise
            except BaseException:
                self._leave()
                raise
            if not isinstance(item, Step):
                return item
            self._hand_off.put(item)
            state = item.after
            self._step += 1

    def _receive(self, size: int, before: StreamState) -> Item:
        message: np.ndarray = self._reader.buffer(size)
        self._peers.receive(message, f"step {self._step}")
        return self._reader.read(message, before)
