"""What a mixture will do to a run, from its plans alone: who runs out, how much is padding, how even the ranks are.

Everything here is computed after the plans, for people to read; no plan depends on it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Self

import numpy as np

from omniload.forecasting.dry_run import DryRun
from omniload.forecasting.evenness import Evenness, least_unevenness, ways_to_balance
from omniload.mixture import ROWS_OF_ANY_LENGTH, Mixture
from omniload.placing import ClientPlaceTree
from omniload.planner import StreamState
from omniload.planner.packing import delay_report
from omniload.planner.rules import StepRules, piece_costs
from omniload.planner.state import scheduled_weights

DRIFT = 0.01
"""A source whose realised share is off by more is worth a remark."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceForecast:
    """What becomes of one source."""

    name: str
    """Its name."""
    declared: float
    """Its share by the weights in force, averaged over the steps."""
    realised: float
    """Its share of the tokens drawn, or of the samples if the weights are of samples."""
    tokens: int
    """Tokens drawn."""
    samples: int
    """Samples drawn."""
    epochs: float | None
    """Passes over it since the beginning of the stream, by an estimate that is exact after the first; None if that
    cannot be told."""
    runs_out_at: int | None
    """The step that gets its last sample: observed, or predicted at the pace of these steps; None if it has no end."""
    ran_out: bool
    """Whether it was observed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """A dry run in numbers."""

    first_step: int
    """The step it began with."""
    num_steps: int
    """Steps planned."""
    ended: bool
    """Whether the stream ended there for want of data."""
    tokens: int
    """Tokens in the steps."""
    places: int
    """Tokens that their rows have room for: what is more is padding."""
    sources: tuple[SourceForecast, ...]
    """In the order of `Mixture.names`."""
    ways: Mapping[str, Evenness]
    """By the way in which packs are given to lanes; ``as planned`` is the mixture's own."""
    bound: float
    """The least that the imbalance over ranks can be on average, as no document is cut in balancing: the cost of the
    largest one by what a rank has to do on average, or 1."""
    mean_token_delay: float
    """Steps that a token waited on average, from being drawn to being served."""
    longest_delay: int
    """Steps that the last document waited."""
    remarks: tuple[str, ...]
    """What in the mixture will not come out as it is declared."""

    @property
    def padding(self) -> float:
        """Fraction of the places that hold no token."""
        return 1 - self.tokens / self.places if self.places else 0.0

    @classmethod
    def of(cls, mixture: Mixture, run: DryRun, steps: int, tree: ClientPlaceTree) -> Self:
        """Plan up to ``steps`` steps.

        Args:
            mixture: the mixture.
            run: a dry run of it.
            steps: how many.
            tree: the mesh that shall run it.

        Raises:
            PlaceError: the mesh cannot share the lanes.
            OmniloadError: a step cannot be planned.
        """
        tree.lanes_of(0, mixture.lanes)
        rules, before = StepRules.of(mixture), run.state
        evenness: dict[str, list[Evenness]] = {}
        bounds: list[float] = []
        declared = np.zeros(len(mixture.names))
        ran_out: dict[int, int] = {}
        tokens = places = waited = longest = 0
        stream = before
        for plan in itertools.islice(run.plans(), steps):
            # Those of a ramp are integers of more than 64 bits.
            weights = np.array(scheduled_weights(mixture, stream.sources, plan.step), np.float64)
            declared += weights / weights.sum()
            length = plan.pieces["length"].astype(np.int64)
            delay = delay_report(length, plan.pieces["born"], step=plan.step)
            tokens += int(length.sum())
            waited += delay.token_steps
            longest = max(longest, delay.max_delay)
            places += _places(plan.offsets, plan.lane_offsets, length, mixture)
            for name, costs in ways_to_balance(plan, rules).items():
                evenness.setdefault(name, []).append(Evenness.of_step(costs, tree))
            bounds.append(least_unevenness(piece_costs(rules.cost, plan.pieces), tree.dp_size))
            stream = run.state
            _note_exhausted(stream, plan.step, ran_out)
        _note_exhausted(run.state, run.state.step, ran_out)
        num_steps = len(bounds)
        sources = _sources(mixture, run, before, declared / max(num_steps, 1), ran_out)
        return cls(
            first_step=before.step,
            num_steps=num_steps,
            ended=run.state.ended,
            tokens=tokens,
            places=places,
            sources=sources,
            ways={name: Evenness.of_steps(of) for name, of in evenness.items()},
            bound=fmean(bounds) if bounds else 1.0,
            mean_token_delay=waited / tokens if tokens else 0.0,
            longest_delay=longest,
            remarks=_remarks(mixture, sources, before.step, mixture.steps or before.step + steps, run.state),
        )


def _note_exhausted(stream: StreamState, step: int, ran_out: dict[int, int]) -> None:
    """Note the step of the sources that gave their last sample in it."""
    for i, source in enumerate(stream.sources):
        if source.exhausted:
            ran_out.setdefault(i, step)


def _places(offsets: np.ndarray, lane_offsets: np.ndarray, length: np.ndarray, mixture: Mixture) -> int:
    """Places of the rows of a step: rows of ``seq_len`` tokens, or as long as the longest of their lane."""
    if mixture.packing not in ROWS_OF_ANY_LENGTH:
        return (len(offsets) - 1) * mixture.seq_len
    rows = np.add.reduceat(length, offsets[:-1])
    return int((np.maximum.reduceat(rows, lane_offsets[:-1]) * np.diff(lane_offsets)).sum())


def _sources(
    mixture: Mixture, run: DryRun, before: StreamState, declared: np.ndarray, ran_out: Mapping[int, int]
) -> tuple[SourceForecast, ...]:
    after = run.state
    unit = "emitted_samples" if mixture.unit == "samples" else "emitted_tokens"
    drawn = [
        getattr(new, unit) - getattr(old, unit)
        for new, old in zip(after.sources, before.sources, strict=True)
    ]
    forecasts = []
    for i, (name, new, old) in enumerate(zip(mixture.names, after.sources, before.sources, strict=True)):
        rows = run.sizes[i].rows(new.cursor)
        spec, steps = mixture.sources[name], after.step - before.step
        left = None if rows is None or spec.on_exhausted == "repeat" else spec.repeat * rows - new.rows
        pace = (new.rows - old.rows) / steps if steps else 0.0
        runs_out_at = ran_out.get(i)
        if runs_out_at is None and left is not None and pace:
            runs_out_at = after.step + max(0, int(left / pace))
        forecasts.append(
            SourceForecast(
                name=name,
                declared=float(declared[i]),
                realised=drawn[i] / max(sum(drawn), 1),
                tokens=new.emitted_tokens - old.emitted_tokens,
                samples=new.emitted_samples - old.emitted_samples,
                epochs=new.rows / rows if rows else None,
                runs_out_at=runs_out_at,
                ran_out=i in ran_out,
            )
        )
    return tuple(forecasts)


def _remarks(
    mixture: Mixture, sources: tuple[SourceForecast, ...], first: int, until: int, after: StreamState
) -> tuple[str, ...]:
    """What the user may want to change, in a run from step ``first`` to before step ``until``."""
    gone, held, drifted = [], [], []
    for source in sources:
        spec = mixture.sources[source.name]
        if source.runs_out_at is not None and source.runs_out_at < until:
            how = "gave its last sample at" if source.ran_out else "will give its last sample at about"
            does = "ends the stream" if spec.on_exhausted == "stop" else "leaves the stream to the others"
            lasting = source.declared * (source.runs_out_at - first) / (until - first)
            gone.append(
                f"source '{source.name}' {how} step {source.runs_out_at:,} of {until:,} and {does}: a share of"
                f" {lasting:.2%} would last; lower its weight, raise repeat, or set on_exhausted: repeat"
            )
        elif spec.max_fraction < source.declared:
            held.append(
                f"source '{source.name}' has a weight of {source.declared:.2%} and is held at its max_fraction of"
                f" {spec.max_fraction:.2%}; the others give the difference"
            )
        elif abs(source.realised - source.declared) > DRIFT:
            drifted.append(
                f"source '{source.name}' gave {source.realised:.2%} where {source.declared:.2%} is declared:"
                " its samples are long beside all that was drawn in these steps; plan more steps to see it even out"
            )
    if after.ended and not any(source.ran_out for source in sources):
        gone.append(f"the stream ends before step {after.step:,}: what is left does not fill its lanes")
    return (*gone, *held, *([] if gone or held else drifted))  # which explain the others' drift
