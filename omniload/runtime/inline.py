"""The inline runtime: every role in threads of this process.

::

    pool ──► SourceLoader.read ──► SourceFeed ──► Planner, payload ──► queue ──► DataConstructor ──► queue ──► client
    threads                        one ahead      thread                         thread

The planner has begun at most ``prefetch_steps + 1`` steps that the client has not taken. So both queues are bounded,
and a client that takes its time stops the planner, which stops the reading.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import pyarrow as pa

from omniload.constructor import DERIVED, DataConstructor, gather, pieces_of
from omniload.errors import LoaderStopped, LoaderTimeout
from omniload.identity import Identity
from omniload.loader import SourceLoader, open_loader
from omniload.mixture import Mixture
from omniload.observing.timing import Timing
from omniload.origins import origins
from omniload.payload import Payload
from omniload.pieces import Cursor, Failure, SampleChunk, by_source
from omniload.planner import Plan, Planner, StreamState
from omniload.planner.decisions import Decision
from omniload.runtime.chaos import Chaos
from omniload.runtime.feed import SourceFeed
from omniload.runtime.options import Settings
from omniload.runtime.steps import End, Ready, Step, bytes_of
from omniload.samples.tokenize import Tokenizer
from storage.background import BackgroundPool, BackgroundThread

MAX_READERS = 4
"""Threads that read sources; decoding and tokenising release the interpreter lock."""
_LOOK_S = 0.1
"""How often a thread that waits looks whether it is to end."""


@dataclass(frozen=True, slots=True)
class _Planned:
    """A step between the planner and the constructor."""

    plan: Plan
    before: StreamState
    after: StreamState
    quarantined: tuple[Failure, ...]
    decided: tuple[Decision, ...]
    payload: Payload
    seconds: float
    """Time that it took so far."""


class InlineRuntime:
    """Runs the roles for one rank, from a state on until `stop`.

    Args:
        mixture: the mixture.
        loaders: for each source, in the order of `Mixture.names`, the loaders that share it.
        lanes: the lanes to build.
        state: the stream to go on from.
        prefetch_steps: finished steps held ready.
        timeout_s: limit of every wait.
        derived: which of `omniload.constructor.DERIVED` lanes have.
        chaos: disturbance, or None.
    """

    def __init__(
        self,
        mixture: Mixture,
        loaders: Sequence[Sequence[SourceLoader]],
        lanes: Sequence[int],
        state: StreamState,
        *,
        prefetch_steps: int,
        timeout_s: float,
        derived: Collection[str] = DERIVED,
        chaos: Chaos | None = None,
    ) -> None:
        self._loaders = loaders
        self._lanes = lanes
        self._timeout_s = timeout_s
        self._pool = BackgroundPool(min(MAX_READERS, len(loaders)), name="omniload-read")
        self._feeds = [
            SourceFeed(
                name,
                mixture.sources[name],
                group,
                self._pool,
                timeout_s=timeout_s,
                chaos=chaos.source(name) if chaos else None,
            )
            for name, group in zip(mixture.names, loaders, strict=True)
        ]
        self._planner = Planner(mixture, self, state)
        self._constructor = DataConstructor(mixture, derived)
        self._chaos = chaos.source("steps") if chaos else None
        self._may_begin = threading.Semaphore(prefetch_steps + 1)
        self._planned: queue.Queue[_Planned | End | BaseException] = queue.Queue()
        self._ready: queue.Queue[Step | End | BaseException] = queue.Queue()
        self._making = Timing()
        self._stopping = threading.Event()
        self._threads = [
            BackgroundThread(run, name=name, ask_to_end=self.abandon)
            for run, name in ((self._plan, "omniload-plan"), (self._build, "omniload-build"))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def stale_answers(self) -> int:
        """Answers of loaders refused because their lease had moved."""
        return sum(feed.stale_answers for feed in self._feeds)

    def next_step(self) -> Step | End | BaseException:
        """The next step, the end of the stream, or what stopped the planning.

        An error is returned and not raised, so that it does not come to hold on to the caller.

        Raises:
            LoaderTimeout: the step was not ready in time.
        """
        try:
            item = self._ready.get(timeout=self._timeout_s)
        except queue.Empty:
            step = self._planner.state.step
            raise LoaderTimeout(
                f"step {step} was not ready within {self._timeout_s:g} s; raise timeout_s if the data is that slow"
            ) from None
        if isinstance(item, End | LoaderStopped):
            self._ready.put(item)  # asking again gives the same answer
        self._may_begin.release()
        return item

    def ready(self) -> Ready:
        """What is held ready."""
        held = [item for item in list(self._ready.queue) if isinstance(item, Step)]
        return Ready(steps=len(held), num_bytes=sum(map(bytes_of, held)), fetch_p50_ms=self._making.p50_ms)

    def decide(self, decision: Decision) -> None:
        """Let a decision take effect at a step that the planner has not begun.

        It has begun at most ``prefetch_steps + 1`` steps more than were asked for.
        """
        self._planner.decide(decision)

    def stop(self) -> None:
        """End the planning; a read that is under way ends by itself and is thrown away.

        Who waits for a step gets `LoaderStopped`.
        """
        self._stopping.set()
        self._ready.put(
            LoaderStopped("the loader was closed while a step was waited for; iterate again to go on")
        )
        for feed in self._feeds:
            feed.stop()
        self._pool.shutdown(wait=False, cancel_futures=True)
        for thread in self._threads:
            thread.join(self._timeout_s)

    def abandon(self) -> None:
        """End the planning as soon as it is seen, when nobody is left to ask for steps.

        Called where garbage is collected, which may be in any thread and inside of any other call here. So it takes
        no lock that such a call may hold: neither the queue's nor the pool's.
        """
        self._stopping.set()

    def read(self, source: int, cursor: Cursor) -> SampleChunk:
        """Metadata for the planner."""
        if self._stopping.is_set():
            raise LoaderStopped("the loader is closed")
        return self._feeds[source].read(cursor)

    def payload(self, source: int, pieces: np.ndarray) -> Payload:
        """Tokens for the constructor."""
        loaders = self._loaders[source]
        if len(loaders) == 1:
            return loaders[0].payload(pieces)
        # Any loader can derive any piece again; asking a fixed one per block merely keeps its caches useful.
        owner = (pieces["file"] + pieces["block"]) % len(loaders)
        places = [np.flatnonzero(owner == i) for i in range(len(loaders))]
        return Payload.gathered(
            len(pieces),
            (
                (where, loader.payload(pieces.take(where)))
                for loader, where in zip(loaders, places, strict=True)
            ),
        )

    def _plan(self) -> None:
        """The thread that plans, and fetches the payload."""
        try:
            while self._wait_to_begin():
                began_s = time.perf_counter()
                before = self._planner.state
                plan = self._planner.next()
                after, quarantined = self._planner.state, self._planner.quarantined
                if plan is None:
                    self._planned.put(End(after=after, quarantined=quarantined))
                    return
                payload = gather(pieces_of(plan, self._lanes), self)
                self._release(plan)
                seconds = time.perf_counter() - began_s
                own = self._planner.own_decisions
                self._planned.put(_Planned(plan, before, after, quarantined, own, payload, seconds))
        except BaseException as error:
            self._planned.put(error)
        finally:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _release(self, plan: Plan) -> None:
        """Let the loaders let go of the payload of all ranks; what this one has gathered it holds by itself."""
        for source, where in by_source(plan.pieces):
            for loader in self._loaders[source]:
                loader.release(plan.pieces.take(where))

    def _wait_to_begin(self) -> bool:
        """Wait until another step may be begun; False when there is to be none."""
        while not self._stopping.is_set():
            # The consumer may take as long as it likes; only `stop` ends this wait.
            if self._may_begin.acquire(timeout=_LOOK_S):
                return True
        return False

    def _build(self) -> None:
        """The thread that builds lanes: mostly memory traffic, without the interpreter lock."""
        try:
            while not self._stopping.is_set():
                try:
                    item = self._planned.get(timeout=_LOOK_S)
                except queue.Empty:
                    continue
                if not isinstance(item, _Planned):
                    self._ready.put(item)
                    return
                self._ready.put(self._built(item))
        except BaseException as error:
            self._ready.put(error)
            self._stopping.set()

    def _built(self, planned: _Planned) -> Step:
        began_s = time.perf_counter()
        lanes = self._constructor.build(planned.plan, self._lanes, planned.payload)
        self._making.record(planned.seconds + time.perf_counter() - began_s)
        if self._chaos:
            self._chaos.delay()
        return Step(
            plan=planned.plan,
            before=planned.before,
            after=planned.after,
            lanes=lanes,
            quarantined=planned.quarantined,
            decided=planned.decided,
        )


class InlineHost:
    """Holds the source loaders of a rank that does everything by itself.

    Args:
        mixture: the mixture.
        loaders: for each source, in the order of `Mixture.names`, the loaders that share it.
        lanes: the lanes of the rank.
        settings: how to load.
    """

    def __init__(
        self,
        mixture: Mixture,
        loaders: Sequence[Sequence[SourceLoader]],
        lanes: Sequence[int],
        settings: Settings,
    ) -> None:
        self._mixture = mixture
        self._loaders = loaders
        self._lanes = lanes
        self._settings = settings

    @classmethod
    def open(cls, mixture: Mixture, lanes: Sequence[int], settings: Settings) -> Self:
        """Open the loaders of every source: one, unless chaos wants more to share it."""
        path, chaos = mixture.tokenizer, settings.chaos
        tokenizer = Tokenizer.from_file(path) if path is not None else None
        loaders = [
            [
                open_loader(
                    name,
                    mixture,
                    tokenizer=tokenizer,
                    split=settings.split,
                    buffer_bytes=settings.buffer_bytes,
                )
                for _ in range(chaos.source(name).num_loaders() if chaos else 1)
            ]
            for name in mixture.names
        ]
        return cls(mixture, loaders, lanes, settings)

    def identity(self) -> Identity:
        """Digests of everything the stream depends on."""
        return Identity.of(self._mixture, [group[0].digests for group in self._loaders], self._settings.split)

    def urls(self, source: int) -> list[str]:
        """The files of a source."""
        return [entry.url for entry in self._loaders[source][0].source.files]

    def failures(self) -> list[Failure]:
        """The rows quarantined last."""
        return [failure for group in self._loaders for loader in group for failure in list(loader.failures)]

    def origins(self, plan: Plan, lane: int) -> pa.Table:
        """Where the tokens of a lane come from."""
        return origins(plan, lane, [loader for loader, *_ in self._loaders])

    def start(self, state: StreamState) -> InlineRuntime:
        """Start the threads, from a state on."""
        return InlineRuntime(
            self._mixture,
            self._loaders,
            self._lanes,
            state,
            prefetch_steps=self._settings.prefetch_steps,
            timeout_s=self._settings.timeout_s,
            derived=self._settings.derived,
            chaos=self._settings.chaos,
        )

    def close(self) -> None:
        """Nothing runs besides the runtime."""
