"""Sizes are read from Hugging Face's configurations as its own models mean them."""

from __future__ import annotations

from typing import Any

import pytest

from omniload.errors import PlanError
from omniload.planner.costs import Decoder, Encoder

SMALL: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
WINDOW = {"sliding_window": 32}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}


@pytest.mark.interop
@pytest.mark.parametrize(
    ("model_type", "more", "exact"),
    [
        ("llama", {}, True),
        ("llama", {"tie_word_embeddings": True, "head_dim": 24}, True),
        ("mistral", WINDOW, True),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, True),
        ("starcoder2", {"use_bias": False}, False),
        ("qwen2", {}, False),
        ("qwen3", {"head_dim": 16}, False),
        (
            "qwen2_moe",
            {"num_experts": 6, "shared_expert_intermediate_size": 40, "decoder_sparse_step": 2} | EXPERTS,
            False,
        ),
        ("qwen3_moe", {"num_experts": 6, "mlp_only_layers": [0, 4]} | EXPERTS, False),
        ("gemma3_text", {"head_dim": 16} | WINDOW, False),
        ("gpt_neox", {"num_key_value_heads": 8}, False),
    ],
)
def test_parameters_are_those_of_the_model(model_type: str, more: dict[str, Any], exact: bool) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(model_type, **SMALL | more, pad_token_id=0)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    counted = sum(parameter.numel() for parameter in model.parameters())
    told = Decoder.from_mapping(config.to_dict()).num_parameters
    # Biases and norms of heads are left out.
    assert told == counted if exact else 0.97 * counted < told <= counted


def windowed(**config: Any) -> tuple[int | None, int]:
    decoder = Decoder.from_mapping(SMALL | config)
    return decoder.sliding_window, decoder.num_window_layers


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, (None, 0)),
        ({"sliding_window": None}, (None, 0)),
        ({"sliding_window": 0}, (None, 0)),
        ({"sliding_window": 32}, (32, 6)),
        ({"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 4}, (32, 2)),
        ({"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 9}, (32, 0)),
        ({"sliding_window": 32, "use_sliding_window": False, "max_window_layers": 4}, (32, 0)),
        ({"sliding_window": 32, "sliding_window_pattern": 6}, (32, 5)),
        ({"sliding_window": 32, "model_type": "gemma2"}, (32, 3)),
        ({"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"] * 3}, (32, 3)),
        ({"sliding_window": 32, "num_window_layers": 1}, (32, 1)),
    ],
)
def test_windows_are_in_the_layers_that_have_them(
    config: dict[str, Any], expected: tuple[int | None, int]
) -> None:
    assert windowed(**config) == expected


def test_experts_are_in_the_layers_that_have_them() -> None:
    def experts(**config: Any) -> tuple[int, int, int]:
        found = Decoder.from_mapping(SMALL | EXPERTS | {"n_routed_experts": 8} | config)
        return found.num_moe_layers, found.num_experts, found.shared_expert_intermediate_size

    assert experts() == (6, 8, 0)
    assert experts(first_k_dense_replace=2, n_shared_experts=2) == (4, 8, 48)
    assert experts(moe_layer_freq=2) == (3, 8, 0)
    assert experts(decoder_sparse_step=4) == (1, 8, 0)
    assert experts(num_moe_layers=5, shared_expert_intermediate_size=7) == (5, 8, 7)
    assert experts(n_routed_experts=None) == (0, 0, 0)


def test_the_text_part_of_a_vision_language_model_is_its_decoder() -> None:
    both = {
        "text_config": SMALL,
        "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 4},
    }
    assert Decoder.from_mapping(both) == Decoder.from_mapping(SMALL)
    assert Encoder.from_mapping(both) == Encoder(hidden_size=32, num_hidden_layers=2, intermediate_size=128)
    flat = SMALL | {"vision_config": both["vision_config"]}
    assert (Decoder.from_mapping(flat), Encoder.from_mapping(flat)) == (
        Decoder.from_mapping(both),
        Encoder.from_mapping(both),
    )


def test_encoders_are_read_under_all_their_names() -> None:
    siglip = {
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "intermediate_size": 96,
        "model_type": "siglip_vision_model",
    }
    whisper = {"d_model": 64, "encoder_layers": 3, "encoder_ffn_dim": 96, "decoder_layers": 9}
    expected = Encoder(hidden_size=64, num_hidden_layers=3, intermediate_size=96)
    assert Encoder.from_mapping(siglip) == Encoder.from_mapping(whisper) == expected
    qwen = {
        "model_type": "qwen2_5_vl_vision",
        "hidden_size": 64,
        "depth": 8,
        "intermediate_size": 96,
        "patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [3, 7],
    }
    assert Encoder.from_mapping(qwen) == Encoder(
        hidden_size=64, num_hidden_layers=8, intermediate_size=96, block=64, num_block_layers=6, gated=True
    )
    assert Encoder.from_mapping(siglip | {"block": 10, "num_block_layers": 3, "gated": True}) == Encoder(
        hidden_size=64, num_hidden_layers=3, intermediate_size=96, block=10, num_block_layers=3, gated=True
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"kv_lora_rank": 512}, "decoder: kv_lora_rank: FLOPs of latent attention are not counted"),
        ({"linear_num_key_heads": 16}, "linear_num_key_heads: FLOPs of linear attention are not counted"),
        ({"ssm_state_size": 128}, "ssm_state_size: FLOPs of state-space layers are not counted"),
        ({"block_configs": [{}]}, "block_configs: FLOPs of layers of unlike sizes are not counted"),
        ({"layer_types": ["linear_attention"] * 6}, "layer_types: FLOPs of linear_attention are not counted"),
        ({"layer_types": ["full_attention"]}, "layer_types names 1 layers, num_hidden_layers 6"),
        ({"hidden_size": None}, "decoder: 'hidden_size' is missing; give it as"),
        ({"hidden_size": "64"}, "decoder: hidden_size: '64' is not an integer of at least 0"),
        ({"num_attention_heads": 0}, "num_attention_heads: 0 is not an integer of at least 1"),
        ({"num_hidden_layers": True}, "num_hidden_layers: True is not an integer"),
        ({"num_experts": 4}, "'num_experts_per_tok' is missing"),
        ({"gated": "no"}, "gated: 'no' is not true or false"),
        (
            {"moe_layer_freq": 0, "num_experts": 4} | EXPERTS,
            "moe_layer_freq are at least 1",
        ),
        ({"decoder_sparse_step": 0, "num_experts": 4} | EXPERTS, "moe_layer_freq are at least 1"),
        ({"layer_types": 3}, "layer_types: 3 is not a list"),
        ({"mlp_only_layers": 3, "num_experts": 4} | EXPERTS, "mlp_only_layers: 3 is not a list"),
        ({"text_config": 7}, "a int is no configuration; give a mapping"),
    ],
)
def test_a_configuration_that_is_not_understood_is_refused_in_one_line(
    config: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        Decoder.from_mapping(SMALL | config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"depth": 2}, "'embed_dim' is missing"),
        ({"depth": 2, "hidden_size": 8}, "'intermediate_size' is missing"),
        ({"depth": 2, "hidden_size": 8, "mlp_ratio": "4"}, "mlp_ratio: '4' is not a positive number"),
        (
            {"depth": 2, "hidden_size": 8, "mlp_ratio": float("nan")},
            "mlp_ratio: nan is not a positive number",
        ),
        (
            {"depth": 2, "hidden_size": 8, "mlp_ratio": 4, "fullatt_block_indexes": [0]},
            "'window_size' is missing",
        ),
        ([], "a list is no configuration"),
    ],
)
def test_an_encoder_that_is_not_understood_is_refused_in_one_line(config: Any, message: str) -> None:
    with pytest.raises(PlanError, match=f"^encoder: .*{message}"):
        Encoder.from_mapping(config)
