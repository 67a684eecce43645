"""The numbers of a job as Prometheus metrics: what each is called, and how to read it.

All have the label ``job_name`` (``job`` is Prometheus's own). Quantiles are over the last calls, not since the last
scrape. Of actors, sources and clients, the first `MAX_SERIES` each, by name or rank, are told of one by one;
how many are left out is a metric, too. Process numbers are no labels, since each restart would begin new series.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Generic, Literal, TypeAlias, TypeVar

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from omniload.observing.stats import ActorStats, ClientStats, JobStats, SourceStats

MAX_SERIES: Final = 1024
"""Actors, sources and clients, each, that are told of one by one."""

JOB_LABEL: Final = "job_name"

Kind: TypeAlias = Literal["gauge", "counter"]
Sample: TypeAlias = tuple[tuple[str, ...], float]
"""Values of the labels, and the value."""

_T = TypeVar("_T")
_Labelled: TypeAlias = Iterable[tuple[tuple[str, ...], _T]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """One metric."""

    name: str
    """As Prometheus knows it, with its unit, and ``_total`` if it is a counter."""
    kind: Kind
    """A counter only grows while what it counts lives."""
    help: str
    """What it is, and how to read it."""
    labels: tuple[str, ...]
    """Besides `JOB_LABEL`."""
    samples: Callable[[JobStats], Iterable[Sample]]
    """What to export of the numbers of a job; nan is left out."""


@dataclass(frozen=True, slots=True)
class _Scope(Generic[_T]):
    """What metrics are about: the job itself, or each of its parts of one kind."""

    labels: tuple[str, ...]
    things: Callable[[JobStats], _Labelled[_T]]

    def gauge(self, name: str, about: str, value: Callable[[_T], float]) -> Metric:
        return self._metric(name, "gauge", about, value)

    def counter(self, name: str, about: str, value: Callable[[_T], float]) -> Metric:
        return self._metric(name, "counter", about, value)

    def milliseconds(self, name: str, about: str, **quantiles: Callable[[_T], float]) -> Metric:
        """Seconds, of quantiles in milliseconds: ``p50=…, p99=…``."""

        def samples(job: JobStats) -> Iterator[Sample]:
            for labels, thing in self.things(job):
                for quantile, value in quantiles.items():
                    yield (*labels, _QUANTILES[quantile]), value(thing) / 1e3

        return Metric(name=name, kind="gauge", help=about, labels=(*self.labels, "quantile"), samples=samples)

    def _metric(self, name: str, kind: Kind, about: str, value: Callable[[_T], float]) -> Metric:
        def samples(job: JobStats) -> Iterator[Sample]:
            return ((labels, value(thing)) for labels, thing in self.things(job))

        return Metric(name=name, kind=kind, help=about, labels=self.labels, samples=samples)


_QUANTILES: Final = {"p50": "0.5", "p99": "0.99"}


def _actors(job: JobStats) -> _Labelled[ActorStats]:
    return [((one.name, one.role), one) for one in sorted(job.actors, key=lambda one: one.name)[:MAX_SERIES]]


def _sources(job: JobStats) -> _Labelled[SourceStats]:
    return [((one.name,), one) for one in sorted(job.sources, key=lambda one: one.name)[:MAX_SERIES]]


def _clients(job: JobStats) -> _Labelled[ClientStats]:
    return [((str(one.rank),), one) for one in sorted(job.clients, key=lambda one: one.rank)[:MAX_SERIES]]


def _left_out(job: JobStats) -> _Labelled[int]:
    parts = {"actor": job.actors, "source": job.sources, "client": job.clients}
    return [((kind,), max(0, len(things) - MAX_SERIES)) for kind, things in parts.items()]


_JOB: Final[_Scope[JobStats]] = _Scope((), lambda job: [((), job)])
_ACTOR: Final[_Scope[ActorStats]] = _Scope(("actor", "role"), _actors)
_SOURCE: Final[_Scope[SourceStats]] = _Scope(("source",), _sources)
_CLIENT: Final[_Scope[ClientStats]] = _Scope(("rank",), _clients)
_LEFT_OUT: Final[_Scope[int]] = _Scope(("kind",), _left_out)

STEP: Final = _JOB.gauge("omniload_step", "Last step that every rank was given.", lambda job: job.step)
UPDATED: Final = _JOB.gauge(
    "omniload_stats_timestamp_seconds",
    "Unix time of the numbers. More than 30 s ago: the job hangs, or is no more.",
    lambda job: job.at,
)
PLAN: Final = _JOB.milliseconds(
    "omniload_plan_seconds",
    "Time to plan a step. It has to stay below the duration of a step.",
    p50=lambda job: job.plan_p50_ms,
    p99=lambda job: job.plan_p99_ms,
)
IMBALANCE: Final = _JOB.gauge(
    "omniload_imbalance_ratio",
    "Cost of the costliest rank over the mean. 1 is even; 1.2 wastes a sixth of the ranks' time.",
    lambda job: job.imbalance,
)
OBJECT_STORE: Final = _JOB.gauge(
    "omniload_object_store_bytes",
    "Shared memory of payload on its way, over all nodes. Growing without end: somebody keeps steps.",
    lambda job: job.object_store_bytes,
)
LEFT_OUT: Final = _LEFT_OUT.gauge(
    "omniload_series_left_out",
    f"Actors, sources and clients beyond the first {MAX_SERIES:,} of each kind, of which no series tell.",
    lambda count: count,
)

QUEUE: Final = _ACTOR.gauge(
    "omniload_queue_bytes",
    "Prepared payload that waits at an actor to be fetched. Near 0 at a loader: it is the bottleneck.",
    lambda actor: actor.queue_bytes,
)
RESIDENT: Final = _ACTOR.gauge(
    "omniload_actor_resident_bytes",
    "Resident memory of an actor's process; what it shares with others counts fully. It should be flat.",
    lambda actor: actor.rss_bytes,
)
RESTARTS: Final = _ACTOR.counter(
    "omniload_actor_restarts_total",
    "How often an actor was started again after a failure. Growing: look into the event log.",
    lambda actor: actor.restarts,
)
CALLS: Final = _ACTOR.counter(
    "omniload_actor_calls_total", "Requests that an actor answered.", lambda actor: actor.calls
)
BUSY: Final = _ACTOR.counter(
    "omniload_actor_busy_seconds_total",
    "Time that an actor spent on answering. A rate near 1: the actor is the bottleneck.",
    lambda actor: actor.busy_s,
)
ACTOR_FETCH: Final = _ACTOR.milliseconds(
    "omniload_actor_fetch_seconds",
    "Time that an actor waited for what it fetches: a loader for its store, a constructor for payload.",
    p50=lambda actor: actor.fetch_p50_ms,
    p99=lambda actor: actor.fetch_p99_ms,
)
STALE_ANSWERS: Final = _ACTOR.counter(
    "omniload_actor_stale_answers_total",
    "Answers refused because their lease had moved. Growing: a loader is slow and was given up.",
    lambda actor: actor.stale_answers,
)
SHADOW: Final = _ACTOR.gauge(
    "omniload_actor_shadow",
    "1 for an actor that only stands by for another, else 0.",
    lambda actor: actor.shadow,
)

EMITTED: Final = _SOURCE.counter(
    "omniload_source_emitted_tokens_total",
    "Tokens of a source handed out since the stream began.",
    lambda source: source.emitted_tokens,
)
DECLARED: Final = _SOURCE.gauge(
    "omniload_source_declared_ratio",
    "Share of the stream that the mixture gives a source.",
    lambda source: source.declared_ratio,
)
REALISED: Final = _SOURCE.gauge(
    "omniload_source_realised_ratio",
    "Share of the stream that a source had so far. Away from the declared one after the first steps: it ran out.",
    lambda source: source.realised_ratio,
)
FAILURES: Final = _SOURCE.counter(
    "omniload_source_failures_total",
    "Rows of a source in quarantine.",
    lambda source: source.failures,
)

STALL: Final = _CLIENT.milliseconds(
    "omniload_loader_stall_seconds",
    "Time that a rank waited for a step. Near 0: the loader keeps up. Near the duration of a step: it does not.",
    p50=lambda client: client.stall_p50_ms,
    p99=lambda client: client.stall_p99_ms,
)
CLIENT_FETCH: Final = _CLIENT.milliseconds(
    "omniload_client_fetch_seconds",
    "Time from asking for a step to having it. Far above the stall is fine: training hides it.",
    p50=lambda client: client.fetch_p50_ms,
)
CLIENT_STEP: Final = _CLIENT.gauge(
    "omniload_client_step", "Step that a rank trains on.", lambda client: client.step
)
CLIENT_QUEUE_STEPS: Final = _CLIENT.gauge(
    "omniload_client_queue_steps",
    "Steps held ready for a rank. 0 all the time: the loader is the bottleneck.",
    lambda client: client.queue_steps,
)
CLIENT_QUEUE: Final = _CLIENT.gauge(
    "omniload_client_queue_bytes",
    "Bytes of the steps held ready for a rank.",
    lambda client: client.queue_bytes,
)
TOKENS: Final = _CLIENT.gauge(
    "omniload_client_tokens_per_second",
    "Tokens yielded to a rank. Ranks that share lanes each count them.",
    lambda client: client.tokens_per_s,
)

METRICS: Final = (
    *(STEP, UPDATED, PLAN, IMBALANCE, OBJECT_STORE, LEFT_OUT),
    *(QUEUE, RESIDENT, RESTARTS, CALLS, BUSY, ACTOR_FETCH, STALE_ANSWERS, SHADOW),
    *(EMITTED, DECLARED, REALISED, FAILURES),
    *(STALL, CLIENT_FETCH, CLIENT_STEP, CLIENT_QUEUE_STEPS, CLIENT_QUEUE, TOKENS),
)
"""All metrics: of the job, its actors, its sources, its clients."""


class JobCollector(Collector):
    """Gives the numbers of a job to a registry of ``prometheus_client``.

    Args:
        stats: called for each scrape, maybe by several threads; None as long as there are no numbers.
    """

    def __init__(self, stats: Callable[[], JobStats | None]) -> None:
        self._stats = stats

    def describe(self) -> list[GaugeMetricFamily | CounterMetricFamily]:
        """The metrics without values, by which a registry refuses names that it has already."""
        return [_family(metric) for metric in METRICS]

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """The metrics, with what is known."""
        job = self._stats()
        if job is None:
            return
        for metric in METRICS:
            family = _family(metric)
            for labels, value in metric.samples(job):
                if not math.isnan(value):
                    family.add_metric([job.job, *labels], value)
            yield family


def _family(metric: Metric) -> GaugeMetricFamily | CounterMetricFamily:
    family = GaugeMetricFamily if metric.kind == "gauge" else CounterMetricFamily
    return family(metric.name, metric.help, labels=[JOB_LABEL, *metric.labels])
