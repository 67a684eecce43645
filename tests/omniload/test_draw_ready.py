"""Draws in one go are the draws that would be made one by one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniload import Mixture
from omniload.planner import mix
from omniload.planner.mix import Mixer
from omniload.weights import WEIGHT_UNIT, integer_cap, integer_weights
from tests.omniload.mixtures import hard_mixture
from tests.omniload.test_laws import plans_of


class Samples:
    """A source whose samples come in chunks, of which some may be empty."""

    def __init__(self, chunks: list[list[int]]) -> None:
        self.chunks = [np.array(chunk, np.int64) for chunk in chunks]
        self.ready = np.empty(0, np.int64)
        self.drawn = 0
        self.orders: list[int] = []

    def draw_ready(self, count: int) -> None:
        assert count <= len(self.ready)
        self.ready = self.ready[count:]
        self.drawn += count

    def read_on(self) -> bool:
        assert not len(self.ready)
        if not self.chunks:
            return False
        self.ready = self.chunks.pop(0)
        return True

    def number(self, orders: np.ndarray) -> None:
        self.orders += orders.tolist()
        assert len(self.orders) == self.drawn


def mixer(weights: list[float], caps: list[float], by_samples: bool) -> Mixer:
    zeros = [0] * len(weights)
    made = Mixer(zeros, zeros, [integer_cap(cap) for cap in caps], by_samples=by_samples)
    made.set_weights(integer_weights(weights))
    return made


def one_by_one(
    made: Mixer, lengths: list[list[int]], tokens: int, pieces: int
) -> tuple[list[list[int]], tuple[int, int, int]]:
    """Draw numbers by source, and the draws, tokens and pieces: the plain rule, until a source is spent."""
    drawn: list[list[int]] = [[] for _ in lengths]
    num_tokens = num_pieces = order = 0
    while num_tokens < tokens and num_pieces < pieces:
        source = made.most_owed()
        if source is None or len(drawn[source]) == len(lengths[source]):
            break
        length = lengths[source][len(drawn[source])]
        made.draw(source, length)
        drawn[source].append(100 + order)
        num_tokens, num_pieces, order = num_tokens + length, num_pieces - -length // 16, order + 1
    return drawn, (order, num_tokens, num_pieces)


def check_same(
    weights: list[float],
    caps: list[float],
    chunks: list[list[list[int]]],
    tokens: int,
    pieces: int,
    by_samples: bool,
) -> tuple[Mixer, int]:
    """The mixer after drawing at once, and the draws made; they must be those made one by one."""
    at_once, plain = mixer(weights, caps, by_samples), mixer(weights, caps, by_samples)
    sources = [Samples(list(its)) for its in chunks]
    run = at_once.draw_ready(sources, 16, tokens, pieces, 100)
    drawn, counts = one_by_one(plain, [[n for chunk in its for n in chunk] for its in chunks], tokens, pieces)
    assert [source.orders for source in sources] == drawn
    assert run.sources == [i for i, orders in enumerate(drawn) if orders]
    assert (run.samples, run.tokens, run.pieces) == counts
    assert at_once.deficits == plain.deficits
    assert at_once.most_owed() == plain.most_owed()
    return at_once, run.samples


def chunks_of(num_sources: int, seed: int) -> list[list[list[int]]]:
    """Up to three chunks of each source, of up to twenty samples; from a seed, to be cheap."""
    generator = np.random.default_rng(seed)
    return [
        [
            generator.integers(0, 50, size).tolist()
            for size in generator.integers(0, 21, generator.integers(4))
        ]
        for _ in range(num_sources)
    ]


some_weights = st.lists(st.sampled_from([0.0, 1e-5, 0.1, 1.0, 3.0]), min_size=1, max_size=40).filter(any)
seeds = st.integers(0, 2**32)


@settings(max_examples=1000)
@given(some_weights, seeds, st.integers(0, 2000), st.integers(1, 400), st.booleans())
def test_draws_at_once_are_those_of_one_by_one(
    weights: list[float], seed: int, tokens: int, pieces: int, by_samples: bool
) -> None:
    check_same(weights, [1.0] * len(weights), chunks_of(len(weights), seed), tokens, pieces, by_samples)


@settings(max_examples=1000)
@given(some_weights, st.data(), seeds, st.integers(0, 2000), st.booleans())
def test_draws_at_once_heed_caps_as_those_of_one_by_one(
    weights: list[float], data: st.DataObject, seed: int, tokens: int, by_samples: bool
) -> None:
    size = len(weights)
    caps = data.draw(st.lists(st.sampled_from([0.02, 0.1, 0.5, 1.0]), min_size=size, max_size=size))
    check_same(weights, caps, chunks_of(size, seed), tokens, 10**9, by_samples)


@pytest.mark.parametrize("cap", [1.0, 0.05])
@pytest.mark.parametrize("by_samples", [False, True])
def test_draws_at_once_are_those_of_one_by_one_for_three_hundred_sources(
    by_samples: bool, cap: float
) -> None:
    """Many groups of sources of like weight, with equal weights and equal deficits among them."""
    generator = np.random.default_rng(3)
    weights = np.round(generator.pareto(1.0, 300), 1).tolist()
    chunks = [[generator.integers(1, 500, 40).tolist() for _ in range(50)] for _ in weights]
    made, samples = check_same(weights, [cap] * 300, chunks, 2_000_000, 10**9, by_samples)
    assert samples > 5_000
    assert (max(weights) > cap * sum(weights)) == (cap < 1), "the cap binds"
    assert len(set(made.deficits)) > 100


def test_a_rare_source_among_many_gets_its_share_in_every_prefix_of_fifty_thousand_draws() -> None:
    weights = [1e-5, *[(1 - 1e-5) / 299] * 299]
    made = mixer(weights, [1.0] * 300, False)
    sources = [Samples([[1] * 50_000]) for _ in weights]
    assert made.draw_ready(sources, 16, 50_000, 10**9, 0).samples == 50_000
    exact = np.array(integer_weights(weights)) / WEIGHT_UNIT
    source_of = np.empty(50_000, np.int64)
    for i, source in enumerate(sources):
        source_of[source.orders] = i
    drawn = np.zeros(300, np.int64)
    for number, i in enumerate(source_of.tolist(), start=1):
        drawn[i] += 1
        if number % 97 == 0 or i == 0:
            assert np.abs(drawn - number * exact).max() <= 2
    assert drawn[0] in (0, 1, 2)


def test_a_draw_that_does_not_fit_64_bits_is_left_to_the_plain_way() -> None:
    made = mixer([1.0, 1.0], [1.0, 1.0], False)
    sources = [Samples([[5, 2**40]]), Samples([[5, 5]])]
    run = made.draw_ready(sources, 16, 2**50, 2**50, 0)
    assert 0 < run.samples < 4
    assert sources[0].ready.tolist() == [2**40]


def test_what_is_owed_in_more_than_64_bits_is_left_to_the_plain_way() -> None:
    made = Mixer([2**70, -(2**70)], [0, 0], [WEIGHT_UNIT] * 2)
    made.set_weights(integer_weights([1.0, 1.0]))
    source = Samples([[5]])
    assert made.draw_ready([source, Samples([[5]])], 16, 10, 10, 0).samples == 0
    assert source.drawn == 0


def test_an_error_while_reading_on_is_raised() -> None:
    class Broken(Samples):
        def read_on(self) -> bool:
            raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        mixer([1.0], [1.0], False).draw_ready([Broken([])], 16, 10, 10, 0)


@pytest.mark.parametrize("unit", ["tokens", "samples"])
@pytest.mark.parametrize("cap", [1.0, 0.3])
def test_plans_do_not_depend_on_how_samples_are_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unit: str, cap: float
) -> None:
    keys = {
        "unit": unit,
        "schedule": [{"step": 5, "weights": {"filtered": 1, "long": 0, "short": 1, "tripled": 2}}],
    }
    given = hard_mixture(tmp_path, **keys)
    given["sources"]["tripled"]["max_fraction"] = cap
    mixture = Mixture.load(given)
    fast, _ = plans_of(mixture, None, steps=40)
    monkeypatch.setattr(mix, "KERNELS", None)
    plain, _ = plans_of(mixture, None, steps=40)
    assert [plan.hash for plan in fast] == [plan.hash for plan in plain]
    assert len(fast) == 40
