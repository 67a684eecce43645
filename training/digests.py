"""Digests of the full weights in memory, to compare with what a checkpoint or an export holds."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor


def tensor_digests(model: nn.Module) -> dict[str, dict[str, Any]]:
    """``dtype``, ``shape`` and ``xxh3_128`` of every full tensor of a model, by name; every rank must call it.

    The digest is of the contiguous little-endian bytes. Tensors are gathered one at a time.
    """
    digests = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        full = tensor.detach()
        if isinstance(full, DTensor):
            full = full.full_tensor()
        full = full.contiguous()
        digests[name] = {
            "dtype": str(full.dtype).removeprefix("torch."),
            "shape": list(full.shape),
            "xxh3_128": xxhash.xxh3_128_hexdigest(full.reshape(-1).view(torch.uint8).numpy()),
        }
    return digests


def write_final_state(model: nn.Module, step: int, out: Path) -> None:
    """Write ``final_state.json`` under ``out``; every rank must call it, rank 0 writes.

    Args:
        model: whose full tensors are digested.
        step: number of steps done.
        out: folder of the run.
    """
    # torch warns that it gathers a tensor cut along two axes in two hops. Nothing else could be done.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    tensors = tensor_digests(model)
    if dist.get_rank() == 0:
        text = json.dumps({"step": step, "tensors": tensors}, indent=1)
        (out / "final_state.json").write_text(text + "\n", encoding="utf-8")
