"""Re-weighting by loss: the rule, what is refused, and that a replay needs the log alone."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniload import DataLoader, MixtureLoader
from omniload.errors import DecisionError
from omniload.planner.decisions import to_json
from omniload.reweight import ExponentiatedGradient, LossReweighter
from tests.omniload.mixtures import hard_mixture, on_both_runtimes

STEPS = 30
NAMES = ["filtered", "long", "short", "tripled"]


def loader_of(folder: Path, **keys: Any) -> MixtureLoader:
    loader = DataLoader(hard_mixture(folder, steps=STEPS), **keys)
    assert isinstance(loader, MixtureLoader)
    return loader


def losses_at(step: int) -> dict[str, float]:
    """Losses as a training might have them; that of ``long`` stays high."""
    return {"filtered": 2 / (1 + step), "long": 3.0, "short": 1.0, "tripled": 2.5 / (1 + step)}


def trained(loader: MixtureLoader, reweighter: LossReweighter | None) -> dict[int, str]:
    found = {}
    with loader:
        for group in loader.steps():
            step = group[0]["step"]
            found[step] = loader.plan(step).hash
            if reweighter is not None:
                reweighter.observe(step, losses_at(step))
    return found


names = st.sampled_from(["a", "b", "c", "d"])


@settings(max_examples=1000, deadline=None)
@given(
    st.dictionaries(names, st.tuples(st.floats(0, 1), st.floats(0, 1e6)), min_size=1),
    st.floats(1e-3, 1e3),
    st.floats(1e-6, 0.25),
)
def test_weights_add_up_to_one_and_no_source_falls_below_its_share_or_returns(
    sources: dict[str, tuple[float, float]], rate: float, min_share: float
) -> None:
    if not any(weight for weight, _ in sources.values()):
        return
    total = math.fsum(weight for weight, _ in sources.values())
    weights = {name: weight / total for name, (weight, _) in sources.items()}
    losses = {name: loss for name, (_, loss) in sources.items()}
    found = ExponentiatedGradient(rate=rate, min_share=min_share)(0, losses, weights)
    assert found.keys() == weights.keys()
    assert math.fsum(found.values()) == pytest.approx(1, abs=1e-9)
    for name, weight in found.items():
        assert (weight == 0) if weights[name] == 0 else weight >= min_share * (1 - 1e-9)


def test_the_update_is_that_of_doremi() -> None:
    """Against Algorithm 1 of the paper as it is printed there."""
    rate, count, smoothing = 0.7, 3, 0.03
    weights = {"a": 0.5, "b": 0.3, "c": 0.2}
    losses, reference = {"a": 3.0, "b": 2.0, "c": 1.0}, {"a": 2.5, "b": 2.4, "c": 0.2}
    excess = {name: max(losses[name] - reference[name], 0) for name in weights}
    grown = {name: weights[name] * math.exp(rate * excess[name]) for name in weights}
    expected = {
        name: (1 - smoothing) * grown[name] / sum(grown.values()) + smoothing / count for name in weights
    }
    rule = ExponentiatedGradient(rate=rate, min_share=smoothing / count, reference=reference)
    assert rule(9, losses, weights) == pytest.approx(expected, rel=1e-11)


@on_both_runtimes
def test_a_replay_of_the_log_needs_neither_rule_nor_losses(tmp_path: Path) -> None:
    seen: list[tuple[int, Mapping[str, float]]] = []
    rule = ExponentiatedGradient(rate=0.3, min_share=0.02)

    def watched(step: int, losses: Mapping[str, float], weights: Mapping[str, float]) -> Mapping[str, float]:
        seen.append((step, weights))
        return rule(step, losses, weights)

    loader = loader_of(tmp_path)
    reference = trained(loader, LossReweighter(loader, watched, every=4))
    assert [step for step, _ in seen] == [3, 7, 11, 15, 19, 23, 27]
    assert dict(seen)[3] == pytest.approx({"filtered": 0.3, "long": 0.4, "short": 0.1, "tripled": 0.2})
    shares = [weights["long"] for _, weights in seen]
    assert shares == sorted(shares), "each answer builds on the one before"
    assert shares[-1] > 0.6
    assert loader.ledger().sources["long"].weight > 0.6
    log = [json.loads(json.dumps(to_json(decision))) for decision in loader.control.log]
    assert [decision["step"] for decision in log] == [step + 4 for step, _ in seen]

    replay = loader_of(tmp_path)
    replay.control.replay(log)
    assert trained(replay, None) == reference
    assert trained(loader_of(tmp_path), None) != reference, "the weights changed nothing"


@on_both_runtimes
def test_a_resume_goes_on_reweighting_as_the_run_would_have(tmp_path: Path) -> None:
    rule = ExponentiatedGradient(rate=0.3, min_share=0.02)
    loader = loader_of(tmp_path)
    states, reference = [], {}
    with loader:
        reweighter = LossReweighter(loader, rule, every=3, delay_steps=6)
        for group in loader.steps():
            step = group[0]["step"]
            reference[step] = loader.plan(step).hash
            reweighter.observe(step, losses_at(step))
            states.append(json.loads(json.dumps(loader.state_dict())))
    for step in (4, 5, 6, 16, 27):
        resumed = loader_of(tmp_path, prefetch_steps=1)
        resumed.load_state_dict(states[step])
        rest = trained(resumed, LossReweighter(resumed, rule, every=3, delay_steps=6))
        assert rest == {at: reference[at] for at in range(step + 1, STEPS)}
        assert resumed.control.log == loader.control.log


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"long": math.nan}, "that of source 'long' is nan; one that is finite and not negative"),
        ({"long": -0.5}, "that of source 'long' is -0.5"),
        ({"long": math.inf}, "that of source 'long' is inf"),
        ({"long": "high"}, "that of source 'long' is 'high'"),
        ({"long": None}, "that of source 'long' is None"),
        ({"log": 1.0}, r"losses: no source 'log'; did you mean 'long'\?"),
    ],
)
def test_wrong_losses_are_refused_in_one_line(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with loader_of(tmp_path) as loader:
        reweighter = LossReweighter(loader, ExponentiatedGradient(), every=1)
        with pytest.raises(DecisionError, match=message) as raised:
            reweighter.observe(0, losses_at(0) | change)
        assert "\n" not in str(raised.value)
        losses = losses_at(0)
        del losses["short"]
        with pytest.raises(DecisionError, match="losses: none for source 'short'; give the one it had last"):
            reweighter.observe(0, losses)
        assert loader.control.log == ()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"long": 1.0}, "has to answer with a weight of each of filtered, long, short, tripled"),
        (None, "and answered None"),
        (dict.fromkeys(NAMES, 0.0), "every weight is 0"),
        (dict.fromkeys(NAMES, math.nan), "must be finite"),
        (dict.fromkeys(NAMES, -1.0), "not negative"),
    ],
)
def test_a_rule_that_answers_nonsense_decides_nothing(tmp_path: Path, answer: Any, message: str) -> None:
    with loader_of(tmp_path) as loader:
        reweighter = LossReweighter(loader, lambda step, losses, weights: answer, every=1)
        with pytest.raises(DecisionError, match=message):
            reweighter.observe(0, losses_at(0))
        assert loader.control.log == ()


def test_a_source_without_weight_needs_no_loss(tmp_path: Path) -> None:
    with loader_of(tmp_path) as loader:
        loader.control.set_weights({"filtered": 1, "long": 1, "short": 0, "tripled": 0})
        reweighter = LossReweighter(loader, ExponentiatedGradient(), every=1)
        decision = reweighter.observe(0, {"filtered": 1.0, "long": 2.0})
        assert decision is not None
        assert decision.weights is not None
        assert decision.weights["short"] == decision.weights["tripled"] == 0


@on_both_runtimes
def test_losses_that_come_too_late_are_refused_and_more_delay_lets_them_in_time(tmp_path: Path) -> None:
    with loader_of(tmp_path) as loader:
        steps = loader.steps()
        for _ in range(3):
            next(steps)
        with pytest.raises(
            DecisionError, match="step 4 is already planned, or may be on some rank; the earliest is 6"
        ):
            LossReweighter(loader, ExponentiatedGradient(), every=1).observe(0, losses_at(0))
        late = LossReweighter(loader, ExponentiatedGradient(), every=1, delay_steps=8)
        decision = late.observe(0, losses_at(0))
        assert decision is not None
        assert decision.step == 8
        with pytest.raises(ValueError, match="delay_steps: 3 is below 4, the steps that are planned ahead"):
            LossReweighter(loader, ExponentiatedGradient(), every=1, delay_steps=3)
        with pytest.raises(ValueError, match="every: 0 must be at least 1"):
            LossReweighter(loader, ExponentiatedGradient(), every=0)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rate": 0}, "rate: 0 must be positive"),
        ({"rate": math.nan}, "rate: nan"),
        ({"min_share": 0}, "min_share: 0 must be in 1e-6"),
        ({"min_share": 1.5}, "min_share: 1.5"),
    ],
)
def test_a_rule_that_is_none_is_refused(keys: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExponentiatedGradient(**keys)  # type: ignore[arg-type]


def test_a_share_that_the_sources_cannot_all_have_is_refused() -> None:
    with pytest.raises(
        DecisionError, match=r"min_share: 0\.6 of each of 2 sources is more than the whole; lower it"
    ):
        ExponentiatedGradient(min_share=0.6)(0, {"a": 1, "b": 1}, {"a": 0.5, "b": 0.5})
