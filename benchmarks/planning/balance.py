"""How even a job's steps come out, by the way they are packed and balanced."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Literal

import numpy as np

from benchmarks.planning import lengths
from benchmarks.planning.metadata import SyntheticMetadata, mixture
from omniload.forecasting.evenness import Evenness, least_unevenness
from omniload.placing import ClientPlaceTree
from omniload.planner import Plan, Planner, StreamState
from omniload.planner.packing import DelayReport, delay_report
from omniload.planner.rules import StepRules, piece_costs

Corpus = Literal["heavy tail", "demo"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A job whose steps are planned."""

    corpus: Corpus
    """Whose lengths."""
    context: int
    """Tokens of a pack, and of the longest document."""
    packs: int
    """Packs of a step."""
    lanes: int
    """Lanes of a step."""
    mesh: str
    """Axes of the mesh."""
    steps: int
    """Steps planned."""
    warm_up: int
    """Of them, those at the beginning that are not counted, as the queue of waiting documents is still filling."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """A way to plan a step: keys of the mixture."""

    name: str
    """What it is called."""
    keys: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """They say how; the default of the mixture holds for others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What came of it."""

    over_ranks: float
    """Cost of the costliest data-parallel rank by the mean, by the cost of attention, whatever the way went by."""
    time: float
    """Simulated 1F1B time per token, in the unit of cost."""
    even_time: float
    """The same if every lane cost the same."""
    bound: float
    """What the imbalance over ranks is at least, for the length of the largest document."""
    waited: float
    """Steps that a token waited on average, from being drawn to being served."""
    places: float
    """Places of packs of the context's size by tokens in them; 1 is no padding."""


@functools.cache
def outcome(job: Job, way: Way, number: int) -> Outcome:
    """Plan some steps.

    Args:
        job: the job.
        way: how.
        number: another draws other lengths.
    """
    spec = mixture(seq_len=job.context, packs=job.packs, lanes=job.lanes, **way.keys)
    planner = Planner(
        spec, SyntheticMetadata(draw=_draw_of(job), seq_len=job.context, seed=number), StreamState.initial(1)
    )
    planned = (planner.next() for _ in range(job.steps))
    plans = [plan for plan in planned if plan is not None and plan.step >= job.warm_up]
    rules, tree = StepRules.of(mixture(seq_len=job.context, packs=job.packs)), ClientPlaceTree.parse(job.mesh)
    steps, bounds, even = [], [], 0.0
    for plan in plans:
        cost = piece_costs(rules.cost, plan.pieces)
        of_lane = np.add.reduceat(cost, plan.offsets[plan.lane_offsets[:-1]], axis=1)
        steps.append(Evenness.of_step(of_lane, tree))
        even += Evenness.of_step(np.full_like(of_lane, of_lane.mean()), tree).time
        bounds.append(least_unevenness(cost, tree.dp_size))
    evenness, tokens = Evenness.of_steps(steps), sum(map(_tokens, plans))
    return Outcome(
        over_ranks=evenness.over_ranks,
        time=evenness.time / tokens,
        even_time=even / tokens,
        bound=fmean(bounds),
        waited=sum(_delay(plan).token_steps for plan in plans) / tokens,
        places=job.context * sum(plan.num_packs for plan in plans) / tokens,
    )


def _draw_of(job: Job) -> Any:
    def draw(generator: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        if job.corpus == "demo":
            drawn = lengths.resampled(generator, lengths.cut(lengths.demo_lengths(), job.context), count)
        else:
            drawn = lengths.heavy_tailed(generator, count, job.context)
        return drawn, np.zeros(count, np.int64)

    return draw


def _tokens(plan: Plan) -> int:
    return int(plan.pieces["length"].sum(dtype=np.int64))


def _delay(plan: Plan) -> DelayReport:
    return delay_report(plan.pieces["length"], plan.pieces["born"], step=plan.step)
