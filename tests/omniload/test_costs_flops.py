"""FLOPs and parameters are those that torch counts on models written without regard to the formulas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from omniload.errors import PlanError
from omniload.planner.costs import FLOPS_UNIT, Decoder, Encoder

DENSE = Decoder(
    hidden_size=24,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=40,
    vocab_size=50,
)
MODELS = {
    "dense": DENSE,
    "two matrices": replace(DENSE, gated=False),
    "all heads": replace(DENSE, num_key_value_heads=6),
    "a window in some layers": replace(DENSE, sliding_window=5, num_window_layers=2),
    "a window in all layers": replace(DENSE, sliding_window=1, num_window_layers=3),
    "experts in some layers": replace(
        DENSE, num_moe_layers=2, num_experts=7, num_experts_per_tok=3, moe_intermediate_size=11
    ),
    "experts in all layers": replace(
        DENSE,
        num_moe_layers=3,
        num_experts=4,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=9,
    ),
}


class FeedForward(nn.Module):
    def __init__(self, hidden: int, inner: int, gated: bool) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, inner, bias=False)
        self.gate = nn.Linear(hidden, inner, bias=False) if gated else None
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)) if self.gate is None else self.gate(x).sigmoid() * self.up(x))


class Experts(nn.Module):
    def __init__(self, config: Decoder) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.moe_intermediate_size
        self.router = nn.Linear(hidden, config.num_experts, bias=False)
        self.experts = nn.ModuleList(
            FeedForward(hidden, inner, config.gated) for _ in range(config.num_experts)
        )
        shared = config.shared_expert_intermediate_size
        self.shared = FeedForward(hidden, shared, config.gated) if shared else None
        self.top = config.num_experts_per_tok

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.router(x).topk(self.top, dim=-1).indices
        out = [
            sum(self.experts[e](row[None]) for e in of) for row, of in zip(x, chosen.tolist(), strict=True)
        ]
        y = torch.cat(out)
        return y if self.shared is None else y + self.shared(x)


class Layer(nn.Module):
    """Attention token by token, each over the keys it sees and no others."""

    def __init__(self, config: Decoder, window: int | None, experts: bool) -> None:
        super().__init__()
        q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q, self.k, self.v = (nn.Linear(config.hidden_size, n, bias=False) for n in (q, kv, kv))
        self.o = nn.Linear(q, config.hidden_size, bias=False)
        self.norm, self.norm2 = nn.RMSNorm(config.hidden_size), nn.RMSNorm(config.hidden_size)
        dense = FeedForward(config.hidden_size, config.intermediate_size, config.gated)
        self.mlp = Experts(config) if experts else dense
        self.config, self.window = config, window

    def forward(self, x: Tensor) -> Tensor:
        config, y = self.config, self.norm(x)
        q, k, v = (
            f(y).unflatten(-1, (-1, config.head_dim)).transpose(0, 1) for f in (self.q, self.k, self.v)
        )
        group = config.num_attention_heads // config.num_key_value_heads
        out = torch.zeros(len(x), config.num_attention_heads, config.head_dim)
        for t in range(len(x)):
            first = 0 if self.window is None else max(0, t + 1 - self.window)
            for head in range(config.num_attention_heads):
                keys, values = k[head // group, first : t + 1], v[head // group, first : t + 1]
                out[t, head] = (q[head, t : t + 1] @ keys.T).softmax(-1) @ values
        x = x + self.o(out.flatten(1))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self, config: Decoder) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        windows = [config.sliding_window] * config.num_window_layers
        windows += [None] * (config.num_hidden_layers - len(windows))
        self.layers = nn.ModuleList(
            Layer(config, window, i < config.num_moe_layers) for i, window in enumerate(windows)
        )
        self.norm = nn.RMSNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, documents: list[int]) -> None:
        for length in documents:
            x = self.embed(torch.zeros(length, dtype=torch.long))
            for layer in self.layers:
                x = layer(x)
            self.head(self.norm(x))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("length", [1, 4, 13])
def test_flops_of_a_decoder_are_those_of_its_matrix_products(name: str, length: int) -> None:
    config, model = MODELS[name], Model(MODELS[name])
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model([length])
    counted = counter.get_total_flops()
    assert counted > 10 * FLOPS_UNIT
    assert config.flops(np.array([length])).tolist() == [-(-counted // FLOPS_UNIT)]
    assert config.num_parameters == sum(parameter.numel() for parameter in model.parameters())


def test_exact_flops_follow_from_those_of_a_token_and_a_pair() -> None:
    length = 13
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        Model(DENSE)([length])
    pairs = DENSE.num_hidden_layers * length * (length + 1) // 2
    assert counter.get_total_flops() == length * DENSE.token_flops + pairs * DENSE.pair_flops


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("block", "num_block_layers"), [(None, 0), (4, 1), (4, 2), (100, 2)])
def test_flops_of_an_encoder_are_those_of_its_matrix_products(
    gated: bool, block: int | None, num_block_layers: int
) -> None:
    config = Encoder(
        hidden_size=24,
        num_hidden_layers=2,
        intermediate_size=36,
        gated=gated,
        block=block,
        num_block_layers=num_block_layers,
    )
    mlp = FeedForward(24, 36, gated)
    q, k, v, o = (nn.Linear(24, 24, bias=False) for _ in range(4))
    length = 11
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        for layer in range(2):
            x = torch.ones(length, 24)
            for part in x.split(block or length) if layer < num_block_layers else [x]:
                o((q(part) @ k(part).T).softmax(-1) @ v(part))
            mlp(x)
    assert config.flops(np.array([length])).tolist() == [-(-counter.get_total_flops() // FLOPS_UNIT)]
    matrices = sum(f.weight.numel() for f in (q, k, v, o)) + sum(p.numel() for p in mlp.parameters())
    assert config.num_parameters == 2 * (matrices + 2 * 24)


def test_grouped_queries_change_the_projections_only() -> None:
    few, all_ = replace(DENSE, num_key_value_heads=1), replace(DENSE, num_key_value_heads=6)
    assert few.pair_flops == all_.pair_flops
    assert all_.token_flops - few.token_flops == 2 * 3 * 2 * 5 * 8 * 24


def test_a_single_token_of_a_tiny_model_costs_something() -> None:
    tiny = Decoder(
        hidden_size=2,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=2,
        intermediate_size=1,
        vocab_size=2,
    )
    assert tiny.flops(np.array([0, 1])).tolist() == [0, 1]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "larger than any": ({"sliding_window": 2**31}, "sliding_window: 2147483648 is more than 2147483647"),
    "zero": ({"hidden_size": 0}, "decoder: hidden_size: 0 is not an integer of at least 1"),
    "negative": ({"num_experts": -1}, "num_experts: -1 is not an integer of at least 0"),
    "text": ({"vocab_size": "many"}, "vocab_size: 'many' is not an integer"),
    "a fraction": ({"head_dim": 2.5}, "head_dim: 2.5 is not an integer"),
    "a flag": ({"head_dim": True}, "head_dim: True is not an integer"),
    "no flag": ({"gated": 1}, "gated: 1 is not true or false"),
    "a window of nothing": ({"sliding_window": 0}, "sliding_window: 0 is not an integer of at least 1"),
    "windowed layers without a window": ({"num_window_layers": 1}, "needs a sliding_window"),
    "more windowed layers than layers": (
        {"num_window_layers": 4, "sliding_window": 2},
        "num_window_layers 4 is more than num_hidden_layers 3",
    ),
    "heads that cannot be grouped": ({"num_key_value_heads": 4}, "4 does not divide num_attention_heads 6"),
    "no experts": ({"num_moe_layers": 1}, "num_experts_per_tok 0 is not in 1..num_experts 0"),
}


@pytest.mark.parametrize("kind", BAD)
def test_sizes_that_are_none_are_refused_in_one_line(kind: str) -> None:
    sizes, message = BAD[kind]
    with pytest.raises(PlanError, match=message):
        replace(DENSE, **sizes)


def test_blocks_of_an_encoder_are_checked() -> None:
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "intermediate_size": 8}
    with pytest.raises(PlanError, match="num_block_layers 1 needs a block"):
        Encoder(**sizes, num_block_layers=1)
    with pytest.raises(PlanError, match="num_block_layers 3 is more than num_hidden_layers 2"):
        Encoder(**sizes, num_block_layers=3, block=4)
