"""What fetches the steps of a rank ahead of its training, and builds their lanes."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import ray

from omniload.constructor import DataConstructor
from omniload.errors import LoaderStopped, LoaderTimeout
from omniload.observing.timing import Timing
from omniload.payload import Payload
from omniload.planner import StreamState
from omniload.planner.decisions import Decision
from omniload.planner.reader import is_unreachable
from omniload.runtime.bundle import Bundle
from omniload.runtime.feed import LoaderLost
from omniload.runtime.plan_stream import Planned
from omniload.runtime.ray.calls import Retries, ask, result
from omniload.runtime.ray.cluster import Cluster
from omniload.runtime.ray.constructor import Lanes, Served
from omniload.runtime.ray.job import PLANNER, Job
from omniload.runtime.ray.planner import Unknown
from omniload.runtime.steps import End, Ready, Step, bytes_of, bytes_of_lane
from storage.background import BackgroundThread

_LOOK_UP_S = 1.0
"""How often a wait looks whether it is still wanted."""
_GOODBYE_S = 5.0
"""How long whoever stops waits for what is under way."""
_AT_ONCE_S = 0.5
"""For what is there, or was waited for in vain."""


class _PartsLost(LoaderLost):
    """Loaders did not give their parts of a step.

    Args:
        message: why.
        loaders: their names.
    """

    def __init__(self, message: str, loaders: Sequence[str]) -> None:
        super().__init__(message)
        self.loaders = loaders


class RayRuntime:
    """The steps of one rank, from a state on.

    Args:
        job: the job.
        cluster: where it runs.
        node: the node whose constructor is asked.
        client: name of the rank.
        lanes: its lanes.
        state: the stream to go on from.
        make: makes the actors of the job that are gone for good.
    """

    def __init__(
        self,
        job: Job,
        cluster: Cluster,
        node: str,
        client: str,
        lanes: Lanes,
        state: StreamState,
        make: Callable[[], None],
    ) -> None:
        self._job = job
        self._cluster = cluster
        self._node = node
        self._client = client
        self._lanes = lanes
        self._make = make
        self._timeout_s = job.settings.timeout_s
        self._prefetch = job.settings.prefetch_steps
        self._build = DataConstructor(job.mixture, job.settings.derived)
        self._chaos = job.settings.chaos.source("steps") if job.settings.chaos else None
        self._state = state
        self._asked = state.step
        self._decisions = list(state.decisions)
        self._deciding = threading.Lock()
        self._fetching = Timing()
        self._last_bytes = 0  # of the lanes of a step
        self._stream: str | None = None
        self._following = state.step  # the step that is asked for next
        self._built = state.step  # the step that is ready next
        self._asking = threading.Lock()
        # What is asked for: the step, since when, and Ray's reference to it, or what it failed with.
        self._coming: queue.Queue[tuple[int, float, Any]] = queue.Queue()
        self._moved = threading.Event()
        self._stopping = threading.Event()
        self._ready: queue.Queue[Step | End | BaseException] = queue.Queue()
        self._thread = BackgroundThread(self._run, name="omniload-fetch", ask_to_end=self.abandon)
        self._thread.start()
        # Not the same one: a step is asked for as soon as there is room for it, whatever is waited for just then.
        self._asker = BackgroundThread(self._ask_on, name="omniload-ask", ask_to_end=self.abandon)
        self._asker.start()

    @property
    def stale_answers(self) -> int:
        """Answers of loaders refused because their lease had moved."""
        return int(ray.get(self._job.find(PLANNER).stale_answers.remote(), timeout=self._timeout_s))

    def next_step(self) -> Step | End | BaseException:
        """As `Runtime.next_step`."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                item = self._ready.get(timeout=min(_LOOK_UP_S, self._timeout_s))
                break
            except queue.Empty:
                self._cluster.check()  # who fetches may hang in a call that nobody answers any more
                if time.monotonic() > deadline:
                    raise LoaderTimeout(
                        f"step {self._asked} was not ready within {self._timeout_s:g} s; raise timeout_s if the data is"
                        " that slow"
                    ) from None
        if isinstance(item, Step):
            self._asked = item.plan.step + 1
            self._moved.set()
        else:
            self._ready.put(item)  # asking again gives the same answer
        return item

    def ready(self) -> Ready:
        """As `Runtime.ready`."""
        held = [item for item in list(self._ready.queue) if isinstance(item, Step)]
        return Ready(steps=len(held), num_bytes=sum(map(bytes_of, held)), fetch_p50_ms=self._fetching.p50_ms)

    def decide(self, decision: Decision) -> None:
        """As `Runtime.decide`; returns when the planner knows."""
        with self._deciding:
            self._decisions.append(decision)
            nth = self._decisions.count(decision)
            stream = self._stream
            if stream is None:  # it is part of the state that the stream is opened with
                return
        try:
            planner_knows = ask(
                lambda: self._job.find(PLANNER).decide.remote(
                    stream, self._client, self._asked, decision, nth
                ),
                self._timeout_s,
                PLANNER,
                "telling the planner of a decision",
            )
        except Exception:
            with self._deciding:
                self._decisions.remove(decision)
            raise
        if isinstance(planner_knows, Unknown):
            self._stream = None

    def stop(self) -> None:
        """As `Runtime.stop`."""
        self._stopping.set()
        self._moved.set()
        self._ready.put(_closed())
        self._coming.put((self._asked, 0.0, _closed()))
        self.join()
        with suppress(Exception):  # who is not heard is left out after a while
            self._cluster.check()
            constructor = self._job.find(self._job.constructor(self._node))
            ray.get(constructor.pause.remote(self._client), timeout=_GOODBYE_S)

    def abandon(self) -> None:
        """As `Runtime.abandon`."""
        self._stopping.set()

    def join(self, timeout_s: float = _GOODBYE_S) -> None:
        """Once it is told to stop, wait until it asks for nothing more, or else that would come after the goodbye."""
        deadline = time.monotonic() + timeout_s
        for thread in (self._thread, self._asker):
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        try:
            self._fetch_on()
        except BaseException as error:
            try:
                self._cluster.check()
            except LoaderStopped as why:  # of which the other is a consequence
                self._ready.put(why)
            else:
                self._ready.put(error)

    def _ask_on(self) -> None:
        """Ask for steps, as far ahead as may be, as long as they are fetched."""
        while not self._stopping.is_set() and self._thread.is_alive():
            with self._asking:
                while self._is_behind() and self._has_room():
                    try:
                        ref = self._ask_for(self._following)
                    except BaseException as error:
                        self._coming.put((self._following, 0.0, error))  # raised in its turn
                        return
                    self._coming.put((self._following, time.perf_counter(), ref))
                    self._following += 1
            self._moved.wait(_LOOK_UP_S)
            self._moved.clear()

    def _fetch_on(self) -> None:
        while not self._stopping.is_set():
            try:
                step, asked_s, ref = self._coming.get(timeout=_LOOK_UP_S)
            except queue.Empty:
                continue
            if isinstance(ref, BaseException):
                raise ref
            received = self._receive(step, ref)
            if received is None:
                return
            if isinstance(received, End):
                self._ready.put(received)
                return
            planned, payload = received
            lanes = self._build.build(planned.plan, self._lanes, payload)
            self._fetching.record(time.perf_counter() - asked_s)
            self._last_bytes = sum(map(bytes_of_lane, lanes))
            if self._chaos:
                self._chaos.delay()
            with self._deciding:
                before = replace(self._state, decisions=self._decided_from(step))
                self._state = planned.after
            self._ready.put(
                Step(
                    plan=planned.plan,
                    before=before,
                    after=planned.after,
                    lanes=lanes,
                    quarantined=planned.quarantined,
                    decided=planned.decided,
                )
            )
            self._built = step + 1
            self._moved.set()

    def _is_behind(self) -> bool:
        """Whether a step is wanted that has not been asked for."""
        return not self._stopping.is_set() and self._following <= self._asked + self._prefetch

    def _has_room(self) -> bool:
        """Whether another step may be asked for; one at least is."""
        held, num_asked = self.ready(), self._following - self._built
        if not num_asked and not held.steps:
            return True
        if not self._last_bytes:
            return False  # how large a step is, the first one tells
        num_bytes = held.num_bytes + (num_asked + 1) * self._last_bytes
        return num_asked <= self._prefetch and num_bytes <= self._job.mixture.ray.prefetch_bytes

    def _ask_for(self, step: int, lost: Sequence[str] = ()) -> Any:
        """Ask for a step; None where there is nobody to ask, which `_receive` mends, or this is stopping."""
        try:
            if self._stream is None:
                self._open()
            if self._stopping.is_set():
                # The constructor may have heard the goodbye by now, and knew of no stream then.
                self._job.find(PLANNER).leave.remote(self._stream, self._node, [self._client])
                return None
            constructor = self._job.find(self._job.constructor(self._node))
            return constructor.fetch.remote(self._stream, self._client, self._lanes, step, self._asked, lost)
        except LoaderLost:
            return None

    def _receive(self, step: int, ref: Any) -> tuple[Planned, Payload] | End | None:
        """Wait for a step, asking again where an actor was lost; None if the runtime was stopped."""
        retries, patience_s = Retries(self._timeout_s), self._job.slow_s
        while True:
            lost: Sequence[str] = ()
            try:
                if ref is None:
                    raise LoaderLost("the constructor is not there")
                if not self._wait([ref], retries.deadline):
                    return None
                match result(ref, _AT_ONCE_S, "the constructor"):
                    case End() as end:
                        return end
                    case Served() as found:
                        with self._explaining(step):
                            payload = self._payload(found, patience_s, retries.deadline)
                        if payload is None:
                            return None
                        return self._planned(found), payload
                    case Unknown():
                        self._stream = None
                        raise LoaderLost("the planner does not know the stream any more")
            except LoaderLost as why:
                if isinstance(why, _PartsLost):
                    lost = why.loaders
                    patience_s *= 2
                pause_s = retries.pause_s()
                if pause_s is None:
                    raise LoaderTimeout(
                        f"step {step}: not there within {self._timeout_s:g} s ({why})"
                    ) from None
                if self._stopping.wait(pause_s):
                    return None
                self._make()
            with self._asking:
                ref = self._ask_for(step, lost)
                if not lost:  # those asked for after it went the same way
                    for _ in range(self._coming.qsize()):
                        later, at_s, other = self._coming.get_nowait()
                        if not isinstance(other, BaseException):
                            other = self._ask_for(later)
                        self._coming.put((later, at_s, other))

    @contextmanager
    def _explaining(self, step: int) -> Iterator[None]:
        """Say why a source that may leave the stream ends it all the same, where it does."""
        try:
            yield
        except Exception as error:
            specs = self._job.mixture.sources.values()
            if is_unreachable(error) and any(spec.on_unreachable == "drop_source" for spec in specs):
                error.add_note(
                    f"step {step} was planned before this source was lost, and a plan is never changed; iterate again"
                    " once it can be read, or go on from a saved state with a mixture without it"
                )
            raise

    def _planned(self, served: Served) -> Planned:
        if isinstance(served.planned, Planned):
            return served.planned
        self._cluster.check()
        planned: Planned = result(served.planned, _AT_ONCE_S, "the constructor")
        return planned

    def _payload(self, served: Served, patience_s: float, deadline: float) -> Payload | None:
        """The payload of this rank's lanes; None if the runtime was stopped meanwhile.

        Args:
            served: the step.
            patience_s: how long a loader is waited for, where another could give its part.
            deadline: for all of them.

        Raises:
            LoaderLost: some loaders died, or did not give their parts in time.
        """
        parts = served.parts
        soon = min(deadline, time.monotonic() + patience_s)
        for others, until in ((True, soon), (False, deadline)):
            if not self._wait([part.bundle for part in parts if part.others == others], until):
                return None
        self._cluster.check()  # Ray ends a process that looks for what lay in the memory of a node that is gone
        payloads, lost, whys = [], [], []
        for part in parts:
            try:
                bundle: Bundle = result(part.bundle, _AT_ONCE_S, part.loader)
                payloads.append(bundle.payload())
            except LoaderLost as why:
                lost.append(part.loader)
                whys.append(str(why))
        if lost:
            raise _PartsLost("; ".join(whys), lost)
        if len(payloads) == 1:
            return payloads[0]
        places = [part.where for part in parts]
        return Payload.gathered(sum(map(len, places)), zip(places, payloads, strict=True))

    def _wait(self, refs: list[Any], deadline: float) -> bool:
        """Wait until calls are answered, or a time is over; False if the runtime was stopped meanwhile.

        Raises:
            LoaderStopped: the cluster is gone.
        """
        while not self._stopping.is_set():
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not refs:
                return True
            self._cluster.check()
            _, refs = ray.wait(refs, num_returns=len(refs), timeout=min(_LOOK_UP_S, left_s))
        return False

    def _decided_from(self, step: int) -> tuple[Decision, ...]:
        """The decisions about a step and later ones, by step."""
        later = (one for one in self._decisions if one.step >= step)
        return tuple(sorted(later, key=lambda one: one.step))

    def _open(self) -> None:
        """Find the stream that goes on from where this rank stands, or have it begun."""

        def call() -> Any:
            if self._stopping.is_set():
                raise _closed()
            return self._job.find(PLANNER).open.remote(self._client, state)

        def mend() -> None:
            if not self._stopping.is_set():  # nobody is to make actors of a job that this rank has left
                self._make()

        with self._deciding:
            state = replace(self._state, decisions=self._decided_from(self._state.step))
            self._stream = ask(call, self._timeout_s, PLANNER, "the stream", mend)


def _closed() -> LoaderStopped:
    return LoaderStopped("the loader was closed while a step was waited for; iterate again to go on")
