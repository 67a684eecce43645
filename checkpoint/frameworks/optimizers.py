"""Optimizers: state by parameter name, built from the stored rows where it does not exist yet."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from checkpoint.errors import MismatchError, StateError, UnsupportedLayout
from checkpoint.frameworks.flat import FlatPart, describe
from checkpoint.frameworks.modules import ModuleGroup
from checkpoint.frameworks.trees import like, plain
from checkpoint.frameworks.values import Leeway, LocalTensor, Rows
from checkpoint.frameworks.wrapped import check_state_is_here

# Not hyperparameters: the parameters themselves, and PyTorch's own record of their names.
_NOT_HYPERPARAMETERS = {"params", "param_names"}


class _Param(NamedTuple):
    """A parameter of the module, and the parameter of the optimizer that it is, or was flattened into.

    Attributes:
        tensor: The parameter of the optimizer.
        names: Names of the module's parameter in the checkpoint, the first one for saving.
        part: Where it is in state of the optimizer, if that is flattened.
        hyperparameters: The live parameter group it is in.
    """

    tensor: torch.Tensor
    names: list[str]
    part: FlatPart | None
    hyperparameters: dict[str, Any]

    @property
    def is_elsewhere(self) -> bool:
        """Whether it is flattened and this rank has no memory for it, so that state here would not advance."""
        return self.part is not None and not self.part.extent


class OptimizerGroup:
    """A torch optimizer in the state.

    A tensor is stored as ``state.<parameter>.<name>`` or, for a tensor hyperparameter, as
    ``param_groups.<index>.<name>``. Parameters carry the names they have in the module that owns them, found by
    identity, so the order of parameters is free. Where the optimizer's parameters come from several modules
    of the state, the module's group name comes first.

    Hyperparameters go by the parameters they are of: a group takes those of the stored group that has the first of
    its parameters which is stored at all, wherever that stood. A group of new parameters keeps its own.

    State that belongs to no parameter is stored among the plain values, under its own key.

    After loading, the optimizer's state is the stored one and nothing else: a parameter that had no state when
    it was saved has none.

    State of a flat parameter of FSDP1 is stored for each of the parameters in it, and so is what has no
    dimensions, like a step count. It follows that parameters in one flat parameter can be loaded only if these
    are equal; those that had no state get zeros, as FSDP1 gives them.
    """

    kind = "optimizer"

    def __init__(self, name: str, optimizer: Optimizer, modules: Iterable[ModuleGroup]) -> None:
        """Match parameters to modules.

        Raises:
            StateError: If a parameter is in no module of the state, or state is kept where it would be lost.
        """
        check_state_is_here(name, optimizer)
        self.name = name
        self._optimizer = optimizer
        owners = {at: (module.name, held) for module in modules for at, held in module.held.items()}
        used = {
            owners[id(param)][0]
            for group in optimizer.param_groups
            for param in group["params"]
            if id(param) in owners
        }
        self._groups: list[list[_Param]] = []
        for index, group in enumerate(optimizer.param_groups):
            members = []
            for position, param in enumerate(group["params"]):
                if id(param) not in owners:
                    raise StateError(
                        f"{name}: parameter {position} of group {index} (shape {list(param.shape)}) is in no module "
                        "of the state; add the module, and create the optimizer after fully_shard() and to()"
                    )
                owner, held = owners[id(param)]
                prefix = f"{owner}." if len(used) > 1 else ""
                members += [
                    _Param(
                        tensor=param,
                        names=[prefix + own for own in one.names],
                        part=one.part,
                        hyperparameters=group,
                    )
                    for one in held
                ]
            self._groups.append(members)

    def tensors(self) -> list[LocalTensor]:
        """State tensors and tensor hyperparameters."""
        found = []
        for index, members in enumerate(self._groups):
            for key, value in _hyperparameters(self._optimizer.param_groups[index]).items():
                if isinstance(value, torch.Tensor):
                    found.append(LocalTensor.of(self.name, f"param_groups.{index}.{key}", value))
            for param in members:
                for key, value in self._state_of(param).items():
                    if isinstance(value, torch.Tensor) and not param.is_elsewhere:
                        found.append(self._local(f"state.{param.names[0]}.{key}", value, param))
        return found

    def objects(self) -> dict[str, object]:
        """Optimizer class, parameter groups with names for parameters, and state that is not a tensor.

        Raises:
            StateError: If state is of a kind that cannot be saved; names it.
        """
        groups: list[dict[str, object]] = []
        rest: dict[str, dict[str, object]] = {}
        for index, members in enumerate(self._groups):
            hyperparameters = _hyperparameters(self._optimizer.param_groups[index])
            groups.append(
                {
                    "params": [param.names[0] for param in members],
                    "hyperparameters": _plain_items(f"{self.name}.param_groups.{index}", hyperparameters),
                }
            )
            for param in members:
                first = param.names[0]
                if items := _plain_items(f"{self.name}.state.{first}", self._state_of(param)):
                    rest[first] = items
        objects: dict[str, object] = {
            "class": type(self._optimizer).__name__,
            "param_groups": groups,
            "state": rest,
        }
        shared = self._shared_state()
        # Only where there is some: the objects of other optimizers stay as they were.
        return {**objects, "shared": shared} if shared else objects

    def targets(self, rows: Rows, stored: Mapping[str, Any], leeway: Leeway) -> list[LocalTensor]:
        """A destination for every stored tensor of a live parameter or group.

        A live state tensor is used where there is one. Otherwise one is allocated, not yet visible to the
        optimizer: of the parameter's shape, it is laid out like the parameter; of another shape, it is a
        replica on the parameter's mesh; "step" is a plain tensor, on the CPU unless the optimizer wants it
        with the parameter (``capturable``, ``fused``). It has the element type that ``Optimizer.load_state_dict`` would
        give it, that of the parameter, where the leeway allows to convert what is stored, and else the stored one.

        Raises:
            MismatchError: If strict and the class of the optimizer or the parameters of a group differ, or if
                state cannot be flattened as its parameter is.
        """
        if leeway.strict:
            self._check_groups(stored)
        by_name = self._by_stored_name(stored)
        live_group = {at: index for index, at in reversed([*enumerate(self._stored_groups(stored))])}
        found = []
        fresh: dict[tuple[int, str], torch.Tensor] = {}
        for key, (dtype, shape) in rows.items():
            section, _, rest = key.partition(".")
            name, _, item = rest.rpartition(".")
            if section == "state" and name in by_name:
                param = by_name[name]
                live = self._state_of(param).get(item)
                if param.part is not None and shape not in ((), param.part.shape):
                    raise MismatchError(
                        f"{self.name}: {key} has shape {list(shape)} in the checkpoint and cannot be flattened "
                        f"like its parameter of shape {list(param.part.shape)}; load it into a module without FSDP1"
                    )
                # One value for each of the parameters in a flat one, to be compared when they have arrived.
                if not isinstance(live, torch.Tensor) or (param.part is not None and not shape):
                    at = id(param.tensor), item if shape else key
                    live = fresh.get(at)
                    if live is None:
                        live = fresh[at] = _allocate(
                            param, item, _dtype(param, item, dtype, shape, leeway), shape
                        )
                found.append(self._local(key, live, param))
            elif section == "param_groups" and name.isdecimal() and int(name) in live_group:
                live = self._optimizer.param_groups[live_group[int(name)]].get(item)
                if not isinstance(live, torch.Tensor):
                    live = torch.empty(shape, dtype=dtype, device="cpu")
                found.append(LocalTensor.of(self.name, key, live))
        return found

    def missing(self, stored: Mapping[str, Any]) -> list[str]:
        """None: hyperparameters that are not stored stay as they are."""
        return []

    def apply(self, stored: Mapping[str, Any], targets: list[LocalTensor]) -> None:
        """Replace state and hyperparameters by the stored ones.

        Raises:
            MismatchError: If parameters in one flat parameter were at different steps.
        """
        by_name = self._by_stored_name(stored)
        state: dict[str, Any] = {name: like(None, stored["state"].get(name, {})) for name in by_name}
        groups = [dict(group["hyperparameters"]) for group in stored["param_groups"]]
        for target in targets:
            section, _, rest = target.key.partition(".")
            name, _, item = rest.rpartition(".")
            (state[name] if section == "state" else groups[int(name)])[item] = target.tensor
        for tensor, items in self._joined(by_name, state).items():
            if items:
                self._optimizer.state[tensor] = items
            else:
                self._optimizer.state.pop(tensor, None)
        self._apply_shared(stored.get("shared", {}))
        taken: set[int] = set()
        for live, index in zip(self._optimizer.param_groups, self._stored_groups(stored), strict=True):
            if index is None:
                continue
            for key, value in groups[index].items():
                if isinstance(value, torch.Tensor) and index in taken:
                    old = live.get(key)
                    live[key] = old.copy_(value) if isinstance(old, torch.Tensor) else value.clone()
                else:
                    live[key] = like(live.get(key), value)
            taken.add(index)

    def _stored_groups(self, stored: Mapping[str, Any]) -> list[int | None]:
        """By group, the stored one that its hyperparameters are in; None if none of its parameters is stored."""
        groups = [group["params"] for group in stored["param_groups"]]
        index_of = {name: index for index, names in enumerate(groups) for name in names}
        found: list[int | None] = []
        for index, members in enumerate(self._groups):
            names = (_known_name(param, index_of) for param in members)
            by_name = next((index_of[name] for name in names if name in index_of), None)
            both_empty = not members and index < len(groups) and not groups[index]
            found.append(index if both_empty else by_name)
        return found

    def _joined(
        self, by_name: Mapping[str, _Param], state: Mapping[str, dict[str, Any]]
    ) -> dict[torch.Tensor, dict[str, Any]]:
        """Stored state by parameter of the optimizer, from that by parameter of the module."""
        joined: dict[torch.Tensor, dict[str, Any]] = {}
        for name, param in by_name.items():
            items = joined.setdefault(param.tensor, {})
            for item, value in ({} if param.is_elsewhere else state[name]).items():
                if not _same(items.setdefault(item, value), value):
                    raise MismatchError(
                        f"{self.name}: {item} of {name} is {value} in the checkpoint, but {items[item]} of another "
                        "parameter in the same flat parameter; wrap the module with use_orig_params=True"
                    )
        for name, param in by_name.items():
            if param.part is not None:
                for item, value in joined[param.tensor].items():
                    if isinstance(value, torch.Tensor) and value.ndim and item not in state[name]:
                        value[param.part.offset : param.part.offset + param.part.length] = 0
        return joined

    def _state_of(self, param: _Param) -> dict[str, Any]:
        # A subscript would create an entry: `state` is a defaultdict.
        state: dict[str, Any] = self._optimizer.state.get(param.tensor, {})
        for key in state:
            if not isinstance(key, str) or "." in key:
                raise StateError(
                    f"{self.name}: state {key!r} of {param.names[0]} must be a name without a dot"
                )
        return state

    def _shared_state(self) -> dict[object, object]:
        """A copy of the state that belongs to no parameter, by its key."""
        own = {param for group in self._optimizer.param_groups for param in group["params"]}
        state: dict[Any, Any] = self._optimizer.state
        shared: dict[object, object] = {}
        for key, value in state.items():
            if isinstance(key, torch.Tensor):
                if key not in own:
                    raise StateError(
                        f"{self.name}: there is state of a tensor of shape {list(key.shape)} that is in no parameter "
                        "group; delete it from optimizer.state, or add the parameter to a group"
                    )
                continue
            path = f"{self.name}.state[{key!r}]"
            shared[plain(f"{path} (its key)", key)] = plain(path, value)
        return shared

    def _apply_shared(self, stored: Mapping[Any, Any]) -> None:
        """Replace the state that belongs to no parameter by the stored one."""
        state: dict[Any, Any] = self._optimizer.state
        for key in [key for key in state if not isinstance(key, torch.Tensor) and key not in stored]:
            del state[key]
        for key, value in stored.items():
            state[key] = like(state.get(key), value)

    def _local(self, key: str, value: torch.Tensor, param: _Param) -> LocalTensor:
        """Describe a state tensor, unless it is a bare shard that claims to be global."""
        if isinstance(param.tensor, DTensor) and not isinstance(value, DTensor) and value.ndim:
            local = cast("DTensor", param.tensor.detach()).to_local().shape
            if value.shape == local and local != param.tensor.shape:
                raise UnsupportedLayout(
                    f"{self.name}: {key} is a plain tensor of the parameter's local shape {list(local)}; "
                    "it must be a DTensor like the parameter"
                )
        return describe(self.name, key, value, param.part)

    def _by_stored_name(self, stored: Mapping[str, Any]) -> dict[str, _Param]:
        """Live parameters that the stored optimizer has, by the one of their names that it uses."""
        known = {name for group in stored["param_groups"] for name in group["params"]}
        pairs = ((_known_name(param, known), param) for members in self._groups for param in members)
        return {name: param for name, param in pairs if name in known}

    def _check_groups(self, stored: Mapping[str, Any]) -> None:
        own = type(self._optimizer).__name__
        if stored["class"] != own:
            raise MismatchError(
                f"{self.name}: the checkpoint holds the state of {stored['class']}, the optimizer is {own}; "
                f"create a {stored['class']}, or leave '{self.name}' out of the load"
            )
        saved = [set(group["params"]) for group in stored["param_groups"]]
        if len(saved) != len(self._groups):
            raise MismatchError(
                f"{self.name}: {len(self._groups)} parameter groups, {len(saved)} in the checkpoint; "
                "create the optimizer with the groups it was saved with"
            )
        known = set().union(*saved)
        for index, (members, names) in enumerate(zip(self._groups, saved, strict=True)):
            live = {_known_name(param, known) for param in members}
            for name in sorted(live ^ names):
                where = "only in the checkpoint" if name in names else "not in the checkpoint's"
                raise MismatchError(
                    f"{self.name}: parameter {name} of group {index} is {where}; create the optimizer with the "
                    "groups it was saved with"
                )


def _known_name(param: _Param, known: Container[str]) -> str:
    """The name of a parameter that the checkpoint uses; its first one when it uses none."""
    return next((name for name in param.names if name in known), param.names[0])


def _same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one is other or (one.dtype == other.dtype and one.equal(other))
    return one == other


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _NOT_HYPERPARAMETERS}


def _plain_items(path: str, items: Mapping[str, Any]) -> dict[str, object]:
    return {
        key: plain(f"{path}.{key}", value)
        for key, value in items.items()
        if not isinstance(value, torch.Tensor)
    }


def _dtype(
    param: _Param, item: str, stored: torch.dtype, shape: tuple[int, ...], leeway: Leeway
) -> torch.dtype:
    """The element type of a new state tensor.

    Counts and other scalars keep theirs: optimizers make them float32, whatever the parameter is.
    """
    own = param.tensor.dtype
    is_scalar = item == "step" or (not shape and param.tensor.ndim > 0)
    if is_scalar or not (own.is_floating_point and stored.is_floating_point):
        return stored
    return own if leeway.may_become(stored, own) else stored


def _allocate(param: _Param, item: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """An uninitialised state tensor, laid out as the optimizer would have made it."""
    tensor = param.tensor.detach()
    if shape and param.part is not None:
        return torch.zeros(param.part.extent, dtype=dtype, device=tensor.device)  # padding included
    if item == "step" and not shape:
        with_param = param.hyperparameters.get("capturable") or param.hyperparameters.get("fused")
        return torch.empty((), dtype=dtype, device=tensor.device if with_param else "cpu")
    if shape == tuple(tensor.shape):
        return torch.empty_like(tensor, dtype=dtype)
    empty = torch.empty(shape, dtype=dtype, device=tensor.device)
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        return DTensor.from_local(empty, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return empty
