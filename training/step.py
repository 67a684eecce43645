"""One optimizer step over this rank's lanes of a global step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  (the name everyone reads)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from training.errors import ConfigError
from training.model import CausalLM
from training.optim import clip_gradients
from training.parallel import accumulate

Lane = Mapping[str, Any]
"""A microbatch as `omniload.DataLoader` yields it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What a step came to; the same on every rank."""

    loss: float
    """Mean cross entropy over the targets of the global step, in nats."""
    grad_norm: float
    """Global 2-norm of the gradients before clipping."""
    tokens: int
    """Tokens of documents in the global step; padding does not count."""
    stop: bool
    """Some rank was asked to stop."""


def train_step(
    model: CausalLM,
    optimizer: torch.optim.Optimizer,
    lanes: Sequence[Lane],
    mesh: DeviceMesh,
    *,
    lr: float,
    clip_norm: float,
    stop: bool = False,
) -> StepResult:
    """Train on one global step; every rank calls it with its own lanes.

    The gradient is exactly that of the loss summed over all targets of the step, divided by their number: which
    rank ran which lane shows only in the order of float additions.

    Args:
        model: cut over ``mesh`` by `training.parallel.parallelise`.
        optimizer: of the model's parameters.
        lanes: of this rank, at least one and on every rank as many; ranks along ``tp`` get the same ones.
        mesh: with axes ``dp`` and ``tp``.
        lr: learning rate of this step.
        clip_norm: limit of the gradients' global 2-norm.
        stop: this rank was asked to stop; shared with the others on the way.

    Raises:
        ConfigError: a token is outside the model's vocabulary.
    """
    # One all-reduce carries all that the ranks have to agree on: loss, tokens, stop.
    totals = torch.zeros(3, dtype=torch.float64)
    totals[0] = backward(model, lanes)
    totals[1] = sum(int(lane["segment_ids"].count_nonzero()) for lane in lanes)
    totals[2] = stop
    dist.all_reduce(totals)
    totals /= mesh["tp"].size()  # each tp rank of a group has added the same lanes
    grad_norm = clip_gradients(model.parameters(), clip_norm)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad()
    loss_value, tokens, stops = totals.tolist()
    return StepResult(loss=loss_value, grad_norm=grad_norm, tokens=round(tokens), stop=stops > 0)


def backward(model: CausalLM, lanes: Sequence[Lane]) -> float:
    """Add the gradients of a step's lanes, and communicate them with the last one's.

    Args:
        model: cut over a mesh or not.
        lanes: of this rank.

    Returns:
        This rank's part of the mean cross entropy of the step.
    """
    part = 0.0
    for index, lane in enumerate(lanes):
        check_tokens(model, lane)
        # Under tensor parallelism the logits are a DTensor cut along the vocabulary, and so is their loss computed.
        with accumulate(model, last=index == len(lanes) - 1), loss_parallel():
            logits = model(lane["input_ids"], lane["position_ids"], lane["cu_seqlens"])
            loss_sum = F.cross_entropy(logits, lane["targets"].flatten(), reduction="sum", ignore_index=-100)
            loss = loss_sum / lane["num_target_tokens"]
            loss.backward()
        loss = loss.detach()
        part += (loss.to_local() if isinstance(loss, DTensor) else loss).item()
    return part


def check_tokens(model: CausalLM, lane: Lane) -> None:
    """Refuse tokens that the embedding has no row for.

    Raises:
        ConfigError: names the token, where it is, and the key to change.
    """
    largest, limit = int(lane["input_ids"].max()), model.config.vocab_size
    if largest >= limit:
        raise ConfigError(
            f"step {lane['step']}, lane {lane['lane']}: token {largest} is outside model.vocab_size: {limit}; "
            "set it to at least the tokenizer's"
        )
