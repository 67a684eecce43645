"""A Llama-style decoder over packed documents.

Parameter names, shapes and conventions are those of Hugging Face's ``LlamaForCausalLM``, so that a checkpoint
exports by copying. The layers work on the flat stream of a lane's tokens, ``[T, hidden_size]`` with
``T = packs * seq_len``: only attention and the rotary embedding know where a document begins, which
``cu_seqlens`` and ``position_ids`` say.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (the name everyone reads)
from torch import Tensor, nn

from training.config import ModelConfig


class Attention(nn.Module):
    """Causal grouped-query attention within each document."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        q_dim, kv_dim = config.hidden_size, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_dim, bias=False, dtype=dtype)
        self.k_proj = nn.Linear(config.hidden_size, kv_dim, bias=False, dtype=dtype)
        self.v_proj = nn.Linear(config.hidden_size, kv_dim, bias=False, dtype=dtype)
        self.o_proj = nn.Linear(q_dim, config.hidden_size, bias=False, dtype=dtype)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], lengths: list[int]) -> Tensor:
        """Mix the tokens of each document.

        Args:
            x: ``[T, hidden_size]``.
            rotation: cosine and sine per token, ``[T, head_dim]`` each.
            lengths: tokens of each run of the stream; they add up to ``T``.
        """
        # Under tensor parallelism the projections give this rank's heads only, hence -1.
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(0, 1)  # [heads, T, head_dim]
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = attend_within(lengths, rotate(q, rotation), rotate(k, rotation), v)
        return self.o_proj(mixed.transpose(0, 1).flatten(1))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False, dtype=dtype)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False, dtype=dtype)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """``[T, hidden_size]`` to ``[T, hidden_size]``."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each normalised before and added to the residual stream."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        self.self_attn = Attention(config, dtype)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        self.mlp = MLP(config, dtype)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], lengths: list[int]) -> Tensor:
        """``[T, hidden_size]`` to ``[T, hidden_size]``."""
        x = x + self.self_attn(self.input_layernorm(x), rotation, lengths)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class Backbone(nn.Module):
    """Embedding, layers and final norm; HF's ``LlamaModel``."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        self.layers = nn.ModuleList(DecoderLayer(config, dtype) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)

    def forward(self, input_ids: Tensor, position_ids: Tensor, lengths: list[int]) -> Tensor:
        """``[T]`` token ids to ``[T, hidden_size]``."""
        x = self.embed_tokens(input_ids)
        rotation = rotary_table(position_ids, self.config.head_dim, self.config.rope_theta, x.dtype)
        for layer in self.layers:
            x = layer(x, rotation, lengths)
        return self.norm(x)  # type: ignore[no-any-return]


class CausalLM(nn.Module):
    """The decoder with its output matrix; HF's ``LlamaForCausalLM``.

    Args:
        config: the sizes.
        dtype: type of the parameters and of all arithmetic.
        seed: of the initial weights. Each parameter is drawn from a generator seeded by ``seed`` and its name, so
            that the weights do not depend on the order of construction, and those of one layer not on how many
            layers there are.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        self.config = config
        with torch.device("meta"):
            self.model = Backbone(config, dtype)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype)
        self.to_empty(device="cpu")
        self.tie_weights()
        for name, parameter in self.named_parameters():
            _initialise(name, parameter, seed)

    def tie_weights(self) -> None:
        """Make the output matrix the embedding again, where the configuration says so.

        Needed after anything that replaces parameters module by module.
        """
        if self.config.tie_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Logits of the next token.

        Args:
            input_ids: int64 ``[packs, seq_len]``.
            position_ids: int64 ``[packs, seq_len]``, the position within the document.
            cu_seqlens: integer ``[k + 1]``, where the runs of the flattened stream begin, from 0 to
                ``packs * seq_len``. No token sees one of another run.

        Returns:
            ``[packs * seq_len, vocab_size]``, in the dtype of the parameters.
        """
        lengths: list[int] = cu_seqlens.diff().tolist()
        hidden = self.model(input_ids.flatten(), position_ids.flatten(), lengths)
        return self.lm_head(hidden)  # type: ignore[no-any-return]


def attend_within(lengths: list[int], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention inside consecutive runs of a token stream.

    One call per run instead of one with a mask: the work is the sum of the squared lengths, not the square of
    the sum, and no logit outside the run is ever computed.

    Args:
        lengths: tokens of each run; they add up to ``T``.
        q: ``[heads, T, head_dim]``.
        k: ``[kv_heads, T, head_dim]``; each kv head serves ``heads / kv_heads`` consecutive query heads.
        v: like ``k``.

    Returns:
        ``[heads, T, head_dim]``.
    """
    grouped = q.shape[0] != k.shape[0]
    runs = zip(*(torch.split(x, lengths, dim=1) for x in (q, k, v)), strict=True)
    return torch.cat(
        [
            F.scaled_dot_product_attention(
                q_run[None], k_run[None], v_run[None], is_causal=True, enable_gqa=grouped
            )[0]
            for q_run, k_run, v_run in runs
        ],
        dim=1,
    )


def rotary_table(
    position_ids: Tensor, head_dim: int, theta: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotary embedding, ``[T, head_dim]`` each, in HF's half-and-half convention.

    The angles are taken in float32 whatever ``dtype`` is, as HF does.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    angles = torch.outer(position_ids.float(), 1.0 / theta**exponent).repeat(1, 2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Apply the rotary embedding (Su et al., arXiv 2104.09864) to ``[heads, T, head_dim]``."""
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def hf_config(config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The ``config.json`` with which Hugging Face's ``LlamaForCausalLM`` loads these parameters."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


@torch.no_grad()
def _initialise(name: str, parameter: nn.Parameter, seed: int) -> None:
    if parameter.ndim == 1:
        parameter.fill_(1.0)
        return
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    # torch keeps 64 bits of a seed, but refuses those with the highest bit set.
    generator = torch.Generator().manual_seed(int.from_bytes(digest) >> 1)
    # Drawn in float32 always: the same numbers whatever type the model trains in.
    parameter.copy_(torch.randn(parameter.shape, generator=generator).mul_(0.02))
