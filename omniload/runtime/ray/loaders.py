"""The SourceLoader role as an actor, for some of the sources, and what stands for it in other processes."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from omniload.constructor import gather
from omniload.digests import Digests
from omniload.observing.stats import ActorStats, ClientStats
from omniload.payload import Payload
from omniload.pieces import Cursor, Failure, SampleChunk, by_source
from omniload.runtime.bundle import Bundle
from omniload.runtime.feed import LoaderLost
from omniload.runtime.ray.calls import Raised, answer, ask, result
from omniload.runtime.ray.job import PLANNER, Job
from omniload.runtime.ray.layout import Layout, Loader
from omniload.runtime.ray.meter import Meter
from omniload.runtime.ray.placement import nodes_of, places, preferring

if TYPE_CHECKING:
    from omniload.loader import SourceLoader
    from omniload.samples.tokenize import Tokenizer
    from omniload.scaling.profile import SourceProfile

_LOOK_UP_S = 10.0
THREADS = 8
"""Calls that a loader works on at once, besides those below."""
_GROUPS = {"payload": 4, "health": 1}
"""Calls likewise, of kinds that must not wait until slow storage lets go of the others."""


class LoaderActor:
    """Reads some of the sources; every method returns its result, or `Raised`.

    Whoever has a handle of an actor imports its module. So what reads is imported by the actor itself, when it does.

    Args:
        job: the job.
        loader: which of its loaders.
    """

    def __init__(self, job: Job, loader: Loader) -> None:
        job.enter()
        self._job = job
        self._sources = loader.sources
        names = tuple(job.mixture.names[source] for source in loader.sources)
        self._meter = Meter(loader.name, "loader", names, shadow=loader.shadow)
        self._loaders: dict[int, SourceLoader] = {}
        self._opening = {source: threading.Lock() for source in loader.sources}
        self._reading_tokenizer = threading.Lock()
        self._loaded_tokenizer: Tokenizer | None = None

    def open(self) -> Any:
        """The files of the sources, by their numbers."""
        return answer(
            lambda: {
                source: [entry.url for entry in self._loader(source).source.files] for source in self._sources
            }
        )

    def digests(self) -> Any:
        """`Digests` of the sources, by their numbers; may read the ends of files."""
        return answer(lambda: {source: self._loader(source).digests for source in self._sources})

    def read(self, source: int, cursor: Cursor, max_samples: int) -> Any:
        """As `SourceLoader.read`."""
        with self._meter.answering(), self._meter.fetches.measure():
            return answer(lambda: self._loader(source).read(cursor, max_samples))

    def evict(self, source: int, fraction: float) -> Any:
        """As `SourceLoader.evict`."""
        return answer(lambda: self._loader(source).evict(fraction))

    def payload(self, source: int, pieces: np.ndarray) -> Payload:
        """As `SourceLoader.payload`; for `gather`."""
        return self._loader(source).payload(pieces)

    @ray.method(concurrency_group="payload")
    def bundles(self, pieces: np.ndarray, bounds: Sequence[int], done: Sequence[np.ndarray]) -> Any:
        """The payload of pieces of any of the sources, in parts: one `Bundle`, or `Raised`, for each.

        Args:
            pieces: ``PIECE[p]``.
            bounds: part i is ``pieces[bounds[i]:bounds[i + 1]]``.
            done: other pieces, as `release` takes them.
        """
        with self._meter.answering():
            self.release(done)
            parts = answer(lambda: self._bundles(pieces, bounds))
            if isinstance(parts, Raised):
                parts = [parts] * (len(bounds) - 1)
            return parts if len(parts) > 1 else parts[0]  # as Ray has it

    def _bundles(self, pieces: np.ndarray, bounds: Sequence[int]) -> list[Bundle]:
        payload = gather(pieces, self)
        return [Bundle.of(payload.part(begin, end)) for begin, end in itertools.pairwise(bounds)]

    def release(self, done: Sequence[np.ndarray]) -> None:
        """As `SourceLoader.release`, for tables of pieces of any of the sources."""
        for pieces in done:
            for source, where in by_source(pieces):
                if source in self._loaders:
                    self._loaders[source].release(pieces.take(where))

    def origins(self, source: int, file: int, block: int, rows: np.ndarray) -> Any:
        """As `SourceLoader.origins`."""
        return answer(lambda: self._loader(source).origins(file, block, rows))

    @ray.method(concurrency_group="health")
    def failures(self) -> Any:
        """The rows quarantined last, of all sources."""
        return [failure for loader in list(self._loaders.values()) for failure in list(loader.failures)]

    def profile(self, seconds: float) -> Any:
        """A `SourceProfile` of each source, by their numbers, measured beside what goes on.

        Args:
            seconds: what each may take, about.
        """
        from omniload.scaling.profile import profile_source

        def measured(source: int) -> SourceProfile:
            loader = self._open(source)
            try:
                return profile_source(loader, seconds=seconds)
            finally:
                loader.close()

        return answer(lambda: {source: measured(source) for source in self._sources})

    @ray.method(concurrency_group="health")
    def stats(self) -> tuple[ActorStats, tuple[ClientStats, ...]]:
        """How it is, and the ranks that it speaks for: none."""
        held = sum(loader.buffered_bytes for loader in list(self._loaders.values()))
        return self._meter.stats(queue_bytes=held), ()

    def _loader(self, source: int) -> SourceLoader:
        if (there := self._loaders.get(source)) is not None:
            return there
        with self._opening[source]:  # once, by whoever comes first
            if source not in self._loaders:
                self._loaders[source] = self._open(source)
            return self._loaders[source]

    def _open(self, source: int) -> SourceLoader:
        from omniload.loader import open_loader

        mixture, settings = self._job.mixture, self._job.settings
        return open_loader(
            mixture.names[source],
            mixture,
            tokenizer=self._tokenizer(),
            split=settings.split,
            buffer_bytes=settings.buffer_bytes,
        )

    def _tokenizer(self) -> Tokenizer | None:
        path = self._job.mixture.tokenizer
        if path is None:
            return None
        with self._reading_tokenizer:
            if self._loaded_tokenizer is None:
                from omniload.samples.tokenize import Tokenizer

                self._loaded_tokenizer = Tokenizer.from_file(path)
            return self._loaded_tokenizer


class RemoteLoader:
    """A source as one of the actors that read it is asked.

    Args:
        job: the job.
        source: number of the source.
        actor: name of the actor.
        patience_s: how long a read may take; after one that took longer, twice as long, up to ``timeout_s``: a storage
            that is slow for every loader must not have them give up in turns.
    """

    def __init__(self, job: Job, source: int, actor: str, patience_s: float) -> None:
        self._job = job
        self._source = source
        self._actor = actor
        self._first_patience_s = self._patience_s = patience_s
        self._handle: Any = None

    @property
    def actor(self) -> str:
        """Name of the actor."""
        return self._actor

    def read(self, cursor: Cursor, max_samples: int) -> SampleChunk:
        """As `SourceLoader.read`.

        Raises:
            LoaderLost: the actor died, or takes too long.
        """
        chunk: SampleChunk = self._call("read", cursor, max_samples)
        return chunk

    def evict(self, fraction: float) -> None:
        """As `SourceLoader.evict`."""
        self._call("evict", fraction)

    def _call(self, method: str, *args: Any) -> Any:
        self._handle = self._handle or self._job.find(self._actor)
        try:
            found = result(
                getattr(self._handle, method).remote(self._source, *args), self._patience_s, self._actor
            )
        except LoaderLost:
            self._handle = None  # it may be made anew under the same name
            self._patience_s = min(2 * self._patience_s, self._job.settings.timeout_s)
            raise
        self._patience_s = self._first_patience_s
        return found


class RemoteSources:
    """What a rank asks the loaders about the sources of the mixture.

    Args:
        job: the job.
        mend: makes the actors that are gone for good.
    """

    def __init__(self, job: Job, mend: Callable[[], None]) -> None:
        self._job = job
        self._mend = mend
        self._layout = job.layout
        self._timeout_s = job.settings.timeout_s

    def urls(self) -> list[list[str]]:
        """The files of every source."""
        return self._of_sources("open")

    def digests(self) -> list[Digests]:
        """`Digests` of every source."""
        return self._of_sources("digests")

    def failures(self) -> list[Failure]:
        """The rows quarantined last, by any of the loaders."""
        self._look_up()
        found: list[Failure] = []
        for loader in self._layout.loaders:
            with suppress(LoaderLost):  # what it noted is gone with it
                actor = self._job.find(loader.name)
                found += result(actor.failures.remote(), self._timeout_s, loader.name)
        return found

    def one(self, source: int) -> RemoteSource:
        """One source, as `omniload.origins` asks for it."""
        return RemoteSource(self, self._job.mixture.names[source], source)

    def origins(self, source: int, file: int, block: int, rows: np.ndarray) -> tuple[list[str], np.ndarray]:
        """As `SourceLoader.origins`."""
        found: tuple[list[str], np.ndarray] = self._ask(
            source, lambda actor: actor.origins.remote(source, file, block, rows)
        )
        return found

    def _of_sources(self, method: str) -> list[Any]:
        """What every loader says of its sources; all of them work on it at the same time."""
        self._look_up()
        found: dict[int, Any] = {}
        readers = [loader for loader in self._layout.loaders if not loader.shadow]
        begun: dict[str, Any] = {}
        for loader in readers:
            with suppress(LoaderLost):  # asked again below
                begun[loader.name] = getattr(self._job.find(loader.name), method).remote()
        for loader in readers:
            first = begun.get(loader.name)
            found |= self._ask(
                loader.sources[0], lambda actor: getattr(actor, method).remote(), loader.name, first
            )
        for source in range(len(self._job.mixture.names)):
            if source not in found:  # another one answered, which does not read it
                found |= self._ask(source, lambda actor: getattr(actor, method).remote())
        return [found[source] for source in range(len(self._job.mixture.names))]

    def _ask(self, source: int, call: Callable[[Any], Any], first: str = "", begun: Any = None) -> Any:
        """Ask whichever of the loaders of a source answers, one after the other.

        Args:
            source: the source.
            call: asks one.
            first: name of the one to ask first.
            begun: the call to that one, if it was made before.
        """
        tries = itertools.count(int(begun is not None))
        calls = iter([] if begun is None else [begun])

        def next_one() -> Any:
            for made in calls:
                return made
            members = [*self._layout.readers(source), *self._layout.shadows(source)]
            members.sort(key=lambda name: name != first)
            return call(self._job.find(members[next(tries) % len(members)]))

        what = f"source '{self._job.mixture.names[source]}'"
        return ask(next_one, self._timeout_s, "its loader", what, self._mend_and_look_up)

    def _mend_and_look_up(self) -> None:
        self._mend()
        self._look_up()

    def _look_up(self) -> None:
        """The loaders there are now; those that were known last, where nobody tells."""
        with suppress(LoaderLost):
            self._layout = result(self._job.find(PLANNER).layout.remote(), _LOOK_UP_S, PLANNER)


class RemoteSource:
    """One of `RemoteSources`."""

    def __init__(self, sources: RemoteSources, name: str, number: int) -> None:
        self._sources = sources
        self.name = name
        self._number = number

    def origins(self, file: int, block: int, rows: np.ndarray) -> tuple[list[str], np.ndarray]:
        """As `SourceLoader.origins`."""
        return self._sources.origins(self._number, file, block, rows)


def remote_loaders(job: Job, layout: Layout, source: int) -> list[RemoteLoader]:
    """The actors that share a source, as its feed asks them; those that stand by come last."""
    members = [*layout.readers(source), *layout.shadows(source)]
    # Alone, it has to be waited for.
    patience_s = job.slow_s if len(members) > 1 else job.settings.timeout_s
    return [RemoteLoader(job, source, name, patience_s) for name in members]


def make_loaders(job: Job, layout: Layout, own: str | None = None) -> None:
    """Make those that are not there, each on the node that `placement.places` gives it.

    Args:
        job: the job.
        layout: its loaders.
        own: the node of the rank that makes them, if one does.
    """
    there = job.actors()
    missing = [loader for loader in layout.loaders if loader.name not in there]
    if not missing:
        return
    reserved = job.loader_options
    at = places(
        layout.loaders,
        nodes_of(job, own),
        cpus=reserved.get("num_cpus", 0.0),
        resources=reserved.get("resources", {}),
    )
    for loader in missing:
        ray.remote(concurrency_groups=dict(_GROUPS))(LoaderActor).options(  # type: ignore[call-overload]  # not in its types
            name=loader.name,
            namespace=job.namespace,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            max_concurrency=THREADS,
            **reserved,
            **preferring(at.get(loader.name)),
        ).remote(job, loader)
