"""Mixing: exact shares in every prefix, whatever the number of sources, the unit, the caps and the size of samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from omniload.errors import MixtureError
from omniload.mixture import Mixture
from omniload.planner import Planner, StreamState
from omniload.planner.mix import FEW_SOURCES, Mixer
from omniload.weights import WEIGHT_UNIT, integer_cap, integer_weights
from tests.omniload.planning import FakeMetadata

MANY = FEW_SOURCES + 5
some_weights = st.lists(st.sampled_from([0.0, 1e-5, 0.1, 1.0, 3.0]), min_size=1, max_size=6).filter(any)
# Padded with sources of no weight, so that both ways of keeping the deficits are taken.
padded_weights = st.tuples(some_weights, st.sampled_from([0, MANY])).map(
    lambda pair: pair[0] + [0.0] * pair[1]
)
some_lengths = st.lists(st.integers(0, 50), min_size=1, max_size=300)


def uncapped(num_sources: int, **keys: Any) -> Mixer:
    zeros = [0] * num_sources
    return Mixer(keys.pop("deficits", zeros), zeros, [WEIGHT_UNIT] * num_sources, **keys)


class Reference:
    """The rule as it is stated, in a few lines."""

    def __init__(self, deficits: Sequence[int]) -> None:
        self.deficits = list(deficits)

    def draw(self, weights: Sequence[int], amount: int) -> int:
        weighted = [i for i, weight in enumerate(weights) if weight]
        source = max(weighted, key=lambda i: (self.deficits[i], -i))
        for i, weight in enumerate(weights):
            self.deficits[i] += weight * amount
        self.deficits[source] -= sum(weights) * amount
        return source


@given(padded_weights, padded_weights, some_lengths, st.integers(0, 300), st.integers(0, 2**62))
@example([1.0, 3.0] + [0.0] * MANY, [1.0], [7] * 100, 50, 2**61 - 5)  # overflows 64 bits on the way
@example([1.0, 3.0] + [0.0] * MANY, [1.0], [2**40, 3, 2**33], 2, 0)
def test_draws_are_those_of_the_plain_rule(
    weights: list[float], later: list[float], lengths: list[int], change: int, start: int
) -> None:
    later = [*later, *weights][: len(weights)]
    later = later if any(later) else weights
    deficits = [0] * len(weights)
    deficits[0], deficits[-1] = deficits[0] + start, deficits[-1] - start
    mixer, reference = uncapped(len(weights), deficits=deficits), Reference(deficits)
    parts = integer_weights(weights)
    mixer.set_weights(parts)
    for i, length in enumerate(lengths):
        if i == change:
            parts = integer_weights(later)
            mixer.set_weights(parts)
        source = mixer.most_owed()
        assert source is not None
        mixer.draw(source, length)
        assert source == reference.draw(parts, length)
        assert list(mixer.deficits) == reference.deficits


@given(padded_weights, some_lengths, st.booleans())
def test_every_prefix_of_draws_stays_within_two_longest_samples_of_its_share(
    weights: list[float], lengths: list[int], by_samples: bool
) -> None:
    parts = integer_weights(weights)
    mixer = uncapped(len(parts), by_samples=by_samples)
    mixer.set_weights(parts)
    drawn = [0] * len(parts)
    for length in lengths:
        source = mixer.most_owed()
        assert source is not None
        assert parts[source] > 0
        mixer.draw(source, length)
        assert sum(mixer.deficits) == 0
        drawn[source] += min(length, 1) if by_samples else length
        bound = 2 if by_samples else 2 * max(lengths)
        for got, part in zip(drawn, parts, strict=True):
            assert abs(got - sum(drawn) * part / WEIGHT_UNIT) <= bound


@pytest.mark.parametrize("others", [1, MANY])
def test_a_rare_source_gets_its_share_in_every_prefix_of_fifty_thousand_draws(others: int) -> None:
    parts = integer_weights([1e-5] + [(1.0 - 1e-5) / others] * others)
    mixer = uncapped(len(parts))
    mixer.set_weights(parts)
    drawn = np.zeros(len(parts), np.int64)
    exact = np.array(parts) / WEIGHT_UNIT
    for draw in range(1, 50_001):
        source = mixer.most_owed()
        assert source is not None
        mixer.draw(source, 1)
        drawn[source] += 1
        if draw % 97 == 0 or source == 0:
            assert np.abs(drawn - draw * exact).max() <= 2
    assert drawn[0] in (0, 1, 2)


def test_a_thousand_sources_stay_within_two_longest_samples_of_their_shares() -> None:
    generator = np.random.default_rng(0)
    parts = integer_weights(generator.pareto(1.0, 1000).tolist())
    mixer = uncapped(1000)
    mixer.set_weights(parts)
    lengths = generator.integers(1, 1000, 20_000)
    drawn, exact, total = np.zeros(1000, np.int64), np.array(parts) / WEIGHT_UNIT, 0
    for i, length in enumerate(lengths.tolist()):
        source = mixer.most_owed()
        assert source is not None
        mixer.draw(source, length)
        drawn[source] += length
        total += length
        if i % 50 == 0:
            assert np.abs(drawn - total * exact).max() <= 2 * 1000
    assert np.count_nonzero(drawn) > 700


caps = st.sampled_from([1.0, 0.9, 0.5, 0.3, 0.05])


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([0.01, 0.5, 1.0, 30.0]), caps), min_size=1, max_size=6),
    st.sampled_from([0, MANY]),
    st.lists(st.integers(0, 60), min_size=1, max_size=300),
    st.booleans(),
)
def test_no_prefix_exceeds_a_cap_by_more_than_one_longest_sample(
    sources: list[tuple[float, float]], padding: int, lengths: list[int], by_samples: bool
) -> None:
    if sum(cap for _, cap in sources) < 1:
        sources = [*sources, (0.1, 1.0)]
    padded = [*sources, *[(0.0, 1.0)] * padding]
    limits = [integer_cap(cap) for _, cap in padded]
    zeros = [0] * len(padded)
    mixer = Mixer(zeros, zeros, limits, by_samples=by_samples)
    mixer.set_weights(integer_weights([weight for weight, _ in padded]))
    emitted = [0] * len(padded)
    for i, length in enumerate(lengths):
        source = mixer.most_owed()
        assert source is not None, "caps that add up to 1 leave a source at any time"
        mixer.draw(source, length)
        emitted[source] += length
        assert sum(mixer.deficits) == 0
        for got, limit in zip(emitted, limits, strict=True):
            assert got <= sum(emitted) * limit / WEIGHT_UNIT + max(lengths)
        if i == len(lengths) // 2:  # from the account alone, as after a resume
            deficits = mixer.deficits
            mixer = Mixer(deficits, emitted, limits, by_samples=by_samples)
            mixer.set_weights(integer_weights([weight for weight, _ in padded]))
            assert mixer.deficits == deficits


@pytest.mark.parametrize("padding", [0, MANY])
def test_what_a_capped_source_may_not_give_the_others_give_in_proportion(padding: int) -> None:
    weights = [0.8, 0.15, 0.05] + [0.0] * padding
    zeros = [0] * len(weights)
    mixer = Mixer(zeros, zeros, [integer_cap(0.5)] + [WEIGHT_UNIT] * (len(weights) - 1))
    mixer.set_weights(integer_weights(weights))
    emitted = [0] * len(weights)
    generator = np.random.default_rng(1)
    for length in generator.integers(1, 100, 20_000).tolist():
        source = mixer.most_owed()
        assert source is not None
        mixer.draw(source, length)
        emitted[source] += length
    shares = [tokens / sum(emitted) for tokens in emitted[:3]]
    assert shares == pytest.approx([0.5, 0.375, 0.125], abs=0.001)


def mixture(sources: dict[str, dict[str, Any]], **keys: Any) -> Mixture:
    specs = {
        name: {"path": "unused", "weight": 1, "on_exhausted": "repeat"} | spec
        for name, spec in sources.items()
    }
    return Mixture.load({"seq_len": 16, "packs": 4, "lanes": 2, "sources": specs, **keys})


def tokens_of(given_mixture: Mixture, rows: list[list[list[int]]]) -> tuple[np.ndarray, StreamState]:
    """Tokens planned by source, and the last state; resumed from its JSON at every step."""
    names, metadata = given_mixture.names, FakeMetadata(rows, 16)
    planner = Planner(given_mixture, metadata, StreamState.initial(len(names)))
    uninterrupted = Planner(given_mixture, metadata, StreamState.initial(len(names)))
    tokens = np.zeros(len(names), np.int64)
    while (plan := planner.next()) is not None:
        reference = uninterrupted.next()
        assert reference is not None
        assert plan.hash == reference.hash
        np.add.at(tokens, plan.pieces["source"], plan.pieces["length"].astype(np.int64))
        resumed = Planner(given_mixture, metadata, StreamState.from_json(planner.state.to_json(names), names))
        assert resumed.state.deficits == planner.state.deficits
        planner = resumed
    return tokens, planner.state


def test_weights_may_be_shares_of_samples() -> None:
    rows = [[[16]] * 50, [[2]] * 50]
    _, state = tokens_of(mixture({"long": {}, "short": {}}, unit="samples", steps=50), rows)
    long, short = state.sources
    assert abs(long.emitted_samples - short.emitted_samples) <= 2
    assert long.emitted_tokens == 16 * long.emitted_samples


def test_a_cap_holds_when_the_other_sources_have_left() -> None:
    """The stream ends when only capped sources are left and have given their share, and not before."""
    rows = [[[8]] * 500, [[8]] * 100]
    given_mixture = mixture({"a": {"max_fraction": 0.75}, "b": {"on_exhausted": "drop_source"}})
    _, state = tokens_of(given_mixture, rows)
    assert state.ended
    a, b = state.sources
    assert b.exhausted
    assert b.emitted_tokens == 800
    assert 0.75 - 0.01 <= a.emitted_tokens / (a.emitted_tokens + b.emitted_tokens) <= 0.75 + 0.01


def test_a_cap_in_tokens_holds_for_weights_in_samples() -> None:
    given_mixture = mixture({"a": {"max_fraction": 0.6}, "b": {}}, unit="samples", steps=200)
    tokens, state = tokens_of(given_mixture, [[[16]] * 500, [[2]] * 100])
    emitted = [source.emitted_tokens for source in state.sources]
    assert emitted[0] <= 0.6 * sum(emitted) + 16
    assert emitted[0] >= 0.6 * sum(emitted) - 16
    assert sum(tokens) == 200 * 64


def test_caps_that_leave_no_full_stream_are_refused() -> None:
    sources = {"a": {"max_fraction": 0.5}, "b": {"max_fraction": 0.4}}
    with pytest.raises(
        MixtureError, match=r"sources: by max_fraction .* at most 0.9 of the tokens; raise one"
    ):
        mixture(sources)
    sources["b"]["max_fraction"] = 0.5
    assert mixture(sources)
    with pytest.raises(MixtureError, match="stage at step 3: by max_fraction"):
        mixture(sources, schedule=[{"step": 3, "weights": {"a": 1, "b": 0}}])


def test_thirds_and_tenths_add_up_to_a_full_stream() -> None:
    for n in (3, 10, 7):
        assert mixture({f"s{i}": {"max_fraction": 1 / n} for i in range(n)})
