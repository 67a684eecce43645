"""The inline runtime: every role in threads of this process.

::

    pool ──► SourceLoader.read ──► SourceFeed ──► Planner ──► DataConstructor ──► queue ──► client
    threads                        one ahead      └───────── one thread ────────┘  bounded

The queue holds ``prefetch_steps`` finished steps; a full queue stops the planner, which stops the reading.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from omniload.constructor import DERIVED, DataConstructor, LaneArrays
from omniload.errors import LoaderStopped, LoaderTimeout
from omniload.loader import SourceLoader
from omniload.mixture import Mixture
from omniload.payload import Payload
from omniload.pieces import Cursor, Failure, SampleChunk
from omniload.planner import Plan, Planner, StreamState
from omniload.planner.decisions import Decision
from omniload.runtime.chaos import Chaos
from omniload.runtime.feed import SourceFeed

MAX_READERS = 4
"""Threads that read sources; decoding and tokenising release the interpreter lock."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One finished step, as one rank sees it."""

    plan: Plan
    """The plan of the whole step."""
    before: StreamState
    """The stream before it."""
    after: StreamState
    """The stream after it."""
    lanes: list[LaneArrays]
    """This rank's lanes."""
    quarantined: tuple[Failure, ...]
    """Rows that the step consumed and that make no sample."""


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """The end of the stream."""

    after: StreamState
    """The stream after its last step."""
    quarantined: tuple[Failure, ...]
    """Rows consumed after the last step that make no sample."""


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
        self._lanes = lanes
        self._timeout_s = timeout_s
        self._pool = ThreadPoolExecutor(min(MAX_READERS, len(loaders)), thread_name_prefix="omniload-read")
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
        self._constructor = DataConstructor(mixture, self, derived)
        self._chaos = chaos.source("steps") if chaos else None
        self._ready: queue.Queue[Step | End | BaseException] = queue.Queue(prefetch_steps)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="omniload-plan", daemon=True)
        self._thread.start()

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
            self._again(item)  # asking again gives the same answer
        return item

    def decide(self, decision: Decision) -> None:
        """Let a decision take effect at a step that the planner has not begun.

        It has begun at most ``prefetch_steps + 1`` steps more than were asked for: those in the queue, and the one
        that waits for a place in it.
        """
        self._planner.decide(decision)

    def stop(self) -> None:
        """End the planning; a read that is under way ends by itself and is thrown away.

        Who waits for a step gets `LoaderStopped`.
        """
        self._stopping.set()
        self._again(
            LoaderStopped("the loader was closed while a step was waited for; iterate again to go on")
        )
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._thread.join(self._timeout_s)

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
        return self._feeds[source].payload(pieces)

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                before = self._planner.state
                plan = self._planner.next()
                after, quarantined = self._planner.state, self._planner.quarantined
                if plan is None:
                    self._put(End(after=after, quarantined=quarantined))
                    return
                lanes = self._constructor.build(plan, self._lanes)
                for source in np.unique(plan.pieces["source"]).tolist():
                    self._feeds[source].release(plan.pieces[plan.pieces["source"] == source])
                if self._chaos:
                    self._chaos.delay()
                self._put(Step(plan=plan, before=before, after=after, lanes=lanes, quarantined=quarantined))
        except BaseException as error:
            self._put(error)
        finally:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _again(self, item: End | LoaderStopped) -> None:
        with suppress(queue.Full):  # then there is something to get
            self._ready.put_nowait(item)

    def _put(self, item: Step | End | BaseException) -> None:
        # The consumer may take as long as it likes; only `stop` ends this wait.
        while not self._stopping.is_set():
            try:
                self._ready.put(item, timeout=0.1)
                return
            except queue.Full:
                continue
