"""FSDP1 (``FullyShardedDataParallel``): what this rank's shards of the flat parameters hold.

All that is needed lies in the handle of each wrapped module, so nothing is gathered. PyTorch has no public way to
it: its state dicts gather every parameter, even to shard it anew, or know nothing but flat parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._runtime_utils import _reshard

from checkpoint.errors import UnsupportedLayout
from checkpoint.frameworks.flat import FlatPart, Held

WRAPPER_SEGMENT = "_fsdp_wrapped_module"
"""Path segment that FSDP1 inserts."""

Parts: TypeAlias = Sequence[tuple[str, nn.Module]]
"""A module and all in it by path, as of ``named_modules(remove_duplicate=False)``: a shared one has several."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FlatTensor:
    """A parameter as an optimizer has it, and its shard.

    Attributes:
        param: The flat parameter, or with ``use_orig_params`` one of the original parameters. Its shape and data are
            the unsharded ones at times.
        memory: The shard in full precision, shape ``[n]``; the same while sharded and unsharded.
        held: The original parameters in it, under their raw names in the module, wrapper segments included.
    """

    param: torch.Tensor
    memory: torch.Tensor
    held: list[Held]


def uses_fsdp1(parts: Parts) -> bool:
    """Whether a module or a part of it is wrapped with FSDP1."""
    return any(isinstance(part, FullyShardedDataParallel) for _, part in parts)


def entries(parts: Parts) -> dict[str, Any]:
    """``module.state_dict(keep_vars=True)`` without its hooks, which with FSDP1 would gather.

    Flat parameters appear as they are registered at the moment, or not at all.
    """
    found: dict[str, Any] = {}
    for path, part in parts:
        part._save_to_state_dict(found, f"{path}." if path else "", True)
    return found


def flat_tensors(name: str, parts: Parts) -> list[FlatTensor]:
    """The flattened parameters of a module; those of ``NO_SHARD`` with ``use_orig_params`` are ordinary ones.

    Args:
        name: What to call the module in errors.
        parts: The module.

    Raises:
        UnsupportedLayout: If a parameter was a DTensor, or not contiguous, when it was flattened.
    """
    found: list[FlatTensor] = []
    for part, prefixes in _wrapped(parts).items():
        handle: Any = part._handle
        if handle._use_orig_params:
            if not handle.uses_sharded_strategy:
                continue
            # What an optimizer or a user put in place of a parameter's memory, FSDP1 copies into the shard before the
            # next forward pass. It has to be there now.
            handle._writeback_orig_params()
        found += _of_handle(name, handle, prefixes)
    return found


def reshard(parts: Parts) -> None:
    """Drop full parameters that FSDP1 keeps after an evaluation: the shards were written to."""
    for part in _wrapped(parts):
        handle: Any = part._handle
        # Before the first forward pass nothing was gathered, and there is nothing to drop.
        if handle.uses_sharded_strategy and hasattr(handle.flat_param, "_local_shard"):
            _reshard(part, handle, True)


def _wrapped(parts: Parts) -> dict[FullyShardedDataParallel, list[str]]:
    """The wrapped modules that have a flat parameter, with their paths: a shared module has several."""
    paths: dict[FullyShardedDataParallel, list[str]] = {}
    for path, part in parts:
        if isinstance(part, FullyShardedDataParallel) and part._handle is not None:
            paths.setdefault(part, []).append(path)
    return paths


def _of_handle(name: str, handle: Any, prefixes: Iterable[str]) -> Iterator[FlatTensor]:
    flat = handle.flat_param
    memory = cast("torch.Tensor", getattr(flat, "_local_shard", flat.data))
    names = _names(flat, prefixes)
    parts: list[FlatPart] = []
    for index, info in enumerate(flat._shard_param_infos):
        shown = names[index][0].replace(f"{WRAPPER_SEGMENT}.", "")
        if flat._param_extensions[index] is not None:
            raise UnsupportedLayout(
                f"{name}: {shown} is a DTensor that FSDP1 flattened; wrap the module with fully_shard() "
                "(FSDP2) instead"
            )
        if not flat._contiguities[index]:
            raise UnsupportedLayout(
                f"{name}: {shown} was not contiguous when FSDP1 flattened it, so its elements are not in "
                "row-major order; make it contiguous() before wrapping the module"
            )
        length = info.numel_in_shard if info.in_shard else 0
        parts.append(
            FlatPart(
                shape=tuple(flat._shapes[index]),
                start=info.intra_param_start_idx if length else 0,
                offset=info.offset_in_shard if length else 0,
                length=length,
                extent=memory.numel(),
            )
        )
    if not handle._use_orig_params:
        held = [Held(names=own, part=part) for own, part in zip(names, parts, strict=True)]
        yield FlatTensor(param=flat, memory=memory, held=held)
        return
    for param, own, part in zip(flat._params, names, parts, strict=True):
        alone = part._replace(offset=0, extent=part.length)
        shard = memory[part.offset : part.offset + part.length]
        yield FlatTensor(param=param, memory=shard, held=[Held(names=own, part=alone)])


def _names(flat: Any, prefixes: Iterable[str]) -> list[list[str]]:
    """Raw names of each original parameter, those of parameters tied to it after its own."""
    names: dict[str, list[str]] = {fqn: [fqn] for fqn in flat._fqns}
    for shared in flat._shared_param_infos:
        first = _join(shared.prim_module_name, shared.prim_param_name)
        names[first].append(_join(shared.module_name, shared.param_name))
    return [
        [_join(prefix, WRAPPER_SEGMENT, name) for prefix in prefixes for name in names[fqn]]
        for fqn in flat._fqns
    ]


def _join(*segments: str) -> str:
    return ".".join(segment for segment in segments if segment)
