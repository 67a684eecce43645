"""Modules: parameters and persistent buffers by name, each stored once."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from checkpoint.errors import MismatchError, StateError, UnsupportedLayout
from checkpoint.frameworks.trees import plain
from checkpoint.frameworks.values import LocalTensor, Rows

# Path segments that torch.compile and activation checkpointing insert.
_WRAPPER_SEGMENTS = {"_orig_mod", "_checkpoint_wrapped_module"}
_EXTRA_STATE = "_extra_state"


class ModuleGroup:
    """A module in the state: plain, DDP, or with DTensor parameters (FSDP2, tensor parallelism).

    Names are those of the bare module: segments that DDP, ``torch.compile`` and activation checkpointing add
    are taken out. Tensors that are the same object (tied weights) are one entry under their first name; the
    others are recorded as aliases.

    The tensors come from ``state_dict(keep_vars=True)``: its hooks bring FSDP2 parameters back to their
    sharded form, while ``named_parameters()`` yields full ones after an evaluation.

    Attributes:
        name: The group.
        names: Names of each tensor by its ``id``, in the order of the module.
    """

    kind = "module"

    def __init__(self, name: str, module: nn.Module) -> None:
        """Read the names.

        Raises:
            UnsupportedLayout: For FSDP1.
            StateError: If the state dict holds something that loading in place could not restore.
        """
        self.name = name
        self.names: dict[int, list[str]] = {}
        self._module = module
        self._live: dict[int, torch.Tensor] = {}
        self._extra: dict[str, tuple[str, object]] = {}  # clean name to (name of the owning module, value)
        if any(isinstance(part, FullyShardedDataParallel) for part in module.modules()):
            raise UnsupportedLayout(
                f"{name}: FSDP1 is not supported; wrap the module with fully_shard() (FSDP2)"
            )
        entries = module.state_dict(keep_vars=True)
        owned = {id(tensor) for tensor in itertools.chain(module.parameters(), module.buffers())}
        seen: set[str] = set()
        clean = _Cleaner(module)
        for raw, value in entries.items():
            key = clean(raw)
            if key in seen:
                raise StateError(f"{name}: two entries of the module are called '{key}'")
            seen.add(key)
            if isinstance(value, torch.Tensor) and id(value) in owned:
                if is_lazy(value):
                    raise StateError(f"{name}: {key} has no shape yet; run the module once before")
                self.names.setdefault(id(value), []).append(key)
                self._live[id(value)] = value
            elif raw.rpartition(".")[2] == _EXTRA_STATE and not isinstance(value, torch.Tensor):
                self._extra[key] = (raw.rpartition(".")[0], value)
            else:
                raise StateError(
                    f"{name}: state_dict() gives '{key}' as a {type(value).__name__} that is not a parameter or "
                    "buffer of the module, so it could not be loaded in place; remove the state-dict hook"
                )

    def tensors(self) -> list[LocalTensor]:
        """Parameters and persistent buffers under their first names."""
        return [LocalTensor.of(self.name, self.names[at][0], live) for at, live in self._live.items()]

    def objects(self) -> dict[str, object]:
        """Aliases (other name to first name), and extra state by name."""
        aliases = {other: first for first, *others in self.names.values() for other in others}
        extra = {key: plain(f"{self.name}.{key}", value) for key, (_, value) in self._extra.items()}
        return {"aliases": aliases, "extra": extra}

    def targets(self, rows: Rows, stored: Mapping[str, Any], *, strict: bool) -> list[LocalTensor]:
        """The live tensors, each under that of its names which is stored.

        Raises:
            MismatchError: If ``strict`` and a tensor is stored only as an alias of another one, or extra state
                differs.
        """
        found = []
        for at, names in self.names.items():
            key = next((name for name in names if name in rows), names[0])
            if strict and key not in rows and key in stored["aliases"]:
                raise MismatchError(
                    f"{self.name}: {key} is tied to {stored['aliases'][key]} in the checkpoint but not in the "
                    "module; tie them before loading, or load with strict=False"
                )
            found.append(LocalTensor.of(self.name, key, self._live[at]))
        differing = sorted(self._extra.keys() ^ stored["extra"].keys())
        if strict and differing:
            where = "checkpoint" if differing[0] in self._extra else "module"
            raise MismatchError(f"{self.name}: extra state {differing[0]} is missing in the {where}")
        return found

    def apply(self, stored: Mapping[str, Any], targets: list[LocalTensor]) -> None:
        """Hand extra state to the modules that own it."""
        for key, (owner, _) in self._extra.items():
            if key in stored["extra"]:
                self._module.get_submodule(owner).set_extra_state(stored["extra"][key])


class _Cleaner:
    """Takes wrapper segments out of the names of one module's state."""

    def __init__(self, module: nn.Module) -> None:
        # Only DDP's own "module" segment goes: a user's child may carry that name.
        self._ddp_prefixes = {
            _join(_unwrapped(path.split("."))) if path else ""
            for path, part in module.named_modules(remove_duplicate=False)
            if isinstance(part, DistributedDataParallel)
        }

    def __call__(self, raw: str) -> str:
        kept: list[str] = []
        path: list[str] = []
        for segment in _unwrapped(raw.split(".")):
            if not (segment == "module" and _join(path) in self._ddp_prefixes):
                kept.append(segment)
            path.append(segment)
        return _join(kept)


def _unwrapped(segments: list[str]) -> list[str]:
    return [segment for segment in segments if segment not in _WRAPPER_SEGMENTS]


def _join(segments: list[str]) -> str:
    return ".".join(segments)
