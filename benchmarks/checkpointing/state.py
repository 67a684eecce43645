"""A training state of a wanted size: the matrices of a small decoder and AdamW's moments for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

_BYTES_PER_PARAMETER = 12
"""float32 weight and two float32 moments."""


class _Block(nn.Module):
    """The parameters of a decoder block; never run forward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = width * 8 // 3
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width // 4, bias=False)
        self.v = nn.Linear(width, width // 4, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)
        self.attention_norm = nn.RMSNorm(width)
        self.mlp_norm = nn.RMSNorm(width)


class _Decoder(nn.Module):
    def __init__(self, width: int, depth: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(_Block(width) for _ in range(depth))
        self.norm = nn.RMSNorm(width)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingState:
    """What a trainer holds on this rank."""

    model: nn.Module
    """With AdamW's gradients already gone."""
    optimizer: torch.optim.Optimizer
    """With its moments."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """This rank's part of every tensor, by name; shares memory with the live state."""
        tensors = {}
        for name, parameter in self.model.named_parameters():
            tensors[name] = _local(parameter)
            for key, value in self.optimizer.state[parameter].items():
                tensors[f"{name}.{key}"] = _local(value)
        return tensors

    @property
    def num_bytes(self) -> int:
        """Bytes of `tensors`."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def training_state(num_bytes: int, *, shard: bool = False, flat: bool = False) -> TrainingState:
    """Build a state of about ``num_bytes`` over all ranks, one AdamW step old.

    Args:
        num_bytes: of weights and moments together.
        shard: cut it over the ranks of the default process group with FSDP2.
        flat: flatten it and cut that over the ranks, with FSDP1.
    """
    torch.manual_seed(0)
    depth = 12
    width = 64
    # Per block 6.5 width² and three times 8/3 width² less rounding; an embedding of 16 rows per column.
    while (10.5 * depth + 16) * (width + 64) ** 2 * _BYTES_PER_PARAMETER <= num_bytes:
        width += 64
    model: nn.Module = _Decoder(width, depth, 16 * width)
    if flat:
        policy = ModuleWrapPolicy({_Block})
        # With a mesh its state dicts are of DTensors, which is what asynchronous saves of torch DCP can take.
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        model = FullyShardedDataParallel(
            model,
            auto_wrap_policy=policy,
            device_mesh=mesh,
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )
    if shard:
        assert isinstance(model, _Decoder)
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return TrainingState(model=model, optimizer=optimizer)


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
