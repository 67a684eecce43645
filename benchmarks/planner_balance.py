"""How even ranks are and how little is padding, by the way of packing and balancing: ratios that no machine changes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from benchmarks.definition import Benchmark, Contender, Kind, Measure, Settings
from benchmarks.planning import lengths, multimodal
from benchmarks.planning.balance import Corpus, Job, Outcome, Way, outcome
from benchmarks.planning.bound import fewest_packs
from omniload.planner.packing import best_fit_decreasing, default_thresholds, first_fit_decreasing

_MILLION = 1_000_000
_MESH, _LANES = "pp=4,dp=8", 64
_STEP_TOKENS = 1 << 23
_CONTEXTS = {"4k": 4096, "16k": 16_384, "32k": 32_768, "128k": 131_072}
_CORPORA: tuple[Corpus, ...] = ("heavy tail", "demo")
_RANDOM = "benchmarks.planning.strategies:random_order"
_TOKENS = "benchmarks.planning.strategies:by_tokens"

_REFERENCE = "random order"
_WAYS = (
    Way(name=_REFERENCE, keys={"strategy": _RANDOM}),
    Way(name="token count", keys={"strategy": _TOKENS}),
    *(Way(name=name, keys={"balance": name}) for name in ("lpt", "kk", "bucketed", "hybrid", "two_level")),
    Way(name="workload packing", keys={"packing": "workload"}),
)
"""The first two are what people do."""


def _delayed(context: int, max_steps: int) -> Way:
    delay = {"thresholds": list(default_thresholds(context)), "max_steps": max_steps}
    return Way(
        name=f"workload packing, delay up to {max_steps}", keys={"packing": "workload", "delay": delay}
    )


_DELAYS = (4, 8, 16)
_DELAYED = _delayed(_CONTEXTS["128k"], _DELAYS[-1]).name

_SERVED = "steps until a token is served, heavy tail, 128k"

_VLM_CONTEXTS = {"4k": 4096, "8k": 8192, "16k": 16_384}
_VLM_REFERENCE = "random order, encoder beside"
_VLM_WAYS = (
    multimodal.Way(name=_VLM_REFERENCE, strategy=_RANDOM, spread=False),
    multimodal.Way(name="lpt, encoder beside", strategy=None, spread=False),
    multimodal.Way(name="hybrid, encoder beside", strategy=None, balance="hybrid", spread=False),
    multimodal.Way(name="random order, encoder spread", strategy=_RANDOM, spread=True),
    multimodal.Way(name="lpt, encoder spread", strategy=None, spread=True),
)
_VLM_CORPORA = (multimodal.IMAGES, multimodal.CLIPS)

_PACKERS = {"best_fit": best_fit_decreasing, "first_fit": first_fit_decreasing}
_PADDED = ("concatenate", "best_fit", "first_fit")
_DEMO_PADDING = "padding, demo, 64 packs of 8k"


def _kind(name: str) -> Kind:
    return Kind.PEER if name.startswith((_REFERENCE, "token count", "concatenate")) else Kind.OURS


def _contender(
    measure: str, name: str, kind: Kind, value: Callable[[int], float], *, scale: int = _MILLION
) -> Contender:
    """Who shows ``value(n)`` in round n: every round is of other lengths, the same ones for all contenders."""
    numbers = itertools.chain([0], itertools.count())  # nothing has to warm up
    return Contender(name=name, measure=measure, kind=kind, run=lambda: round(scale * value(next(numbers))))


def _of(
    measure: str, job: Job, way: Way, value: Callable[[Outcome], float], kind: Kind, name: str
) -> Contender:
    return _contender(measure, name, kind, lambda number: value(outcome(job, way, number)))


def _text(settings: Settings) -> Iterator[Contender]:
    """Imbalance and time, by corpus and context; at 128k what waiting for each other brings besides."""
    for corpus, (label, context) in itertools.product(_CORPORA, _CONTEXTS.items()):
        long = label == "128k" and corpus == "heavy tail"
        steps = settings.sized(48 if long else 6, 4)
        job = Job(
            corpus=corpus,
            context=context,
            packs=max(_LANES, settings.sized(_STEP_TOKENS, _STEP_TOKENS >> 3) // context),
            lanes=_LANES,
            mesh=_MESH,
            steps=steps,
            warm_up=steps // 2,
        )
        ways = (*_WAYS, *(_delayed(context, max_steps) for max_steps in _DELAYS)) if long else _WAYS
        for way in ways:
            kind = _kind(way.name)
            yield _of(f"imbalance, {corpus}, {label}", job, way, lambda o: o.over_ranks, kind, way.name)
            yield _of(f"1F1B time, {corpus}, {label}", job, way, lambda o: o.time, kind, way.name)
        for measure, name, value in (
            ("imbalance", "largest document by mean", lambda o: o.bound),
            ("1F1B time", "every lane alike", lambda o: o.even_time),
        ):
            yield _of(f"{measure}, {corpus}, {label}", job, ways[-1], value, Kind.FLOOR, name)
        if long:
            for way in ways[-len(_DELAYS) :]:
                yield _of(_SERVED, job, way, lambda o: 1 + o.waited, Kind.OURS, way.name)


def _vision(settings: Settings) -> Iterator[Contender]:
    steps = settings.sized(6, 2)
    for corpus, (label, context), way in itertools.product(_VLM_CORPORA, _VLM_CONTEXTS.items(), _VLM_WAYS):
        yield _contender(
            f"step time, {corpus.name}, {label}",
            way.name,
            _kind(way.name),
            functools.partial(multimodal.time_per_token, corpus, way, context, steps),
        )


def _padding(settings: Settings) -> Iterator[Contender]:
    steps = settings.sized(24, 4)
    demo = Job(corpus="demo", context=8192, packs=64, lanes=16, mesh="dp=8", steps=steps, warm_up=steps // 2)
    for name in _PADDED:
        way = Way(name=name, keys={"packing": name})
        yield _of(_DEMO_PADDING, demo, way, lambda o: o.places, _kind(name), name)
    count = settings.sized(65_536, 4096)
    for label, context in _CONTEXTS.items():
        measure = f"padding, heavy tail, all at once, {label}"

        def packed(packer: str, number: int, context: int = context) -> float:
            length = lengths.heavy_tailed(np.random.default_rng([number, context]), count, context)
            if packer == "no packing has less":
                num_packs = fewest_packs(length, context)
            else:
                num_packs = int(_PACKERS[packer](length, context)[1].max()) + 1
            return num_packs * context / float(length.sum())

        yield _contender(
            measure, "no packing has less", Kind.FLOOR, functools.partial(packed, "no packing has less")
        )
        for packer in _PACKERS:
            yield _contender(measure, packer, Kind.OURS, functools.partial(packed, packer))


@contextmanager
def _contenders(settings: Settings) -> Iterator[Sequence[Contender]]:
    yield [*_text(settings), *_vision(settings), *_padding(settings)]


def _quantity(name: str, unit: str, reference: str) -> Measure:
    return Measure(
        name=name, unit=unit, scale=_MILLION, higher_is_better=False, reference=reference, timed=False
    )


BENCHMARK = Benchmark(
    name="planner_balance",
    measures_what="How even the ranks of a job are, what that is worth in time, and how much is padding.",
    how_to_read=(
        "Nothing is timed: costs are computed from lengths and times simulated from costs, so the values are the same"
        " on every machine. Each round is of other lengths; the range is that over rounds. The first two contenders are"
        " what people do: the packs of best fit in an order that knows nothing of them, or evened out by tokens."
        "\nImbalance is the cost of the costliest of 8 data-parallel ranks by the mean, by the quadratic cost of"
        " attention, for 64 lanes and 8 M tokens a step; time is that of 1F1B on 4 stages. 'heavy tail' is log-normal"
        " (median 600, sigma 1.2) with 3 % of a Pareto tail (index 1, from 4,096), cut to the context; 'demo' is the"
        " lengths of the demo's data, drawn with replacement and split at the context. A token is served in the step"
        " that draws it, which counts 1, or later; the mean is over tokens."
        "\nStep time is of 64 ranks (pp=4, dp=16) with 8 packs of the context for each pipeline and 12 billion"
        " parameters of decoder. The 2 billion of encoder are beside the lanes, as a part of their pipeline's first"
        " stage, or spread over all ranks; 'images' are several of usual size a sample, 'clips' one of any size,"
        " encoded whole."
        " The published system reports 1.71, 2.63 and 3.09 times the speed of an unbalanced baseline at 4k, 8k and 16k,"
        " for models, data and a baseline of its own: compare directions, not digits."
        "\nPadding is places of packs by tokens in them."
    ),
    measures=(
        *(
            _quantity(f"{what}, {corpus}, {label}", unit, _REFERENCE)
            for corpus, label in itertools.product(_CORPORA, _CONTEXTS)
            for what, unit in (("imbalance", "largest by mean"), ("1F1B time", "cost per token"))
        ),
        _quantity(_SERVED, "steps, 1 without waiting", _DELAYED),
        *(
            _quantity(f"step time, {corpus.name}, {label}", "cost per token", _VLM_REFERENCE)
            for corpus, label in itertools.product(_VLM_CORPORA, _VLM_CONTEXTS)
        ),
        _quantity(_DEMO_PADDING, "places per token", "best_fit"),
        *(
            _quantity(f"padding, heavy tail, all at once, {label}", "places per token", "no packing has less")
            for label in _CONTEXTS
        ),
    ),
    contenders=_contenders,
)
