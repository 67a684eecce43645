"""A rank's seat in a job whose roles are actors."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from omniload.identity import Identity
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
from omniload.runtime.ray.loaders import RemoteSources, make_loader
from omniload.runtime.ray.planner import ALIVE_EVERY_S, PlannerActor
from omniload.runtime.ray.runtime import RayRuntime

logger = logging.getLogger(__name__)

_LEAVING_S = 20.0
"""How long a process that ends waits for its job's actors to end, or, if it runs the cluster, for the other ranks."""


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
        name = cluster.job_name(options.job)
        self._started = cluster.join(options, name, settings.timeout_s)
        self._node: str = ray.get_runtime_context().get_node_id()
        self._lanes = tuple(place.lanes_of(mixture))
        self._client = f"{place.dp_rank}/{os.environ.get('RANK', uuid.uuid4().hex[:8])}"
        self._settings = settings
        self._job = Job(
            name=name,
            mixture=mixture,
            settings=settings,
            layout=_layout(mixture),
            log=options.log or str(job_dir(name) / "plans"),
            slow_s=options.slow_s,
            loader_options={"num_cpus": options.loader_cpus, "resources": dict(options.resources)},
            import_path=tuple(entry or str(Path.cwd()) for entry in sys.path),
        )
        self._sources = RemoteSources(self._job, self.make)
        self._urls: list[list[str]] | None = None
        self._joined = False
        self._heart = threading.Event()
        self._ending = weakref.finalize(self, _leave, self._job, self._client, self._node, self._started)
        self._join()
        self._urls = self._sources.urls()

    def identity(self) -> Identity:
        """Digests of everything the stream depends on."""
        return Identity.of(self._job.mixture, self._sources.digests(), self._settings.split)

    def urls(self, source: int) -> list[str]:
        """The files of a source."""
        assert self._urls is not None, "asked for when the job was joined"
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
        return RayRuntime(self._job, self._node, self._client, self._lanes, state, self.make)

    def close(self) -> None:
        """Leave the job; the last one ends its actors."""
        if self._joined:
            self._joined = False
            self._heart.set()
            _tell_leave(self._job, self._client, self._node)

    def make(self) -> None:
        """Make the actors of the job that are not there."""
        job = self._job
        common = {"namespace": job.namespace, "lifetime": "detached", "get_if_exists": True}
        for loader in job.layout.loaders:
            make_loader(job, loader)
        core = {"max_restarts": -1, "num_cpus": 0, "max_concurrency": 10_000, **common}
        ray.remote(PlannerActor).options(name=PLANNER, **core).remote(job)
        here = NodeAffinitySchedulingStrategy(self._node, soft=False)
        ray.remote(ConstructorActor).options(
            name=job.constructor(self._node), scheduling_strategy=here, **core
        ).remote(job, self._node)

    def _join(self) -> None:
        if self._joined:
            return
        self.make()
        seat = self._job.constructor(self._node)
        ask(
            lambda: self._job.find(seat).alive.remote(self._client),
            self._settings.timeout_s,
            "the constructor",
            "joining the job",
            self.make,
        )
        self._heart = threading.Event()
        threading.Thread(
            target=_beat,
            args=(self._job, self._client, self._node, self._heart, self._stats),
            name="omniload-alive",
            daemon=True,
        ).start()
        self._joined = True


def _layout(mixture: Mixture) -> Layout:
    """The loaders that a job begins with."""
    options, count = mixture.ray, len(mixture.names)
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    cpus = sum(node["Resources"].get("CPU", 0) for node in nodes if node["Alive"])
    spare = max(1, int(cpus) // 2)
    weights = mixture.weights_at(0, tokens=0, epochs=[0] * count)
    return deal(weights, options.loaders or spare, options.shadows)


def _beat(
    job: Job,
    client: str,
    node: str,
    stop: threading.Event,
    stats: weakref.WeakMethod[Callable[[], ClientStats]],
) -> None:
    """Tell the constructor, again and again, that the rank is there, and how it is."""
    while not stop.wait(ALIVE_EVERY_S):
        now = stats()
        try:
            job.find(job.constructor(node)).alive.remote(client, now() if now is not None else None)
        except Exception:  # it is being made anew, or everything ends
            continue


def _tell_leave(job: Job, client: str, node: str) -> None:
    try:
        ray.get(job.find(job.constructor(node)).leave.remote(client), timeout=_LEAVING_S)
    except Exception as error:  # what is left, the planner ends when nobody has been heard for a while
        logger.info("job %s: %s left without being heard: %s", job.name, client, error)


def _leave(job: Job, client: str, node: str, started: bool) -> None:
    """When the loader goes, or the process ends: leave, and end the cluster if it was started for the job."""
    if not ray.is_initialized():
        return
    _tell_leave(job, client, node)
    if started:
        deadline = time.monotonic() + _LEAVING_S
        while time.monotonic() < deadline and _exists(job):
            time.sleep(0.05)
        ray.shutdown()


def _exists(job: Job) -> bool:
    try:
        job.find(PLANNER)
    except Exception:
        return False
    return True
