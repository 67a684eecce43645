"""The mesh, and the model cut over it: FSDP2 along ``dp``, tensor parallelism along ``tp``.

Neither the loss nor the gradients depend on the shape of the mesh, except in the order of float additions:

* each rank adds up the loss of its lanes, divided by the target count of the *whole* step;
* FSDP sums gradients over ``dp`` and does not average them;
* tensor parallelism splits matrices by whole heads, feed-forward columns and vocabulary rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore  # torch.distributed does not list it for type checkers
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from training.config import ModelConfig
from training.errors import LayoutError
from training.model import CausalLM


@contextmanager
def process_group(timeout_s: float) -> Iterator[None]:
    """Join the gloo group that ``torchrun`` describes in the environment, or be a group of one without it.

    Args:
        timeout_s: limit of every collective, in seconds.
    """
    timeout = timedelta(seconds=timeout_s)
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo", timeout=timeout)
    else:
        dist.init_process_group("gloo", timeout=timeout, store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def build_mesh(tp: int, model: ModelConfig) -> DeviceMesh:
    """The mesh ``(dp, tp)`` of all ranks; neighbours share a ``tp`` group.

    Raises:
        LayoutError: ``tp`` does not divide the number of ranks or a dimension that it has to cut.
    """
    world_size = dist.get_world_size()
    if world_size % tp:
        raise LayoutError(f"parallel.tp: {tp} does not divide the {world_size} ranks of this job")
    for name in ("num_heads", "num_kv_heads", "intermediate_size", "vocab_size"):
        size = getattr(model, name)
        if size % tp:
            raise LayoutError(
                f"parallel.tp: {tp} does not divide model.{name}: {size}; nearest that does: "
                f"{size - size % tp or tp} or {size - size % tp + tp}"
            )
    return init_device_mesh("cpu", (world_size // tp, tp), mesh_dim_names=("dp", "tp"))


def parallelise(model: CausalLM, mesh: DeviceMesh) -> None:
    """Cut a model with its full weights over ``mesh``, in place and without communication.

    Afterwards its parameters are DTensors along the axes that are longer than 1.
    """
    if mesh["tp"].size() > 1:
        _cut_layers(model, mesh["tp"])
    if mesh["dp"].size() > 1:
        for layer in model.model.layers:
            _shard(layer, mesh["dp"])
        _shard(model, mesh["dp"])


@contextmanager
def accumulate(model: nn.Module, *, last: bool) -> Iterator[None]:
    """Around forward and backward of one of a step's microbatches: communicate gradients in the ``last`` only.

    Until then parameters stay gathered and gradients add up unsharded.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)
    yield


def _shard(module: nn.Module, axis: DeviceMesh) -> None:
    fully_shard(module, mesh=axis, reshard_after_forward=False)
    assert isinstance(module, FSDPModule)
    # A sum, not a mean. Gloo knows neither NCCL's AVG nor its PREMUL_SUM, which a factor alone would select.
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)


def _cut_layers(model: CausalLM, axis: DeviceMesh) -> None:
    """Tensor parallelism after Megatron-LM (arXiv 1909.08053): columns, then rows, one all-reduce in between.

    Activations between the blocks are replicated. The logits stay cut along the vocabulary, as a DTensor, for
    `torch.distributed.tensor.parallel.loss_parallel`.
    """

    # Cast to a DTensor once per block and not once per projection: one all-reduce of gradients instead of three.
    def whole_input(num_others: int) -> PrepareModuleInput:
        layouts = (Replicate(), *[None] * num_others)
        return PrepareModuleInput(input_layouts=layouts, desired_input_layouts=layouts)

    plan: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "model.layers.*.self_attn": whole_input(2),
        "model.layers.*.self_attn.q_proj": ColwiseParallel(),
        "model.layers.*.self_attn.k_proj": ColwiseParallel(),
        "model.layers.*.self_attn.v_proj": ColwiseParallel(),
        "model.layers.*.self_attn.o_proj": RowwiseParallel(),
        "model.layers.*.mlp": whole_input(0),
        "model.layers.*.mlp.gate_proj": ColwiseParallel(),
        "model.layers.*.mlp.up_proj": ColwiseParallel(),
        "model.layers.*.mlp.down_proj": RowwiseParallel(),
        "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    # src_data_rank=None: every rank drew the same weights and cuts its own part.
    parallelize_module(model, axis, plan, src_data_rank=None)
    model.tie_weights()
