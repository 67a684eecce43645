"""What a stream will ask of each source: its share by the weights in force, and the largest in the steps to come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omniload.mixture import Mixture
from omniload.planner.state import StreamState
from omniload.scaling.profile import SourceProfile


@dataclass(frozen=True, kw_only=True, slots=True)
class Outlook:
    """Shares of the stream's tokens, by source."""

    now: Mapping[str, float]
    """In the next step; they add up to 1, or are all 0 if the stream is over."""
    ahead: Mapping[str, float]
    """The largest of each in the next step and those to come; who keeps up with these grows before a shift, and lets go
    after it."""


def step_tokens(mixture: Mixture) -> int:
    """Tokens of a step of a mixture, at most."""
    if mixture.packs is None:
        return mixture.lanes * mixture.lane_budget
    return mixture.packs * mixture.seq_len


def outlook(
    mixture: Mixture, state: StreamState, profiles: Sequence[SourceProfile], *, steps: int
) -> Outlook:
    """Look ahead on the schedule, and on what is decided about steps to come.

    A schedule by tokens is followed at `step_tokens` a step. One by epochs is not foreseen: its shares are those of now
    until it shifts. Exhausted sources have none. What ``max_fraction`` moves to other sources is not counted here; it
    shows in what is served.

    Args:
        mixture: the mixture.
        state: the stream before its next step.
        profiles: of all sources; of interest where weights are shares of samples.
        steps: how far to look beyond the next step; as many as the start of a reader takes, and some more.
    """
    # Between two stages no share has its largest: they stay, or go from one to the other.
    tokens = sum(source.emitted_tokens for source in state.sources)
    per_step = step_tokens(mixture)
    shifts = {0, steps} | {decision.step - state.step for decision in state.decisions}
    for stage in mixture.schedule:
        if stage.step is not None:
            shifts.add(stage.step - state.step)
        elif stage.tokens is not None:
            shifts.add(-((tokens - stage.tokens) // per_step))
    per_sample = {profile.name: profile.tokens_per_sample for profile in profiles}
    unit = [per_sample[name] if mixture.unit == "samples" else 1.0 for name in mixture.names]
    outlooks = [
        _shares(_weights(mixture, state, ahead, tokens + ahead * per_step), unit, state)
        for ahead in sorted(shifts)
        if 0 <= ahead <= steps
    ]
    return Outlook(
        now=dict(zip(mixture.names, outlooks[0], strict=True)),
        ahead=dict(zip(mixture.names, map(max, zip(*outlooks, strict=True)), strict=True)),
    )


def _weights(mixture: Mixture, state: StreamState, ahead: int, tokens: int) -> Sequence[Any]:
    """Weights in force so many steps ahead."""
    epochs = [
        mixture.sources[name].repeat if source.exhausted else source.cursor.epoch
        for name, source in zip(mixture.names, state.sources, strict=True)
    ]
    scheduled = mixture.weights_at(state.step + ahead, tokens=tokens, epochs=epochs)
    due = [decision for decision in state.decisions if decision.step <= state.step + ahead]
    return state.decided.after(due, mixture.names, scheduled).weights or scheduled


def _shares(weights: Sequence[Any], unit: Sequence[float], state: StreamState) -> list[float]:
    amounts = [
        0.0 if source.exhausted else float(weight) * of_unit
        for weight, of_unit, source in zip(weights, unit, state.sources, strict=True)
    ]
    total = sum(amounts)
    return [amount / total if total else 0.0 for amount in amounts]
