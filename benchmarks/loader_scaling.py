"""What disaggregation, balanced planning and scaling each are worth: iteration time and loader memory, simulated."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from benchmarks.definition import Benchmark, Contender, Kind, Measure, Settings
from benchmarks.planning import loading_model
from benchmarks.planning.loading_model import CPUS, SOURCES, Outcome

_TIME, _MEMORY, _PROCESSES = "iteration", "memory, at most", "processes that read, at most"
_REFERENCE = "a loader in each rank"
_RANDOM = "benchmarks.planning.strategies:random_order"
_MILLION = 1_000_000

_WAYS: dict[str, tuple[Kind, str | None, Callable[[Sequence[loading_model.Step]], Outcome]]] = {
    _REFERENCE: (Kind.PEER, _RANDOM, loading_model.in_each_rank),
    "disaggregated, one actor each": (
        Kind.OURS,
        _RANDOM,
        functools.partial(loading_model.alike, actors_each=1),
    ),
    "disaggregated, as many each": (Kind.OURS, _RANDOM, loading_model.alike),
    "+ balanced planning": (Kind.OURS, None, loading_model.alike),
    "+ auto-partitioning": (Kind.OURS, None, functools.partial(loading_model.scaled, follow=False)),
    "+ scaling": (Kind.OURS, None, functools.partial(loading_model.scaled, follow=True)),
    "nothing is waited for": (Kind.FLOOR, None, loading_model.even),
}
"""By name: its kind, the strategy in place of balancing, and what happens."""
_VALUES: dict[str, Callable[[Outcome], float]] = {
    _TIME: lambda outcome: _MILLION * outcome.iteration_s,
    _MEMORY: lambda outcome: outcome.memory_bytes,
    _PROCESSES: lambda outcome: outcome.num_actors,
}


@functools.cache
def _outcome(way: str, num_steps: int, number: int) -> Outcome:
    _, strategy, load = _WAYS[way]
    return load(loading_model.steps_of(number, num_steps, strategy))


@contextmanager
def _contenders(settings: Settings) -> Iterator[Sequence[Contender]]:
    num_steps = settings.sized(160, 24)

    def contender(measure: str, way: str) -> Contender:
        numbers = itertools.chain([0], itertools.count())  # nothing has to warm up
        return Contender(
            name=way,
            measure=measure,
            kind=_WAYS[way][0],
            run=lambda: round(_VALUES[measure](_outcome(way, num_steps, next(numbers)))),
        )

    yield [contender(measure, way) for measure in _VALUES for way in _WAYS]


BENCHMARK = Benchmark(
    name="loader_scaling",
    measures_what="Iteration time and loader memory by what the loader does: apart, balanced, partitioned, scaled.",
    how_to_read=(
        "Nothing is timed: a model of loading beside training is run, so the values are the same on every machine."
        " Plans, packs, lanes, costs, partitions and scaling decisions are those of the product; processor seconds per"
        " token and patch, memory per reader, and what an accelerator computes are parameters, in"
        " benchmarks/planning/loading_model.py. Each round is of other samples; the range is that over rounds."
        f"\n{len(SOURCES)} sources of text, images and videos, weights falling off inside of each kind; at half of the"
        " steps the mixture shifts from text (70 %) to images and videos (70 %). 32 accelerators (pp=4, dp=8), 64 lanes"
        f" of 8k, 12 billion parameters of decoder and 2 of encoder, {CPUS} processors for loading in every way."
        "\n'a loader in each rank': of each data-parallel rank, with two workers that have all sources open, and packs"
        " in random order; ranks of other pipeline stages are taken to have none, or it would be four times as much."
        " 'disaggregated': actors for each source, one, or as many as the source that needs most. '+ balanced"
        " planning': the latter, and packs are given to lanes by their cost. '+ auto-partitioning': actors as the first"
        " steps need them, and they stay. '+ scaling': and followed from there, looking 16 steps ahead; an actor helps"
        " 4 steps after it is started."
        "\nMemory is what readers and their processes hold, not what is prepared ahead, which is the same for all."
        " The published system's numbers are of other models, data and machines: compare directions."
    ),
    measures=(
        Measure(
            name=_TIME,
            unit="s",
            scale=_MILLION,
            higher_is_better=False,
            reference=_REFERENCE,
            timed=False,
        ),
        Measure(
            name=_MEMORY,
            unit="GiB",
            scale=1 << 30,
            higher_is_better=False,
            reference=_REFERENCE,
            timed=False,
        ),
        Measure(
            name=_PROCESSES,
            unit="",
            scale=1,
            higher_is_better=False,
            reference=_REFERENCE,
            timed=False,
        ),
    ),
    contenders=_contenders,
)
