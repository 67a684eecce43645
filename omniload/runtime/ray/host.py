"""A rank's seat in a job whose roles are actors."""

from __future__ import annotations

import atexit
import hashlib
import itertools
import json
import logging
import os
import sys
import threading
import time
import uuid
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from omniload.identity import Identity
from omniload.lazy import lazy
from omniload.mixture import Mixture
from omniload.observing.job_dir import job_dir
from omniload.observing.stats import ClientStats
from omniload.origins import origins
from omniload.pieces import Failure
from omniload.place import Place
from omniload.planner import Plan, StreamState
from omniload.runtime.options import Settings
from omniload.runtime.ray import cluster
from omniload.runtime.ray.calls import ask
from omniload.runtime.ray.constructor import ConstructorActor
from omniload.runtime.ray.job import PLANNER, Job
from omniload.runtime.ray.layout import Layout, deal
from omniload.runtime.ray.loaders import RemoteSources, make_loaders
from omniload.runtime.ray.membership import ALIVE_EVERY_S
from omniload.runtime.ray.placement import home, nodes_of, preferring
from omniload.runtime.ray.planner import PlannerActor
from omniload.runtime.ray.runtime import RayRuntime
from storage.background import BackgroundThread

logger = logging.getLogger(__name__)

_LEAVING_S = 20.0
"""How long a process that ends waits to be heard and, if it runs the cluster, for the other ranks and the actors."""
_SILENCE_S = 5.0
"""How long a rank that leaves waits until nothing more is asked for in its name."""
_LOOK_S = 0.05


class RayHost:
    """Joins the actors of a job, or makes them.

    Args:
        mixture: the mixture.
        place: the rank's place among the data-parallel ranks.
        settings: how to load.
        stats: a method that tells how the rank is; who it belongs to is not kept alive.

    Raises:
        LoaderTimeout: the cluster, or an actor, does not come in time.
        PlaceError: nothing says which ranks belong together.
        SourceError: a source cannot be opened.
    """

    def __init__(
        self, mixture: Mixture, place: Place, settings: Settings, stats: Callable[[], ClientStats]
    ) -> None:
        self._stats = weakref.WeakMethod(stats)
        options = mixture.ray
        digest = _digest(mixture, settings)
        launch = cluster.job_name(options.job)
        # Loaders of a process that load different things are different jobs; one that has a name of its own says so.
        name = launch if options.job is not None else f"{launch}-{digest[:8]}"
        self._cluster = cluster.join(options, launch, settings.timeout_s)
        self._node: str = ray.get_runtime_context().get_node_id()
        self._lanes = tuple(place.lanes_of(mixture))
        # A process that starts again takes the seats that it had, and no others.
        seat = next(_seats[name])
        self._client = f"{place.dp_rank}/{os.environ.get('RANK', uuid.uuid4().hex[:8])}.{seat}"
        self._settings = settings
        self._job = Job(
            name=name,
            digest=digest,
            mixture=mixture,
            settings=settings,
            layout=_layout(mixture),
            log=f"{options.log}/{name}" if options.log else str(job_dir(name) / "plans"),
            slow_s=options.slow_s,
            loader_options={"num_cpus": options.loader_cpus, "resources": dict(options.resources)},
            import_path=tuple(entry or str(Path.cwd()) for entry in sys.path),
        )
        _jobs[name] = self._job
        # Not a method: what is given it must not keep this object alive.
        self._make = partial(_make, self._job, self._node, self._cluster)
        self._sources = RemoteSources(self._job, self._make)
        self._seat = _Seat(job=self._job, client=self._client, node=self._node, cluster=self._cluster)
        self._goodbye: weakref.finalize[..., Any] | None = None
        self._join()
        if place.dp_rank == 0:
            try:
                _ = self._urls  # so that a source that cannot be opened is said now
            except BaseException:
                self.close()
                raise

    @lazy
    def _urls(self) -> list[list[str]]:
        return self._sources.urls()

    def identity(self) -> Identity:
        """Digests of everything the stream depends on."""
        constructor = self._job.constructor(self._node)
        digests = ask(
            lambda: self._job.find(constructor).digests.remote(),
            self._settings.timeout_s,
            "the constructor",
            "the digests of the sources",
            self._make,
        )
        return Identity.of(self._job.mixture, digests, self._settings.split)

    def urls(self, source: int) -> list[str]:
        """The files of a source."""
        return self._urls[source]

    def failures(self) -> list[Failure]:
        """The rows quarantined last; those that a lost loader noted are gone with it."""
        return self._sources.failures()

    def origins(self, plan: Plan, lane: int) -> pa.Table:
        """Where the tokens of a lane come from."""
        every = [self._sources.one(source) for source in range(len(self._job.mixture.names))]
        return origins(plan, lane, every)

    def start(self, state: StreamState) -> RayRuntime:
        """Begin to fetch from a state on."""
        self._join()
        runtime = RayRuntime(
            self._job, self._cluster, self._node, self._client, self._lanes, state, self._make
        )
        self._seat.runtimes.add(runtime)
        return runtime

    def close(self) -> None:
        """Leave the job; the last one ends its actors."""
        if self._goodbye is not None:
            self._goodbye.detach()
            self._goodbye = None
            self._seat.leave()

    def _join(self) -> None:
        if self._goodbye is not None:
            return
        self._make()
        constructor = self._job.constructor(self._node)
        ask(
            lambda: self._job.find(constructor).alive.remote(self._client, None, self._job.digest),
            self._settings.timeout_s,
            "the constructor",
            "joining the job",
            self._make,
        )
        self._seat.take(self._stats)
        # Where garbage is collected nothing may be waited for.
        self._goodbye = weakref.finalize(self, self._seat.leave_soon)
        self._goodbye.atexit = False


def _make(job: Job, node: str, joined: cluster.Cluster) -> None:
    """Make the actors of a job that are not there, as a rank on a node does.

    Raises:
        LoaderStopped: the cluster is gone.
    """
    joined.check()
    common = {"namespace": job.namespace, "lifetime": "detached", "get_if_exists": True}
    core = {"max_restarts": -1, "num_cpus": 0, "max_concurrency": 10_000, **common}
    # First, as it tells the other ranks that this node trains.
    here = NodeAffinitySchedulingStrategy(node, soft=False)
    ray.remote(ConstructorActor).options(name=job.constructor(node), scheduling_strategy=here, **core).remote(
        job, node
    )
    if not job.has(PLANNER):  # which makes the loaders that are missing later
        make_loaders(job, job.layout, node)
        of_rank_0 = home(nodes_of(job, node), node, os.environ.get("MASTER_ADDR"))
        ray.remote(PlannerActor).options(name=PLANNER, **core, **preferring(of_rank_0)).remote(job)


@dataclass(eq=False, kw_only=True, slots=True)
class _Seat:
    """The place of a rank in a job: who sits there says so again and again."""

    job: Job
    client: str
    node: str
    cluster: cluster.Cluster
    runtimes: weakref.WeakSet[RayRuntime] = field(default_factory=weakref.WeakSet)
    """Those that ask for steps in its name."""
    left: threading.Event = field(default_factory=threading.Event)
    beating: BackgroundThread | None = None

    def take(self, stats: weakref.WeakMethod[Callable[[], ClientStats]]) -> None:
        self.left = threading.Event()
        _taken[id(self)] = self
        beat = partial(_beat, self, self.left, stats)
        self.beating = BackgroundThread(beat, name="omniload-alive", ask_to_end=self.left.set)
        self.beating.start()

    def leave(self) -> None:
        """Say goodbye; the last one of a job ends its actors."""
        self.left.set()
        _taken.pop(id(self), None)
        runtimes = list(self.runtimes)
        for runtime in runtimes:
            runtime.abandon()
        if not ray.is_initialized() or self.cluster.lost:
            return
        # Heard of after the goodbye, it would be taken to be there, and other ranks would wait for it.
        deadline = time.monotonic() + _SILENCE_S
        for thread in (*runtimes, self.beating):
            if thread is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
        if not ray.is_initialized() or self.cluster.lost:
            return
        try:
            ray.get(
                self.job.find(self.job.constructor(self.node)).leave.remote(self.client), timeout=_LEAVING_S
            )
        except Exception as error:  # what is left, the planner ends when nobody has been heard for a while
            logger.info("job %s: %s left without being heard: %s", self.job.name, self.client, error)

    def leave_soon(self) -> None:
        """As `leave`, in a thread."""
        self.left.set()
        BackgroundThread(self.leave, name="omniload-leave").start()


_seats: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
"""Numbers of the seats that this process has had, by job."""
_taken: dict[int, _Seat] = {}
"""Those it has now."""
_jobs: dict[str, Job] = {}
"""All that it took part in."""


def _digest(mixture: Mixture, settings: Settings) -> str:
    """Digest of what the ranks of a job have to agree on."""
    said = [
        mixture.model_dump(mode="json", exclude={"ray", "execution", "quarantine"}),
        settings.split,
        settings.prefetch_steps,
    ]
    return hashlib.blake2b(json.dumps(said, sort_keys=True).encode(), digest_size=8).hexdigest()


@atexit.register  # after Ray's own, and so called before it
def _at_exit() -> None:
    """Leave every job, and end the cluster if this process runs it, once no other process is in it."""
    try:
        for seat in list(_taken.values()):
            seat.leave()
        _wait_for_others(cluster.current())
    finally:  # also where a signal ends the wait
        cluster.end()


def _wait_for_others(joined: cluster.Cluster) -> None:
    """Let other ranks of the machine end, and planners remove what they wrote down, if the cluster ends with this."""
    deadline = time.monotonic() + _LEAVING_S
    while joined.has_others:
        if time.monotonic() > deadline:
            logger.warning(
                "ray: rank 0 ends, and the Ray cluster that it runs, though other ranks were still there %g s after"
                " it was done; their loaders raise LoaderStopped",
                _LEAVING_S,
            )
            return
        time.sleep(_LOOK_S)
    if joined.ends_here:
        with suppress(Exception):  # nothing answers any more
            while time.monotonic() < deadline and any(job.has(PLANNER) for job in _jobs.values()):
                time.sleep(_LOOK_S)


def _layout(mixture: Mixture) -> Layout:
    """The loaders that a job begins with."""
    options, count = mixture.ray, len(mixture.names)
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    cpus = sum(node["Resources"].get("CPU", 0) for node in nodes if node["Alive"])
    spare = max(1, int(cpus) // 2)
    weights = mixture.weights_at(0, tokens=0, epochs=[0] * count)
    return deal(weights, options.loaders or spare, options.shadows)


def _beat(seat: _Seat, left: threading.Event, stats: weakref.WeakMethod[Callable[[], ClientStats]]) -> None:
    """Tell the constructor, again and again, that the rank is there, and how it is."""
    while not left.wait(ALIVE_EVERY_S):
        try:
            constructor = seat.job.find(seat.job.constructor(seat.node))
            constructor.alive.remote(seat.client, _numbers(stats), seat.job.digest)
        except Exception:  # it is being made anew, or everything ends
            continue


def _numbers(stats: weakref.WeakMethod[Callable[[], ClientStats]]) -> ClientStats | None:
    """How the rank is; in a call of its own, so that nothing keeps the loader alive between two of them."""
    now = stats()
    with suppress(Exception):  # that it is there counts for more
        return now() if now is not None else None
    return None
