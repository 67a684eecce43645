"""Re-weighting by loss: the training loop reports losses by source, a rule answers with weights, and those are decided.

What the rule answered is in the log of decisions, so a replay of the log needs neither rule nor losses::

    reweighter = LossReweighter(loader, ExponentiatedGradient(min_share=0.02), every=100)
    for lanes in loader.steps():
        losses = train_on(lanes)  # mean loss of each source, the same on every rank
        reweighter.observe(lanes[0]["step"], losses)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from omniload.errors import DecisionError
from omniload.planner.decisions import SetWeights
from omniload.suggest import suggest

if TYPE_CHECKING:
    from omniload.client import MixtureLoader


class ReweightingRule(Protocol):
    """Answers losses with weights. Implemented by `ExponentiatedGradient` and by any function of this form.

    It has to be pure where several ranks call it, or to be called on one rank and its answer sent to the others.
    """

    def __call__(
        self, step: int, losses: Mapping[str, float], weights: Mapping[str, float]
    ) -> Mapping[str, float]:
        """New weights of the sources in ``weights``, relative to each other.

        Args:
            step: the step that the losses are of.
            losses: of every source that has a weight, finite and not negative.
            weights: those decided last, in force or not yet; they add up to 1.
        """


class LossReweighter:
    """Turns losses into decisions on the weights.

    It keeps no state: after a resume it goes on as it would have. Call `observe` before the loader's state is saved,
    and the state has the decision.

    Args:
        loader: whose weights are decided on.
        rule: what to answer.
        every: steps from one decision to the next; each one adds a number per source to the loader's state.
        delay_steps: from the step observed to the first one mixed by the answer; by default `Control.delay_steps`,
            which is enough if `observe` is called before the next step is asked for.

    Raises:
        ValueError: ``every`` or ``delay_steps`` is too small.
    """

    def __init__(
        self,
        loader: MixtureLoader,
        rule: ReweightingRule,
        *,
        every: int,
        delay_steps: int | None = None,
    ) -> None:
        least = loader.control.delay_steps
        if every < 1:
            raise ValueError(f"every: {every} must be at least 1")
        if delay_steps is not None and delay_steps < least:
            raise ValueError(f"delay_steps: {delay_steps} is below {least}, the steps that are planned ahead")
        self._loader = loader
        self._rule = rule
        self._every = every
        self._delay_steps = least if delay_steps is None else delay_steps

    def observe(self, step: int, losses: Mapping[str, float]) -> SetWeights | None:
        """Report the losses of a step; after every so many, its weights are decided on.

        Args:
            step: the step just trained on.
            losses: mean loss of each source, the same on every rank; for a source that had no token in the step, the
                loss it had last.

        Returns:
            The decision, if one was due.

        Raises:
            DecisionError: a loss is missing, unknown, negative or not finite; or the rule's answer is no weights.
        """
        weights = self._weights()
        losses = _checked(losses, weights)
        if (step + 1) % self._every:
            return None
        answer = self._rule(step, losses, weights)
        if not isinstance(answer, Mapping) or answer.keys() != weights.keys():
            raise DecisionError(
                f"the re-weighting rule has to answer with a weight of each of {', '.join(weights)}, and answered"
                f" {answer!r}"
            )
        return self._loader.control.set_weights(dict(answer), at_step=step + self._delay_steps)

    def _weights(self) -> dict[str, float]:
        """Shares of all sources: those decided last, or else those in force."""
        names = self._loader.mixture.names
        decided = [one.weights for one in self._loader.control.log if isinstance(one, SetWeights)]
        if decided and decided[-1] is not None and decided[-1].keys() == set(names):
            weights = decided[-1]
        else:
            ledger = self._loader.ledger()
            weights = {name: ledger.sources[name].weight for name in names}
        total = math.fsum(weights.values())
        return {name: weights[name] / total for name in names}


@dataclass(frozen=True, kw_only=True, slots=True)
class ExponentiatedGradient:
    """More of what is learnt worst: each weight times ``exp(rate * loss)``, smoothed so that no source vanishes.

    The update of the domain weights in DoReMi (Xie et al., arXiv 2305.10429, Algorithm 1), online: the weights of the
    run itself are moved. Sources of weight 0 stay out.
    """

    rate: float = 1.0
    """Step size."""
    min_share: float = 1e-3
    """Every source that has a weight keeps at least this share of the stream."""
    reference: Mapping[str, float] = field(default_factory=dict)
    """Losses of a reference model by source: what counts is the excess over them, where it is positive."""

    def __post_init__(self) -> None:
        """The rate is positive, the share one that a source can have.

        Raises:
            ValueError: it is not.
        """
        if not 0 < self.rate < math.inf:
            raise ValueError(f"rate: {self.rate} must be positive and finite")
        if not 1e-6 <= self.min_share <= 1:
            raise ValueError(f"min_share: {self.min_share} must be in 1e-6 … 1")

    def __call__(
        self, step: int, losses: Mapping[str, float], weights: Mapping[str, float]
    ) -> dict[str, float]:
        """The weights after one update; rounded to 12 digits, so that they are the same on every platform."""
        mixed = [name for name in weights if weights[name] > 0]
        smoothed = self.min_share * len(mixed)
        if smoothed > 1:
            raise DecisionError(
                f"min_share: {self.min_share} of each of {len(mixed)} sources is more than the whole; lower it"
            )
        excess = {name: max(losses[name] - self.reference.get(name, 0.0), 0.0) for name in mixed}
        most = max(excess.values())
        grown = {name: math.log(weights[name]) + self.rate * (excess[name] - most) for name in mixed}
        largest = max(grown.values())  # of logarithms, so that nothing overflows or vanishes altogether
        grown = {name: math.exp(value - largest) for name, value in grown.items()}
        total = math.fsum(grown.values())
        return {
            name: float(f"{self.min_share + (1 - smoothed) * grown[name] / total:.12g}")
            if name in grown
            else 0.0
            for name in weights
        }


def _checked(losses: Mapping[str, float], weights: Mapping[str, float]) -> dict[str, float]:
    """Losses of the sources that have a weight."""
    for name in losses:
        if name not in weights:
            raise DecisionError(f"losses: no source '{name}'{suggest(name, list(weights))}")
    checked = {}
    for name, weight in weights.items():
        if name not in losses:
            if weight > 0:
                raise DecisionError(f"losses: none for source '{name}'; give the one it had last")
            continue
        try:
            loss = float(losses[name])
        except (TypeError, ValueError):
            loss = math.nan
        if not 0 <= loss < math.inf:
            raise DecisionError(
                f"losses: that of source '{name}' is {losses[name]!r}; one that is finite and not negative is needed"
            )
        checked[name] = loss
    return checked
