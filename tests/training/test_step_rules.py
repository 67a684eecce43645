"""Learning rate, optimizer groups, and what a step refuses."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.training.fake_lanes import fake_step
from training.config import ModelConfig, OptimizerConfig
from training.errors import ConfigError, LayoutError
from training.model import CausalLM
from training.optim import build_optimizer, learning_rate
from training.parallel import build_mesh, process_group
from training.step import backward

SMALL = ModelConfig(
    vocab_size=62, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=2, num_kv_heads=2
)


def test_learning_rate_rises_then_falls_to_its_floor():
    config = OptimizerConfig(lr=1.0, min_lr_ratio=0.1, warmup_steps=4)
    rates = [learning_rate(step, 20, config) for step in range(20)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)


@given(
    num_steps=st.integers(1, 50),
    warmup_steps=st.integers(0, 60),
    min_lr_ratio=st.floats(0, 1),
    lr=st.floats(1e-6, 1),
)
def test_learning_rate_stays_in_bounds(num_steps, warmup_steps, min_lr_ratio, lr):
    config = OptimizerConfig(lr=lr, min_lr_ratio=min_lr_ratio, warmup_steps=warmup_steps)
    for step in range(num_steps):
        assert 0 <= learning_rate(step, num_steps, config) <= lr * (1 + 1e-12)


def test_only_matrices_decay():
    model = CausalLM(SMALL, torch.float32, seed=0)
    decayed, plain = build_optimizer(model, OptimizerConfig(weight_decay=0.3)).param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.3, 0.0)
    assert {parameter.ndim for parameter in decayed["params"]} == {2}
    assert {parameter.ndim for parameter in plain["params"]} == {1}
    assert len(decayed["params"]) + len(plain["params"]) == len(list(model.parameters()))


def test_gradient_of_a_step_is_the_sum_over_its_lanes():
    """All lanes at once, or two and two: the same gradient, and the loss parts add up."""
    lanes = fake_step(3)
    gradients, losses = [], []
    for groups in ([lanes], [lanes[:2], lanes[2:]]):
        model = CausalLM(SMALL, torch.float64, seed=0)
        losses.append(sum(backward(model, group) for group in groups))
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert losses[0] == pytest.approx(losses[1], rel=1e-14)
    assert losses[0] == pytest.approx(math.log(62), rel=0.01)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-13, atol=0)


def test_token_outside_the_vocabulary_is_refused():
    model = CausalLM(SMALL.model_copy(update={"vocab_size": 40}), torch.float32, seed=0)
    expected = r"step 5, lane 0: token \d+ is outside model.vocab_size: 40; set it to at least"
    with pytest.raises(ConfigError, match=expected):
        backward(model, fake_step(5))


def test_mesh_refuses_more_ranks_than_there_are():
    with process_group(60), pytest.raises(LayoutError, match=r"parallel\.tp: 2 does not divide the 1 ranks"):
        build_mesh(2, SMALL)
