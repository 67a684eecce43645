"""One step of a very large job, planned on one core: its stages, growth, the plan's size, and messages per actor."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from benchmarks.definition import Benchmark, Contender, Kind, Measure, Settings
from benchmarks.planning.lengths import heavy_tailed
from benchmarks.planning.metadata import SyntheticMetadata, mixture
from benchmarks.planning.strategies import timed
from omniload.placing.fanout import Fanout
from omniload.planner import Planner, StreamState

_SEQ_LEN = 8192
_SAMPLES_PER_PACK = 8
_CLIENTS = (1024, 4096, 16_384)
_CLIENTS_PER_NODE = 8
_GROWTH = (1, 2, 4, 8)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A job, and how its steps are planned."""

    num_ranks: int = 4096
    """Data-parallel ranks, one lane each."""
    num_sources: int = 300
    """Sources, of weights that fall off as 1 / number."""
    samples: int = 65_536
    """Samples of a step, about."""
    balance: str = "lpt"
    """How packs are given to lanes."""
    steps: int = 20
    """Steps per run; the first two are not counted."""


def _lengths(generator: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """A heavy tail whose samples are a pack's eighth long on average."""
    lengths = heavy_tailed(generator, count, _SEQ_LEN)
    mean = _SEQ_LEN / _SAMPLES_PER_PACK
    return np.clip(lengths * mean / lengths.mean(), 16, _SEQ_LEN).astype(np.int64), np.zeros(count, np.int64)


@dataclass(kw_only=True, slots=True)
class Rounds:
    """The steps of one job, planned once a round for all contenders that show a part of them."""

    job: Job
    """The job."""
    _planned: dict[int, dict[str, list[float]]] = field(default_factory=dict)

    def times(self, number: int) -> dict[str, list[float]]:
        """Milliseconds of the steps by stage, and ``all``; bytes per sample under ``bytes``."""
        if number not in self._planned:
            self._planned[number] = _plan(self.job)
        return self._planned[number]


def _plan(job: Job) -> dict[str, list[float]]:
    num_packs = job.samples // _SAMPLES_PER_PACK
    # The lengths are made once per source, so that their making is not timed.
    metadata = SyntheticMetadata(draw=_lengths, seq_len=_SEQ_LEN, num_chunks=1)
    planner = Planner(
        mixture(
            job.num_sources,
            seq_len=_SEQ_LEN,
            packs=num_packs,
            lanes=min(job.num_ranks, num_packs),
            balance=job.balance,
            strategy="benchmarks.planning.strategies:timed",
        ),
        metadata,
        StreamState.initial(job.num_sources),
    )
    timed.clear()
    for _ in range(job.steps):
        planner.next()
    stages = {name: [1e3 * second for second in seconds[2:]] for name, seconds in timed.seconds.items()}
    # The cost of packs is timed by itself, and once more inside of balancing.
    parts = [values for name, values in stages.items() if name != "cost"]
    sizes = zip(timed.num_bytes[2:], timed.num_samples[2:], strict=True)
    return {
        **stages,
        "all": [sum(step) for step in zip(*parts, strict=True)],
        "bytes": [num_bytes / samples for num_bytes, samples in sizes],
    }


def _p50(values: Sequence[float]) -> float:
    return statistics.median(values)


def _p99(values: Sequence[float]) -> float:
    return float(np.quantile(values, 0.99))


def _shown(
    measure: str,
    name: str,
    rounds: Rounds,
    key: str,
    of: Callable[[Sequence[float]], float],
    kind: Kind = Kind.OURS,
) -> Contender:
    numbers = itertools.chain([0], itertools.count())  # the first call warms up
    return Contender(
        name=name,
        measure=measure,
        kind=kind,
        run=lambda: round(1e6 * of(rounds.times(next(numbers))[key])),
    )


def _constant(measure: str, name: str, kind: Kind, value: int) -> Contender:
    return Contender(name=name, measure=measure, kind=kind, run=lambda: value)


def _busiest(fanout: Fanout) -> int:
    return max(fanout.planner, fanout.loader, fanout.constructor, fanout.client)


@contextmanager
def _contenders(settings: Settings) -> Iterator[Sequence[Contender]]:
    samples, num_ranks = settings.sized(65_536, 2048), settings.sized(4096, 128)
    steps, num_sources = settings.sized(20, 4), settings.sized(300, 20)

    def rounds(scale: int = 1, balance: str = "lpt") -> Rounds:
        return Rounds(
            job=Job(
                num_ranks=num_ranks * scale // _GROWTH[-1],
                num_sources=num_sources,
                samples=samples * scale // _GROWTH[-1],
                balance=balance,
                steps=steps,
            )
        )

    full = rounds(_GROWTH[-1])
    kk = rounds(_GROWTH[-1], "kk")
    contenders = []
    for quantile, of in (("p50", _p50), ("p99", _p99)):
        contenders += [
            _shown(quantile, stage, full, stage, of)
            for stage in ("all", "mix", "pack", "cost", "balance", "freeze")
        ]
        contenders.append(_shown(quantile, "balance by kk", kk, "balance", of))
    contenders += [
        _shown("growth", f"{scale}x", full if scale == _GROWTH[-1] else rounds(scale), "all", _p50)
        for scale in _GROWTH
    ]
    contenders.append(_shown("plan", "bytes per sample", full, "bytes", _p50))
    for clients in _CLIENTS:
        measure = f"messages of the busiest actor, {clients:,} clients"
        bundled = Fanout.with_constructors(
            loaders=num_sources, constructors=clients // _CLIENTS_PER_NODE, clients=clients
        )
        direct = Fanout.direct(loaders=num_sources, clients=clients)
        contenders += [
            _constant(measure, "no constructors", Kind.CONTROL, _busiest(direct)),
            _constant(measure, "a constructor per node", Kind.OURS, _busiest(bundled)),
        ]
    yield contenders


def _quantity(name: str, unit: str, scale: float, reference: str) -> Measure:
    return Measure(
        name=name, unit=unit, scale=scale, higher_is_better=False, reference=reference, timed=False
    )


BENCHMARK = Benchmark(
    name="planner_scale",
    measures_what="Planning a step of 65,536 samples of 300 sources for 4,096 data-parallel ranks, on one core.",
    how_to_read=(
        "Simulated: the lengths are there already, nothing is read. A run plans some steps one after the other;"
        " p50 and p99 are over these, the median and the range over runs. 'all' is a step without what 'cost' shows"
        " apart: balancing includes it. 'freeze' is the plan, its hash and its bytes. Growth is 'all' of jobs with"
        " 1/8 to 8/8 of the ranks and samples: n log n is 2.2 per doubling at most. Messages are counted, not sent:"
        " per actor and step, with 8 clients a node."
    ),
    measures=(
        _quantity("p50", "ms", 1e6, "all"),
        _quantity("p99", "ms", 1e6, "all"),
        _quantity("growth", "ms", 1e6, "1x"),
        _quantity("plan", "bytes", 1e6, "bytes per sample"),
        *(
            _quantity(f"messages of the busiest actor, {clients:,} clients", "messages", 1, "no constructors")
            for clients in _CLIENTS
        ),
    ),
    contenders=_contenders,
)
