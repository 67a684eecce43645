"""Draws in one go are the draws that would be made one by one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniload import Mixture
from omniload.planner import mix
from omniload.planner.mix import Mixer
from omniload.weights import WEIGHT_UNIT, integer_weights
from tests.omniload.mixtures import hard_mixture
from tests.omniload.test_laws import plans_of


class Samples:
    """A source with some samples at hand."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = np.array(lengths, np.int64)
        self.orders: list[int] = []

    @property
    def ready(self) -> np.ndarray:
        return self.lengths[len(self.orders) :]

    def draw_ready(self, orders: list[int]) -> None:
        self.orders += orders


def mixer(weights: list[float], by_samples: bool) -> Mixer:
    made = Mixer([0] * len(weights), [0] * len(weights), [WEIGHT_UNIT] * len(weights), by_samples=by_samples)
    made.set_weights(integer_weights(weights))
    return made


@given(
    weights=st.lists(st.sampled_from([0.0, 1e-5, 0.1, 1.0, 3.0]), min_size=1, max_size=40).filter(any),
    lengths=st.lists(st.lists(st.integers(0, 50), max_size=60), min_size=40, max_size=40),
    tokens=st.integers(0, 2000),
    pieces=st.integers(1, 400),
    by_samples=st.booleans(),
)
def test_draws_at_once_are_those_of_one_by_one(
    weights: list[float], lengths: list[list[int]], tokens: int, pieces: int, by_samples: bool
) -> None:
    at_once, one_by_one = mixer(weights, by_samples), mixer(weights, by_samples)
    sources = [Samples(lengths[i]) for i in range(len(weights))]
    run = at_once.draw_ready(sources, 16, tokens, pieces, 100)

    drawn: list[list[int]] = [[] for _ in weights]
    num_tokens = num_pieces = order = 0
    while num_tokens < tokens and num_pieces < pieces:
        source = one_by_one.most_owed()
        assert source is not None
        if len(drawn[source]) == len(lengths[source]):
            break
        length = lengths[source][len(drawn[source])]
        one_by_one.draw(source, length)
        drawn[source].append(100 + order)
        num_tokens, num_pieces, order = num_tokens + length, num_pieces - -length // 16, order + 1
    assert [source.orders for source in sources] == drawn
    assert run.sources == [i for i, orders in enumerate(drawn) if orders]
    assert (run.samples, run.tokens, run.pieces) == (order, num_tokens, num_pieces)
    assert at_once.deficits == one_by_one.deficits


def test_a_draw_that_does_not_fit_64_bits_is_left_to_the_plain_way() -> None:
    made = mixer([1.0, 1.0], False)
    sources = [Samples([5, 2**40]), Samples([5, 5])]
    run = made.draw_ready(sources, 16, 2**50, 2**50, 0)
    assert 0 < run.samples < 4
    assert len(sources[0].ready) == 1


@pytest.mark.parametrize("unit", ["tokens", "samples"])
def test_plans_do_not_depend_on_how_samples_are_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unit: str
) -> None:
    keys = {
        "unit": unit,
        "schedule": [{"step": 5, "weights": {"filtered": 1, "long": 0, "short": 1, "tripled": 2}}],
    }
    mixture = Mixture.load(hard_mixture(tmp_path, **keys))
    fast, _ = plans_of(mixture, None, steps=40)
    monkeypatch.setattr(mix, "KERNELS", None)
    plain, _ = plans_of(mixture, None, steps=40)
    assert [plan.hash for plan in fast] == [plan.hash for plan in plain]
    assert len(fast) == 40
