"""Training state as named global tensors and plain objects, and back.

A state is a mapping of group names to modules, optimizers, objects with ``state_dict`` and
``load_state_dict``, and dicts or lists of tensors and plain values. Loading goes in two halves, so that nothing
live changes before every check has passed: :func:`targets` says where the stored bytes go, :func:`finish` takes
over the rest once they have arrived.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import nn
from torch.optim import Optimizer

from checkpoint.errors import MismatchError, StateError
from checkpoint.frameworks.modules import ModuleGroup
from checkpoint.frameworks.optimizers import OptimizerGroup
from checkpoint.frameworks.rng import capture_rng, restore_rng
from checkpoint.frameworks.trees import TreeGroup, plain
from checkpoint.frameworks.values import (
    NO_LEEWAY,
    CapturedState,
    Found,
    Group,
    Leeway,
    LocalTensor,
    Rows,
    Stored,
)

__all__ = ["CapturedState", "Found", "Leeway", "LocalTensor", "Stored", "capture", "finish", "targets"]


@runtime_checkable
class Stateful(Protocol):
    """Anything that gives its state as plain values: a data loader, a learning-rate schedule."""

    def state_dict(self) -> dict[str, Any]:
        """The state, the same on every rank."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> object:
        """Continue from a state."""
        ...


class StatefulGroup:
    """A :class:`Stateful` in the state."""

    kind = "stateful"

    def __init__(self, name: str, value: Stateful) -> None:
        self.name = name
        self._value = value

    def tensors(self) -> list[LocalTensor]:
        """None: its state is plain values."""
        return []

    def objects(self) -> dict[str, object]:
        """A copy of its state."""
        return {"value": plain(self.name, self._value.state_dict())}

    def targets(self, rows: Rows, stored: Mapping[str, Any], leeway: Leeway) -> list[LocalTensor]:
        """None: its state is plain values."""
        return []

    def missing(self, stored: Mapping[str, Any]) -> list[str]:
        """None: it is stored as a whole."""
        return []

    def apply(self, stored: Mapping[str, Any], targets: list[LocalTensor]) -> None:
        """Hand the stored state over."""
        self._value.load_state_dict(plain(self.name, stored["value"]))


def capture(state: Mapping[str, object]) -> CapturedState:
    """Describe a state for saving; nothing is copied but plain values.

    Args:
        state: Group name to module, optimizer, stateful object, dict or list.

    Raises:
        StateError: For anything that cannot be saved, naming it; ``UnsupportedLayout`` for a tensor.
    """
    tensors: list[LocalTensor] = []
    objects: dict[str, object] = {}
    for name, group in _groups(state).items():
        tensors += group.tensors()
        objects[name] = {"kind": group.kind, **group.objects()}
    return CapturedState(tensors=_sorted(tensors), objects=objects, rank_objects={"rng": capture_rng()})


def targets(state: Mapping[str, object], stored: Stored, leeway: Leeway = NO_LEEWAY) -> Found:
    """Where the stored tensors go, and what else has no stored value, without changing anything live.

    Optimizer state that does not exist yet is allocated from the stored rows; no step is taken. The list holds
    every live tensor of modules and trees, stored or not, and of optimizers every stored tensor that has a
    place. That keys, shapes and dtypes agree with the stored ones is for the caller to check before it writes
    to a view.

    Args:
        state: As for :func:`capture`; groups may be fewer than the stored ones.
        stored: The checkpoint.
        leeway: How far the two may differ.

    Raises:
        MismatchError: If a group or plain value is not stored and may not be missing, if a group is of another kind,
            or (when strict) its objects differ.
        StateError: As for :func:`capture`.
    """
    rows: dict[str, dict[str, Any]] = {}
    for (name, key), row in stored.tensors.items():
        rows.setdefault(name, {})[key] = row
    found: list[LocalTensor] = []
    missing: list[str] = []
    for name, group in _groups(state).items():
        if name not in stored.objects:
            _check_group_may_lack(name, group, stored, leeway)
            missing.append(name)
            continue
        objects = _stored_objects(stored, name, group)
        found += group.targets(rows.get(name, {}), objects, leeway)
        for key in group.missing(objects):
            if not leeway.may_lack(name, key):
                raise MismatchError(
                    f"'{name}/{key}' is not in the checkpoint; load the state that was saved, name it in "
                    "allow_missing, or pass strict=False to leave it as it is"
                )
            missing.append(f"{name}/{key}")
    return Found(tensors=_sorted(found), missing=missing)


def finish(
    state: Mapping[str, object],
    stored: Stored,
    targets: Sequence[LocalTensor],
    *,
    rank_objects: Mapping[str, Any] | None = None,
) -> None:
    """Take over everything but the bytes: new optimizer state, hyperparameters, plain values, generators.

    Stateful objects come first, since their code may refuse; the ones already loaded are then set back.

    Args:
        state: The same as for :func:`targets`.
        stored: The same as for :func:`targets`.
        targets: The tensors that :func:`targets` gave, holding the stored bytes.
        rank_objects: What this rank captured, if the checkpoint was saved on as many ranks; None leaves the
            random number generators alone.
    """
    groups = {name: group for name, group in _groups(state).items() if name in stored.objects}
    arrived: dict[str, list[LocalTensor]] = {name: [] for name in groups}
    for target in targets:
        arrived[target.group].append(target)
    objects = {name: _stored_objects(stored, name, group) for name, group in groups.items()}
    _load_stateful(
        {name: group for name, group in groups.items() if isinstance(group, StatefulGroup)}, objects
    )
    for name, group in groups.items():
        if not isinstance(group, StatefulGroup):
            group.apply(objects[name], arrived[name])
    if rank_objects is not None:
        restore_rng(rank_objects["rng"])


def _load_stateful(groups: Mapping[str, StatefulGroup], objects: Mapping[str, Mapping[str, Any]]) -> None:
    before: dict[str, dict[str, object]] = {}
    try:
        for name, group in groups.items():
            before[name] = group.objects()
            group.apply(objects[name], [])
    except Exception:
        for name in reversed(before):
            groups[name].apply(before[name], [])
        raise


def _groups(state: Mapping[str, object]) -> dict[str, Group]:
    """The groups of a state by name."""
    modules = {
        name: ModuleGroup(name, value) for name, value in state.items() if isinstance(value, nn.Module)
    }
    groups: dict[str, Group] = {}
    for name, value in state.items():
        if name in modules:
            groups[name] = modules[name]
        elif isinstance(value, Optimizer):
            groups[name] = OptimizerGroup(name, value, modules.values())
        elif isinstance(value, dict | list):
            groups[name] = TreeGroup(name, value)
        elif isinstance(value, Stateful):
            groups[name] = StatefulGroup(name, value)
        else:
            raise StateError(
                f"{name}: a {type(value).__name__} cannot be loaded in place; put it in a dict, "
                f'e.g. {{"extra": {{"{name}": ...}}}}'
            )
    return groups


def _check_group_may_lack(name: str, group: Group, stored: Stored, leeway: Leeway) -> None:
    """Check that the checkpoint may lack all of a group; one without keys by the name alone."""
    keys = [*(tensor.key for tensor in group.tensors()), *group.missing({})] or [""]
    if not all(leeway.may_lack(name, key) for key in keys):
        raise MismatchError(
            f"'{name}' is not in the checkpoint, which holds {', '.join(sorted(stored.objects))}; leave it out of the "
            "load, name it in allow_missing, or pass strict=False to leave it as it is"
        )


def _stored_objects(stored: Stored, name: str, group: Group) -> Mapping[str, Any]:
    """The stored objects of a group, of the same kind."""
    objects = stored.objects[name]
    kind = objects.get("kind") if isinstance(objects, dict) else None
    if not isinstance(objects, dict) or kind != group.kind:
        raise MismatchError(f"'{name}' is a {group.kind} in the state but a {kind} in the checkpoint")
    return objects


def _sorted(tensors: list[LocalTensor]) -> list[LocalTensor]:
    return sorted(tensors, key=lambda tensor: (tensor.group, tensor.key))
