"""AdamW, its learning-rate schedule, and gradient clipping that is right on any mix of meshes."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from training.config import OptimizerConfig


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over all parameters; only matrices decay."""
    parameters = list(model.parameters())
    return torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
    )


def learning_rate(step: int, num_steps: int, config: OptimizerConfig) -> float:
    """Linear warm-up, then a cosine down to ``lr * min_lr_ratio``; a function of the step alone.

    Args:
        step: counted from 0.
        num_steps: steps of the whole run.
        config: the schedule.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, num_steps - 1 - config.warmup_steps)
    low = config.lr * config.min_lr_ratio
    return low + (config.lr - low) * (1 + math.cos(math.pi * min(1.0, progress))) / 2


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    """Scale all gradients so that their global 2-norm is at most ``max_norm``.

    Every element of a gradient counts once, however many ranks hold it: each rank adds up the squares of its own
    parts, divided by the number of ranks that hold the same part, and the sum runs over the whole job. Hence
    parameters may live on different meshes or on none. The sum is in float64, so the norm does not depend on
    how the gradients are cut beyond rounding in that type.

    Args:
        parameters: of the model, the same on every rank; those without gradient are left alone. Gradients are
            plain tensors, equal on all ranks, or DTensors that are sharded or replicated.
        max_norm: the limit, positive.

    Returns:
        The norm before clipping, the same on every rank.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    local = [_local(gradient) for gradient in gradients]
    world_size = dist.get_world_size()
    squares = torch.zeros((), dtype=torch.float64)
    for gradient, part in zip(gradients, local, strict=True):
        copies = world_size / _num_distinct_parts(gradient)
        squares += part.double().square().sum() / copies
    dist.all_reduce(squares)
    norm = math.sqrt(squares.item())
    if norm > max_norm:
        torch._foreach_mul_(local, max_norm / norm)
    return norm


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _num_distinct_parts(gradient: Tensor) -> int:
    """Into how many parts, no two of which hold the same element, the ranks have cut a gradient."""
    if not isinstance(gradient, DTensor):
        return 1
    assert not any(placement.is_partial() for placement in gradient.placements)
    mesh = gradient.device_mesh
    return math.prod(
        mesh.size(axis) for axis, placement in enumerate(gradient.placements) if not placement.is_replicate()
    )
