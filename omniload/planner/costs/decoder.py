"""FLOPs and parameters of a decoder, from its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from omniload.errors import PlanError
from omniload.planner.costs import hf_config
from omniload.planner.costs.exact import weighted_sum
from omniload.planner.costs.flops import FLOPS_UNIT, causal_pairs
from omniload.planner.costs.sizes import MOST, check_sizes


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoder:
    """A transformer decoder, dense or a mixture of experts, by the names of Hugging Face's configurations.

    FLOPs are those of the matrix products of one forward pass, a multiplication and an addition counting two. A
    training step takes three times as many, which changes no ratio. Left out: norms, activations, biases, the rotary
    embedding, softmax, the embedding's look-up, recomputation, and tokens that experts drop or pad; a few percent.
    """

    hidden_size: int
    """Width of the residual stream."""
    num_hidden_layers: int
    """Layers."""
    num_attention_heads: int
    """Query heads."""
    num_key_value_heads: int
    """Key and value heads; fewer than query heads change the projections only."""
    head_dim: int
    """Width of a head."""
    intermediate_size: int
    """Width inside the feed-forward part of a layer without experts."""
    vocab_size: int
    """Columns of the output matrix."""
    sliding_window: int | None = None
    """Tokens that a token sees in windowed layers, itself among them."""
    num_window_layers: int = 0
    """Layers with that window; the others see the whole document."""
    num_moe_layers: int = 0
    """Layers with experts in place of the feed-forward part."""
    num_experts: int = 0
    """Routed experts of such a layer."""
    num_experts_per_tok: int = 0
    """Those of them that a token passes through."""
    moe_intermediate_size: int = 0
    """Width inside a routed expert."""
    shared_expert_intermediate_size: int = 0
    """Width inside the experts that every token passes through, added up."""
    gated: bool = True
    """Whether feed-forward parts have three matrices (SwiGLU) or two."""
    tie_word_embeddings: bool = False
    """Whether the output matrix is the embedding; changes the number of parameters only."""

    def __post_init__(self) -> None:
        """Check the sizes.

        Raises:
            PlanError: a size is no integer, or they do not go together.
        """
        check_sizes(self, "decoder", most=MOST)
        if self.num_attention_heads % self.num_key_value_heads:
            raise PlanError(
                f"decoder: num_key_value_heads {self.num_key_value_heads} does not divide num_attention_heads"
                f" {self.num_attention_heads}"
            )
        for part in ("num_window_layers", "num_moe_layers"):
            if getattr(self, part) > self.num_hidden_layers:
                raise PlanError(
                    f"decoder: {part} {getattr(self, part)} is more than num_hidden_layers {self.num_hidden_layers}"
                )
        if self.num_window_layers and self.sliding_window is None:
            raise PlanError(f"decoder: num_window_layers {self.num_window_layers} needs a sliding_window")
        if self.num_moe_layers and not 0 < self.num_experts_per_tok <= self.num_experts:
            raise PlanError(
                f"decoder: num_experts_per_tok {self.num_experts_per_tok} is not in 1..num_experts {self.num_experts}"
            )

    @classmethod
    def from_mapping(cls, config: Mapping[str, Any]) -> Self:
        """The decoder of a Hugging Face ``config.json``, or of any mapping with its names.

        Args:
            config: of a causal language model, or of a vision-language model with a ``text_config``.

        Raises:
            PlanError: a size is missing or wrong, or its attention is of a kind not counted here.
        """
        return cls(**hf_config.decoder_sizes(config))

    @property
    def token_flops(self) -> int:
        """FLOPs of one token, without the pairs of attention."""
        return 2 * (
            self.num_hidden_layers * self._projections
            + (self.num_hidden_layers - self.num_moe_layers) * self._matrices * self._mlp
            + self.num_moe_layers * (self._router + self._matrices * self._active_experts)
            + self.hidden_size * self.vocab_size
        )

    @property
    def pair_flops(self) -> int:
        """FLOPs of one pair of a query and a key in one layer: a product for the weight, one for the value."""
        return 4 * self.num_attention_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        """All parameters, of all experts and with the embedding; without biases."""
        norms = (2 * self.num_hidden_layers + 1) * self.hidden_size
        of_experts = self._router + self._matrices * self.hidden_size * (
            self.num_experts * self.moe_intermediate_size + self.shared_expert_intermediate_size
        )
        return (
            norms
            + self.num_hidden_layers * self._projections
            + (self.num_hidden_layers - self.num_moe_layers) * self._matrices * self._mlp
            + self.num_moe_layers * of_experts
            + (1 if self.tie_word_embeddings else 2) * self.hidden_size * self.vocab_size
        )

    def flops(self, length: np.ndarray) -> np.ndarray:
        """FLOPs of documents under a causal mask of their own.

        Args:
            length: integers ``[n]``, tokens of each.

        Returns:
            ``int64[n]`` in units of `FLOPS_UNIT`, rounded up from the exact count.

        Raises:
            PlanError: one costs more than 64 bits hold.
        """
        length = length.astype(np.int64, copy=False)
        windowed = self.num_window_layers * self.pair_flops
        return weighted_sum(
            (
                self.token_flops,
                self.num_hidden_layers * self.pair_flops - windowed,
                windowed,
            ),
            (length, causal_pairs(length), causal_pairs(length, self.sliding_window)),
            FLOPS_UNIT,
            "decoder",
        )

    # Parameters of one layer, by part.

    @property
    def _projections(self) -> int:
        heads = 2 * self.num_attention_heads + 2 * self.num_key_value_heads
        return self.hidden_size * heads * self.head_dim

    @property
    def _matrices(self) -> int:
        return 3 if self.gated else 2

    @property
    def _mlp(self) -> int:
        """Of one matrix."""
        return self.hidden_size * self.intermediate_size

    @property
    def _router(self) -> int:
        return self.hidden_size * self.num_experts

    @property
    def _active_experts(self) -> int:
        """Of one matrix of those that a token passes through."""
        return self.hidden_size * (
            self.num_experts_per_tok * self.moe_intermediate_size + self.shared_expert_intermediate_size
        )
