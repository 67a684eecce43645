"""What a Hugging Face ``config.json`` says about the sizes of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omniload.errors import PlanError

_TWO_MATRICES = {"bloom", "falcon", "gpt_bigcode", "gpt_neox", "nemotron", "opt", "phi", "starcoder2"}
_THREE_MATRICES = {"pixtral", "qwen2_5_omni_vision_encoder", "qwen2_5_vl", "qwen2_5_vl_vision"}
_NOT_COUNTED = {
    "kv_lora_rank": "latent attention",
    "linear_num_key_heads": "linear attention",
    "mamba_d_state": "state-space layers",
    "ssm_state_size": "state-space layers",
    "block_configs": "layers of unlike sizes",
    "attention_chunk_size": "attention in chunks",
}


def decoder_sizes(config: object) -> dict[str, Any]:
    """The fields of a `Decoder`: those of this name, else what the configuration's other keys amount to.

    Raises:
        PlanError: one is missing or no number, or a layer is of a kind not counted.
    """
    keys = _Keys("decoder", config, "text_config")
    for key, kind in _NOT_COUNTED.items():
        if keys.config.get(key) is not None:
            raise PlanError(
                f"decoder: {key}: FLOPs of {kind} are not counted; give a cost function of your own"
            )
    layers, hidden = keys.size("num_hidden_layers"), keys.size("hidden_size")
    heads = keys.size("num_attention_heads")
    window, num_windowed = _windows(keys, layers)
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys.size("num_key_value_heads", default=heads),
        "head_dim": keys.size("head_dim", default=hidden // max(heads, 1)),
        "intermediate_size": keys.size("intermediate_size"),
        "vocab_size": keys.size("vocab_size"),
        "sliding_window": window,
        "num_window_layers": num_windowed,
        "gated": keys.config.get("model_type") not in _TWO_MATRICES,
        "tie_word_embeddings": bool(keys.config.get("tie_word_embeddings", False)),
        **_experts(keys, layers),
        **keys.named("gated", "num_window_layers", "num_moe_layers"),
    }


def encoder_sizes(config: object) -> dict[str, Any]:
    """The fields of an `Encoder`: those of this name, else what the configuration's other keys amount to.

    Raises:
        PlanError: one is missing or no number.
    """
    keys = _Keys("encoder", config, "vision_config")
    layers = keys.size("num_hidden_layers", "depth", "encoder_layers")
    # Qwen2-VL calls the width embed_dim, and hidden_size that of the decoder behind.
    hidden = keys.size("embed_dim", "hidden_size", "d_model")
    block, num_in_blocks = None, 0
    whole = keys.listed("fullatt_block_indexes")
    if whole is not None:
        block = (keys.size("window_size") // max(keys.size("patch_size"), 1)) ** 2
        num_in_blocks = layers - len(whole)
    if keys.config.get("mlp_ratio") is not None:
        inner = int(hidden * keys.number("mlp_ratio"))
    else:
        inner = keys.size("intermediate_size", "encoder_ffn_dim")
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": inner,
        "block": block,
        "num_block_layers": num_in_blocks,
        "gated": keys.config.get("model_type") in _THREE_MATRICES,
        **keys.named("gated", "block", "num_block_layers"),
    }


def _windows(keys: _Keys, layers: int) -> tuple[int | None, int]:
    """The window, and the number of layers that have it."""
    config = keys.config
    window = keys.size("sliding_window", default=0) or None
    kinds = keys.listed("layer_types")
    pattern = keys.size("sliding_window_pattern", default=2 if config.get("model_type") == "gemma2" else 0)
    if kinds is not None:
        unknown = [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]
        if unknown:
            raise PlanError(
                f"decoder: layer_types: FLOPs of {unknown[0]} are not counted; give a cost function of your own"
            )
        if len(kinds) != layers:
            raise PlanError(f"decoder: layer_types names {len(kinds)} layers, num_hidden_layers {layers}")
        num_windowed = kinds.count("sliding_attention")
    elif window is None or not config.get("use_sliding_window", True):
        num_windowed = 0
    elif pattern:  # every so many layers one sees all
        num_windowed = layers - layers // pattern
    elif "use_sliding_window" in config:  # Qwen: from a layer on
        num_windowed = max(layers - keys.size("max_window_layers", default=layers), 0)
    else:
        num_windowed = layers
    return window, num_windowed


def _experts(keys: _Keys, layers: int) -> dict[str, Any]:
    num_experts = keys.size("num_experts", "num_local_experts", "n_routed_experts", default=0)
    if not num_experts:
        return {}
    inner = keys.size("moe_intermediate_size", "intermediate_size")
    shared = keys.size("n_shared_experts", "num_shared_experts", default=0) * inner
    # Qwen leaves out listed layers and all but every so many, DeepSeek the first ones.
    dense = keys.listed("mlp_only_layers") or []
    step, first = keys.size("decoder_sparse_step", default=1), keys.size("first_k_dense_replace", default=0)
    every = keys.size("moe_layer_freq", default=1)
    if not (step and every):
        raise PlanError("decoder: decoder_sparse_step and moe_layer_freq are at least 1")
    sparse = [
        layer
        for layer in range(layers)
        if layer >= first and layer % every == 0 and (layer + 1) % step == 0 and layer not in dense
    ]
    return {
        "num_moe_layers": len(sparse),
        "num_experts": num_experts,
        "num_experts_per_tok": keys.size("num_experts_per_tok"),
        "moe_intermediate_size": inner,
        "shared_expert_intermediate_size": keys.size("shared_expert_intermediate_size", default=shared),
    }


class _Keys:
    """A configuration whose values are checked as they are read.

    Args:
        what: of what the configuration is, for messages.
        config: the mapping.
        part: key of the part that counts, where there is one.
    """

    def __init__(self, what: str, config: object, part: str) -> None:
        if isinstance(config, Mapping) and config.get(part) is not None:
            config = config[part]
        if not isinstance(config, Mapping):
            raise PlanError(
                f"{what}: a {type(config).__name__} is no configuration; give a mapping of its sizes"
            )
        self.config: Mapping[str, Any] = config
        self._what = what

    def size(self, *names: str, default: int | None = None) -> int:
        """The first of these that there is."""
        name = next((name for name in names if self.config.get(name) is not None), None)
        if name is None:
            if default is None:
                raise PlanError(
                    f"{self._what}: '{names[0]}' is missing; give it as the model's config.json does"
                )
            return default
        value = self.config[name]
        if type(value) is not int or value < 0:
            raise PlanError(f"{self._what}: {name}: {value!r} is not an integer of at least 0")
        return value

    def number(self, name: str) -> float:
        """A number that need not be whole."""
        value = self.config[name]
        if type(value) not in (int, float) or not 0 < value < 2**31:
            raise PlanError(f"{self._what}: {name}: {value!r} is not a positive number")
        return float(value)

    def listed(self, name: str) -> list[Any] | None:
        """A list; None if there is none."""
        value = self.config.get(name)
        if value is not None and not isinstance(value, list | tuple):
            raise PlanError(f"{self._what}: {name}: {value!r} is not a list")
        return None if value is None else list(value)

    def named(self, *names: str) -> dict[str, Any]:
        """Those of these that there are."""
        return {name: self.config[name] for name in names if self.config.get(name) is not None}
