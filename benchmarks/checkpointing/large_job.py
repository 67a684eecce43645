"""What the ranks of a very large training job hold, without the job: boxes of a decoder of 405 billion parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from checkpoint.planner.description import encode

Ints = npt.NDArray[np.int64]

_STATES = {
    "model/{}": "bfloat16",
    "optimizer/state.{}.exp_avg": "float32",
    "optimizer/state.{}.exp_avg_sq": "float32",
    "optimizer/state.{}.master": "float32",
}
"""What there is of each parameter, by group and key, with its element type. With it goes a 0-d ``step`` on every rank
that holds a part of the parameter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LargeJob:
    """A decoder under fully sharded data parallelism x tensor parallelism x pipeline parallelism, with AdamW.

    The defaults are those of Llama 3.1 405B on 8,960 ranks, numbered along (pipeline, data, tensor).
    """

    dp: int = 70
    """Ranks that each shard of a parameter is sharded over once more."""
    tp: int = 8
    """Ranks that matrices are sharded over; norms are replicated on them."""
    pp: int = 16
    """Stages, each with a part of the layers."""
    num_layers: int = 126
    """Layers."""
    dim: int = 16_384
    """Width of the residual stream."""
    ffn_dim: int = 53_248
    """Width inside of the feed-forward layers."""
    kv_dim: int = 1024
    """Width of keys and of values."""
    vocab: int = 128_256
    """Rows of the embedding, and of the output."""

    @property
    def num_ranks(self) -> int:
        """Ranks of the job."""
        return self.dp * self.tp * self.pp

    def parameters(self, stage: int) -> Iterator[tuple[str, tuple[int, ...], int | None]]:
        """Name, shape and tensor-parallel dimension of the parameters of a stage."""
        if stage == 0:
            yield "tok_embeddings.weight", (self.vocab, self.dim), 0
        for layer in np.array_split(np.arange(self.num_layers), self.pp)[stage].tolist():
            for name, shape, dim in (
                ("attention.wq.weight", (self.dim, self.dim), 0),
                ("attention.wk.weight", (self.kv_dim, self.dim), 0),
                ("attention.wv.weight", (self.kv_dim, self.dim), 0),
                ("attention.wo.weight", (self.dim, self.dim), 1),
                ("feed_forward.w1.weight", (self.ffn_dim, self.dim), 0),
                ("feed_forward.w2.weight", (self.dim, self.ffn_dim), 1),
                ("feed_forward.w3.weight", (self.ffn_dim, self.dim), 0),
                ("attention_norm.weight", (self.dim,), None),
                ("ffn_norm.weight", (self.dim,), None),
            ):
                yield f"layers.{layer}.{name}", shape, dim
        if stage == self.pp - 1:
            yield "norm.weight", (self.dim,), None
            yield "output.weight", (self.vocab, self.dim), 0

    def messages(self) -> Iterator[bytes]:
        """What each rank tells the planner, in order of rank."""
        for stage in range(self.pp):
            catalog, boxes = self._stage(stage)
            for column in range(self.dp * self.tp):
                offsets, lengths = boxes[:, :2, column], boxes[:, 2:, column]
                held = np.flatnonzero((lengths > 0).all(axis=1))
                yield encode(catalog, np.vstack([held, offsets[held].T, lengths[held].T]))

    def _stage(self, stage: int) -> tuple[list[tuple[str, str, str, tuple[int, ...], int]], Ints]:
        """The tensors of a stage, and offsets and lengths of the box of each on each of its ranks."""
        found = {}
        for name, shape, tp_dim in self.parameters(stage):
            box = self._boxes(shape, tp_dim)
            for key, dtype in _STATES.items():
                found[tuple(key.format(name).split("/"))] = (dtype, shape, box)
            found["optimizer", f"state.{name}.step"] = ("float32", (), self._boxes((), None))
        ordered = sorted(found.items())
        catalog = [(group, key, dtype, shape, 0) for (group, key), (dtype, shape, _) in ordered]
        return catalog, np.stack([box for _, (_, _, box) in ordered])

    def _boxes(self, shape: tuple[int, ...], tp_dim: int | None) -> Ints:
        """Offsets and lengths of a parameter's box on each rank of a stage, ``[4, dp * tp]``; some are empty."""
        offsets, lengths = np.zeros((2, self.dp, self.tp), np.int64), np.ones((2, self.dp, self.tp), np.int64)
        for dim, extent in enumerate(shape):
            lengths[dim] = extent
        if tp_dim is not None:
            lengths[tp_dim] //= self.tp
            offsets[tp_dim] = np.arange(self.tp) * lengths[tp_dim]
        if shape:
            chunk = -(-lengths[0] // self.dp)  # as torch.chunk: the last ones may be shorter, or empty
            begin = np.minimum(np.arange(self.dp)[:, None] * chunk, lengths[0])
            lengths[0] = np.minimum(begin + chunk, lengths[0]) - begin
            offsets[0] += begin
        return np.concatenate([offsets, lengths]).reshape(4, -1)
