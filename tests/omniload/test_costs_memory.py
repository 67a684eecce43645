"""Memory of a rank, against what torch saves for a backward pass, and its inverse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from omniload.errors import PlanError
from omniload.planner.costs import Decoder, Encoder, Memory

DECODER = Decoder(
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=160,
    vocab_size=300,
)
ENCODER = Encoder(hidden_size=32, num_hidden_layers=2, intermediate_size=64)
MEMORY = Memory(backbone=DECODER, image=ENCODER, audio=ENCODER)


class Tiny(nn.Module):
    """A decoder with a norm that saves its input only, as fused ones do."""

    def __init__(self, config: Decoder) -> None:
        super().__init__()
        q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        h, i = config.hidden_size, config.intermediate_size
        shapes = [(h, q), (h, kv), (h, kv), (q, h), (h, i), (h, i), (i, h)]
        self.layers = nn.ModuleList(
            nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in shapes)
            for _ in range(config.num_hidden_layers)
        )
        self.head = nn.Linear(h, config.vocab_size, bias=False)
        self.config = config

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            q, k, v, o, gate, up, down = layer
            y = self.norm(x)
            heads = [f(y).unflatten(-1, (-1, self.config.head_dim)).transpose(0, 1)[None] for f in (q, k, v)]
            mixed = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)[0]
            x = x + o(mixed.transpose(0, 1).flatten(1))
            y = self.norm(x)
            x = x + down(F.silu(gate(y)) * up(y))
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))

    def norm(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (self.config.hidden_size,))


def test_activations_are_what_torch_saves_for_the_backward_pass() -> None:
    tokens, model = 256, Tiny(DECODER)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, Tensor] = {}

    def note(x: Tensor) -> Tensor:
        saved[x.untyped_storage().data_ptr()] = x  # kept, so that no storage is reused
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        model(torch.zeros(tokens, DECODER.hidden_size, requires_grad=True))
    counted = sum(x.untyped_storage().nbytes() for p, x in saved.items() if p not in weights)
    # The logits, which are there when their logarithms are made, are freed before the backward pass.
    counted += tokens * DECODER.vocab_size * 4
    told = Memory(backbone=DECODER, bytes_per_value=4).activation_bytes(tokens)
    assert 0.97 * counted < told <= counted, "only means and variances of norms, and targets, are left out"


def test_recomputing_keeps_the_inputs_of_layers_and_one_layer_at_work() -> None:
    tokens = 1000
    again = replace(MEMORY, recompute=True)
    inputs = tokens * 3 * 64 * 2
    head = tokens * (300 * 6 + 2 * 64 * 2)
    one_layer = (MEMORY.activation_bytes(tokens) - head) // 3
    assert again.activation_bytes(tokens) == inputs + head + one_layer
    deep = replace(DECODER, num_hidden_layers=80)
    assert (
        Memory(backbone=deep, recompute=True).activation_bytes(tokens)
        < Memory(backbone=deep).activation_bytes(tokens) / 5
    )


def test_of_the_layers_at_work_the_largest_counts() -> None:
    again = replace(MEMORY, recompute=True)
    inputs_of_encoder = 2 * 32 * 2
    alone = again.activation_bytes(0, patches=10_000)
    with_few_tokens = again.activation_bytes(1, patches=10_000)
    assert alone - 10_000 * inputs_of_encoder == 10_000 * 2 * (8 * 32 + 2 * 64)
    assert with_few_tokens - alone == 3 * 64 * 2 + 300 * 6 + 2 * 64 * 2


def test_experts_a_token_passes_through_are_kept_and_all_are_stored() -> None:
    sparse = replace(
        DECODER, num_moe_layers=3, num_experts=32, num_experts_per_tok=2, moe_intermediate_size=80
    )
    many = replace(sparse, num_experts=64)
    memory, more = Memory(backbone=sparse), Memory(backbone=many)
    assert more.state_bytes - memory.state_bytes == 16 * 3 * 32 * 64 * (3 * 80 + 1)
    assert more.activation_bytes(100) - memory.activation_bytes(100) == 100 * 3 * 32 * 4
    per_expert = 2 * (2 * 64 + 4 * 80)
    one = Memory(backbone=replace(sparse, num_experts_per_tok=1))
    assert memory.activation_bytes(100) - one.activation_bytes(100) == 100 * 3 * per_expert


def test_state_is_divided_over_its_ranks_and_tokens_over_theirs() -> None:
    parameters = DECODER.num_parameters + 2 * ENCODER.num_parameters
    assert MEMORY.state_bytes == 16 * parameters
    shared = replace(MEMORY, state_ranks=64, token_ranks=8)
    assert shared.state_bytes == -(-16 * parameters // 64)
    assert shared.activation_bytes(8000, 80, 8) == MEMORY.activation_bytes(1000, 10, 1)


@given(st.integers(0, 2**40), st.integers(0, 5000), st.booleans(), st.integers(1, 64))
@settings(max_examples=300)
def test_the_most_tokens_fit_and_one_more_would_not(
    spare: int, patches: int, recompute: bool, ranks: int
) -> None:
    memory = replace(MEMORY, recompute=recompute, token_ranks=ranks)
    budget = memory.total_bytes(0, patches) + spare
    most = memory.most_tokens(budget, patches)
    assert memory.total_bytes(most, patches) <= budget < memory.total_bytes(most + 1, patches)


def test_a_budget_below_the_state_is_refused_with_the_numbers() -> None:
    with pytest.raises(
        PlanError, match=rf"1000 bytes do not hold the state, {MEMORY.state_bytes}, .*over more ranks"
    ):
        MEMORY.most_tokens(1000)


@pytest.mark.parametrize(
    ("field", "value"),
    [("state_ranks", 0), ("token_ranks", -1), ("bytes_per_value", 2.0), ("token_ranks", True)],
)
def test_numbers_that_are_none_are_refused(field: str, value: Any) -> None:
    with pytest.raises(PlanError, match=f"memory: {field}: {value} is not an integer of at least 1"):
        replace(MEMORY, **{field: value})
