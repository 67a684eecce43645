"""Modules: parameters and persistent buffers by name, each stored once."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from checkpoint.errors import MismatchError, StateError
from checkpoint.frameworks import fsdp1
from checkpoint.frameworks.flat import Held, describe
from checkpoint.frameworks.trees import plain
from checkpoint.frameworks.values import Leeway, LocalTensor, Rows

# Path segments that torch.compile, activation checkpointing and FSDP1 insert.
_WRAPPER_SEGMENTS = {"_orig_mod", "_checkpoint_wrapped_module", fsdp1.WRAPPER_SEGMENT}
_EXTRA_STATE = "_extra_state"


class ModuleGroup:
    """A module in the state: plain, DDP, FSDP1, or with DTensor parameters (FSDP2, tensor parallelism).

    Names are those of the bare module: segments that DDP, FSDP1, ``torch.compile`` and activation checkpointing
    add are taken out. Tensors that are the same object (tied weights) are one entry under their first name; the
    others are recorded as aliases.

    The tensors come from ``state_dict(keep_vars=True)``: its hooks bring FSDP2 parameters back to their
    sharded form, while ``named_parameters()`` yields full ones after an evaluation. With FSDP1, whose hooks
    gather, they come from the modules themselves and from the shards.

    Attributes:
        name: The group.
        held: What each tensor holds by its ``id``, which is that of the parameter in an optimizer.
    """

    kind = "module"

    def __init__(self, name: str, module: nn.Module) -> None:
        """Read the names.

        Raises:
            UnsupportedLayout: For parameters that FSDP1 did not flatten in row-major order.
            StateError: If the state dict holds something that loading in place could not restore.
        """
        self.name = name
        self.held: dict[int, list[Held]] = {}
        self._module = module
        self._memory: dict[int, torch.Tensor] = {}
        self._extra: dict[str, tuple[str, object]] = {}  # clean name to (name of the owning module, value)
        parts = self._parts = list(module.named_modules(remove_duplicate=False))
        self._uses_fsdp1 = fsdp1.uses_fsdp1(parts)
        entries = fsdp1.entries(parts) if self._uses_fsdp1 else module.state_dict(keep_vars=True)
        owned = {
            id(tensor)
            for _, part in parts
            for tensor in itertools.chain(part._parameters.values(), part._buffers.values())
        }
        seen: set[str] = set()
        ddp_prefixes = _ddp_prefixes(parts)

        def named(raw: str) -> str:
            key = _clean(raw, ddp_prefixes)
            if key in seen:
                raise StateError(f"{name}: two entries of the module are called '{key}'")
            seen.add(key)
            return key

        for flat in fsdp1.flat_tensors(name, parts):
            self.held[id(flat.param)] = [
                Held(names=[named(raw) for raw in one.names], part=one.part) for one in flat.held
            ]
            self._memory[id(flat.param)] = flat.memory
        flattened = set(self.held)
        for raw, value in entries.items():
            if id(value) in flattened:
                continue
            key = named(raw)
            if isinstance(value, torch.Tensor) and id(value) in owned:
                if is_lazy(value):
                    raise StateError(f"{name}: {key} has no shape yet; run the module once before")
                if id(value) in self._memory:
                    self.held[id(value)][0].names.append(key)
                else:
                    self.held[id(value)] = [Held(names=[key])]
                    self._memory[id(value)] = value
            elif raw.rpartition(".")[2] == _EXTRA_STATE and not isinstance(value, torch.Tensor):
                self._extra[key] = (raw.rpartition(".")[0], value)
            else:
                raise StateError(
                    f"{name}: state_dict() gives '{key}' as a {type(value).__name__} that is not a parameter or "
                    "buffer of the module, so it could not be loaded in place; remove the state-dict hook"
                )

    def tensors(self) -> list[LocalTensor]:
        """Parameters and persistent buffers under their first names."""
        found = []
        for at, held in self.held.items():
            memory = self._memory[at]
            for one in held:
                local = describe(self.name, one.names[0], memory, one.part)
                # Running statistics are those of the rank's own batches; DDP takes the ones of rank 0.
                local.may_differ = one.part is None and not isinstance(memory, nn.Parameter)
                found.append(local)
        return found

    def objects(self) -> dict[str, object]:
        """Aliases (other name to first name), and extra state by name."""
        names = [one.names for held in self.held.values() for one in held]
        aliases = {other: first for first, *others in names for other in others}
        extra = {key: plain(f"{self.name}.{key}", value) for key, (_, value) in self._extra.items()}
        return {"aliases": aliases, "extra": extra}

    def targets(self, rows: Rows, stored: Mapping[str, Any], leeway: Leeway) -> list[LocalTensor]:
        """The live tensors, each under that of its names which is stored.

        Raises:
            MismatchError: If a tensor is stored only as an alias of another one and may not be missing, or if
                strict and there is extra state that the module has no place for.
        """
        found = []
        for at, one in ((at, one) for at, held in self.held.items() for one in held):
            key = next((name for name in one.names if name in rows), one.names[0])
            if key not in rows and key in stored["aliases"] and not leeway.may_lack(self.name, key):
                raise MismatchError(
                    f"{self.name}: {key} is tied to {stored['aliases'][key]} in the checkpoint but not in the "
                    "module; tie them before loading, name it in allow_missing, or load with strict=False"
                )
            found.append(describe(self.name, key, self._memory[at], one.part))
        unexpected = sorted(stored["extra"].keys() - self._extra.keys())
        if leeway.strict and unexpected:
            raise MismatchError(
                f"{self.name}: the checkpoint has extra state {unexpected[0]}, the module has not; load into the "
                "module that was saved, or pass strict=False to leave it out"
            )
        return found

    def missing(self, stored: Mapping[str, Any]) -> list[str]:
        """Names of extra state that is not stored."""
        return sorted(self._extra.keys() - stored.get("extra", {}).keys())

    def apply(self, stored: Mapping[str, Any], targets: list[LocalTensor]) -> None:
        """Hand extra state to the modules that own it, and let FSDP1 gather anew."""
        if self._uses_fsdp1:
            fsdp1.reshard(self._parts)
        for key, (owner, _) in self._extra.items():
            if key in stored["extra"]:
                self._module.get_submodule(owner).set_extra_state(stored["extra"][key])


def _ddp_prefixes(parts: fsdp1.Parts) -> frozenset[str]:
    """Paths of what DDP wraps, without wrapper segments."""
    return frozenset(
        _join(_unwrapped(path.split("."))) if path else ""
        for path, part in parts
        if isinstance(part, DistributedDataParallel)
    )


@lru_cache(maxsize=65536)  # the same names at each save
def _clean(raw: str, ddp_prefixes: frozenset[str]) -> str:
    """A name without wrapper segments; of DDP only its own "module" goes, since a user's child may be called that."""
    kept: list[str] = []
    path: list[str] = []
    for segment in _unwrapped(raw.split(".")):
        if not (segment == "module" and _join(path) in ddp_prefixes):
            kept.append(segment)
        path.append(segment)
    return _join(kept)


def _unwrapped(segments: list[str]) -> list[str]:
    return [segment for segment in segments if segment not in _WRAPPER_SEGMENTS]


def _join(segments: list[str]) -> str:
    return ".".join(segments)
