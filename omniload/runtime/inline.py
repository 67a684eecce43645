"""The inline runtime: every role in threads of this process.

::

    pool ──► SourceLoader.read ──► SourceFeed ──► Planner ──► DataConstructor ──► queue ──► client
    threads                        one ahead      └───────── one thread ────────┘  bounded

The queue holds ``prefetch_steps`` finished steps; a full queue stops the planner, which stops the reading.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
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
from omniload.pieces import Cursor, Failure, SampleChunk
from omniload.planner import Plan, Planner, StreamState
from omniload.planner.decisions import Decision
from omniload.runtime.chaos import Chaos
from omniload.runtime.feed import SourceFeed
from omniload.runtime.options import Settings
from omniload.runtime.steps import End, Ready, Step, bytes_of
from omniload.samples.tokenize import Tokenizer

MAX_READERS = 4
"""Threads that read sources; decoding and tokenising release the interpreter lock."""


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
        self._constructor = DataConstructor(mixture, derived)
        self._chaos = chaos.source("steps") if chaos else None
        self._ready: queue.Queue[Step | End | BaseException] = queue.Queue(prefetch_steps)
        self._making = Timing()
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

    def ready(self) -> Ready:
        """What is held ready."""
        held = [item for item in list(self._ready.queue) if isinstance(item, Step)]
        return Ready(steps=len(held), num_bytes=sum(map(bytes_of, held)), fetch_p50_ms=self._making.p50_ms)

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
        loaders = self._loaders[source]
        if len(loaders) == 1:
            return loaders[0].payload(pieces)
        # Any loader can derive any piece again; asking a fixed one per block merely keeps its caches useful.
        owner = (pieces["file"] + pieces["block"]) % len(loaders)
        places = [np.flatnonzero(owner == i) for i in range(len(loaders))]
        return Payload.gathered(
            len(pieces),
            (
                (where.tolist(), loader.payload(pieces[where]))
                for loader, where in zip(loaders, places, strict=True)
            ),
        )

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                began_s = time.perf_counter()
                before = self._planner.state
                plan = self._planner.next()
                after, quarantined = self._planner.state, self._planner.quarantined
                if plan is None:
                    self._put(End(after=after, quarantined=quarantined))
                    return
                payload = gather(pieces_of(plan, self._lanes), self)
                lanes = self._constructor.build(plan, self._lanes, payload)
                self._making.record(time.perf_counter() - began_s)
                for source in np.unique(plan.pieces["source"]).tolist():
                    for loader in self._loaders[source]:
                        loader.release(plan.pieces[plan.pieces["source"] == source])
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
