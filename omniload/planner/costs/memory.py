"""Bytes that a rank needs, and how many tokens a lane may therefore have."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from omniload.errors import PlanError
from omniload.planner.costs.decoder import Decoder
from omniload.planner.costs.encoder import Encoder

_MOST_TOKENS = 2**40
_FLOAT32 = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Memory of a rank: what training keeps between steps, and what a lane keeps for its backward pass.

    The count of Korthikanti et al. (arXiv 2205.05198), for fused attention, which never holds its weights, and without
    dropout: per layer the input and the output of both norms, queries, keys, values, the output of attention, and what
    the feed-forward part holds between its matrices; after the last layer the logits, with their logarithms in float32
    for the loss.

    Under a pipeline with one forward and one backward in turn, a rank of the first stage holds ``pp`` lanes of ``1/pp``
    of the layers, which is as much as counted here. Left out: the layer whose parameters are gathered at the moment,
    gathered keys and values, communication buffers, workspaces, fragmentation, and what the runtime takes for itself:
    leave a tenth to a fifth of the device for them.
    """

    backbone: Decoder
    """Sees the tokens."""
    image: Encoder | None = None
    """Sees the patches."""
    audio: Encoder | None = None
    """Sees the frames."""
    recompute: bool = False
    """Whether layers keep their input only and are computed again in the backward pass, one at a time."""
    state_ranks: int = 1
    """Ranks that parameters, gradients and optimizer are divided over: sharded data parallel × tensor × pipeline."""
    token_ranks: int = 1
    """Ranks that the tokens of a lane are divided over: context × tensor parallel with sequence parallelism."""
    bytes_per_parameter: int = 16
    """Kept per parameter: 2 for it and 2 for its gradient in bfloat16, 12 for it and Adam's two moments in float32."""
    bytes_per_value: int = 2
    """Of a value of the activations."""

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            PlanError: one is no positive integer.
        """
        for name in ("state_ranks", "token_ranks", "bytes_per_parameter", "bytes_per_value"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise PlanError(f"memory: {name}: {value!r} is not an integer of at least 1")

    @property
    def state_bytes(self) -> int:
        """Parameters, gradients and optimizer."""
        parts = (self.backbone, self.image, self.audio)
        parameters = sum(part.num_parameters for part in parts if part is not None)
        return -(-parameters * self.bytes_per_parameter // self.state_ranks)

    def activation_bytes(self, tokens: int, patches: int = 0, frames: int = 0) -> int:
        """What a lane keeps for its backward pass.

        Args:
            tokens: of the lane, padding included.
            patches: of the lane.
            frames: of the lane.
        """
        width = self.bytes_per_value
        head = self.backbone.vocab_size * (width + _FLOAT32) + 2 * self.backbone.hidden_size * width
        kept, working = tokens * head, 0
        for part, rows, layers in (
            (self.backbone, tokens, _decoder_layers(self.backbone, width)),
            (self.image, patches, _encoder_layers(self.image, width)),
            (self.audio, frames, _encoder_layers(self.audio, width)),
        ):
            if part is None:
                continue
            if self.recompute:
                kept += rows * part.num_hidden_layers * part.hidden_size * width
                working = max(working, rows * max(in_layer for count, in_layer in layers if count))
            else:
                kept += rows * sum(count * in_layer for count, in_layer in layers)
        return -(-(kept + working) // self.token_ranks)

    def total_bytes(self, tokens: int, patches: int = 0, frames: int = 0) -> int:
        """State and activations together, arguments as in `activation_bytes`."""
        return self.state_bytes + self.activation_bytes(tokens, patches, frames)

    def most_tokens(self, budget_bytes: int, patches: int = 0, frames: int = 0) -> int:
        """The most tokens of a lane that fit into a budget beside so many patches and frames.

        Raises:
            PlanError: not even a lane without tokens fits.
        """
        least = self.total_bytes(0, patches, frames)
        if least > budget_bytes:
            raise PlanError(
                f"memory: {budget_bytes} bytes do not hold the state, {self.state_bytes}, and {patches} patches and"
                f" {frames} frames, {least - self.state_bytes}; divide the state over more ranks, or recompute"
            )
        return (
            bisect_right(
                range(_MOST_TOKENS),
                budget_bytes,
                key=lambda tokens: self.total_bytes(tokens, patches, frames),
            )
            - 1
        )


def _decoder_layers(decoder: Decoder, width: int) -> list[tuple[int, int]]:
    """How many layers there are without and with experts, and the bytes per token in one."""
    matrices = 4 if decoder.gated else 2  # values inside the feed-forward part: in and out of its activation
    heads = 2 * decoder.num_attention_heads + 2 * decoder.num_key_value_heads
    attention = width * (4 * decoder.hidden_size + heads * decoder.head_dim)
    attention += _FLOAT32 * decoder.num_attention_heads  # the logarithm of each sum of weights
    dense = width * matrices * decoder.intermediate_size
    experts = width * (
        decoder.num_experts_per_tok * (2 * decoder.hidden_size + matrices * decoder.moe_intermediate_size)
        + matrices * decoder.shared_expert_intermediate_size
    )
    experts += _FLOAT32 * decoder.num_experts  # the router's logits
    num_moe = decoder.num_moe_layers
    return [(decoder.num_hidden_layers - num_moe, attention + dense), (num_moe, attention + experts)]


def _encoder_layers(encoder: Encoder | None, width: int) -> list[tuple[int, int]]:
    """How many layers there are, and the bytes per row in one."""
    if encoder is None:
        return []
    inner = (4 if encoder.gated else 2) * encoder.intermediate_size
    return [(encoder.num_hidden_layers, width * (8 * encoder.hidden_size + inner))]
