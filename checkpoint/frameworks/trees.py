"""Nested dicts and lists of tensors and plain values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeAlias

import torch

from checkpoint.errors import MismatchError, StateError
from checkpoint.frameworks.layout import range_boxes
from checkpoint.frameworks.shards import FlatShard
from checkpoint.frameworks.values import Leeway, LocalTensor, Rows

Tree: TypeAlias = dict[Any, Any] | list[Any]

_TENSORS: Final = (torch.Tensor, FlatShard)

_ABSENT: Final = object()  # what the checkpoint has where it has nothing: None is a value


def plain(path: str, value: object) -> Any:
    """A private copy of a tree of plain values.

    Args:
        path: What to call the value in errors.
        value: dict, list, tuple, str, int, float, bool, None or bytes, nested.

    Raises:
        StateError: For a value of any other type, naming its path.
    """
    if value is None or type(value) in (str, int, bool, bytes):
        return value
    if isinstance(value, float):
        return float(value)  # numpy.float64 is a float, and often a learning rate
    if isinstance(value, dict):
        return {key: plain(f"{path}.{key}", item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [plain(f"{path}.{index}", item) for index, item in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    hint = "put tensors in a dict of the state" if isinstance(value, torch.Tensor) else "convert it first"
    raise StateError(
        f"{path}: cannot save a {type(value).__name__} here, only dict, list, tuple, str, int, float, bool, None "
        f"and bytes; {hint}"
    )


def like(live: object, stored: Any) -> Any:
    """A private copy of a stored value, with lists and tuples where the live value has them."""
    if isinstance(stored, dict):
        at = live if isinstance(live, dict) else {}
        return {key: like(at.get(key), item) for key, item in stored.items()}
    if isinstance(stored, list | tuple):
        items = live if isinstance(live, list | tuple) else ()
        known = [*items[: len(stored)], *[None] * (len(stored) - len(items))]
        copy = [like(old, item) for old, item in zip(known, stored, strict=True)]
        is_tuple = isinstance(live if isinstance(live, list | tuple) else stored, tuple)
        return tuple(copy) if is_tuple else copy
    return stored


class TreeGroup:
    """A dict or list in the state; its tensors are loaded in place, its other leaves replaced or added.

    A tensor's key is the path to it, joined by dots. In the stored objects a tensor in a list leaves None
    behind, in a dict nothing.
    """

    kind = "tree"

    def __init__(self, name: str, value: Tree) -> None:
        self.name = name
        self.value = value

    def tensors(self) -> list[LocalTensor]:
        """The tensors of the tree.

        Raises:
            StateError: If two of them have the same path.
        """
        found: dict[str, LocalTensor] = {}
        for path, tensor in _tensors(self.value, ()):
            key = ".".join(path)
            if key in found:
                raise StateError(f"{self.name}: two tensors are called '{key}'; rename a key")
            found[key] = _describe(self.name, key, tensor)
        return list(found.values())

    def objects(self) -> dict[str, object]:
        """The tree without its tensors."""
        return {"value": plain(self.name, _without_tensors(self.value))}

    def targets(self, rows: Rows, stored: Mapping[str, object], leeway: Leeway) -> list[LocalTensor]:
        """The live tensors of the tree.

        Raises:
            MismatchError: If the tree and the stored one differ in structure.
        """
        _check_merge(self.name, self.value, stored["value"])
        return self.tensors()

    def missing(self, stored: Mapping[str, object]) -> list[str]:
        """Paths of the live plain values that have no stored one."""
        return [".".join(path) for path in _missing(self.value, stored.get("value", _ABSENT), ())]

    def apply(self, stored: Mapping[str, object], targets: list[LocalTensor]) -> None:
        """Put the stored leaves into the live tree."""
        _merge(self.value, stored["value"])


def _describe(group: str, key: str, tensor: torch.Tensor | FlatShard) -> LocalTensor:
    if isinstance(tensor, torch.Tensor):
        return LocalTensor.of(group, key, tensor)
    memory, shape = tensor.memory, tensor.shape
    boxes, views = range_boxes(f"{group}: {key}", memory, shape, tensor.start)
    return LocalTensor(
        group=group, key=key, dtype=memory.dtype, shape=shape, boxes=boxes, views=views, tensor=memory
    )


def _tensors(
    value: object, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], torch.Tensor | FlatShard]]:
    if isinstance(value, _TENSORS):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors(item, (*path, str(key)))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _tensors(item, (*path, str(index)))


def _without_tensors(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_tensors(item) for key, item in value.items() if not isinstance(item, _TENSORS)}
    if isinstance(value, list | tuple):
        items = [_without_tensors(item) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    return None if isinstance(value, _TENSORS) else value


def _check_merge(path: str, live: object, stored: object) -> None:
    """Raise where ``_merge`` would lose a live container or a live tensor."""
    if isinstance(live, dict):
        if not isinstance(stored, dict):
            raise MismatchError(f"{path}: the state has a dict here, the checkpoint {type(stored).__name__}")
        for key, item in live.items():
            if key in stored:
                _check_merge(f"{path}.{key}", item, stored[key])
    elif isinstance(live, list | tuple):
        if not isinstance(stored, list | tuple):
            raise MismatchError(f"{path}: the state has a list here, the checkpoint {type(stored).__name__}")
        if any(_tensors(live, ())):
            if len(live) != len(stored):
                raise MismatchError(
                    f"{path}: {len(live)} items in the state, {len(stored)} in the checkpoint"
                )
            for index, (item, saved) in enumerate(zip(live, stored, strict=True)):
                if not isinstance(item, _TENSORS):
                    _check_merge(f"{path}.{index}", item, saved)


def _missing(live: object, stored: object, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Paths of what ``_merge`` leaves as it is, but tensors; a list without tensors is one value."""
    if isinstance(live, _TENSORS):
        return
    if isinstance(live, dict) and live:
        known = stored if isinstance(stored, dict) else {}
        for key, item in live.items():
            yield from _missing(item, known.get(key, _ABSENT), (*path, str(key)))
    elif isinstance(live, list | tuple) and any(_tensors(live, ())):
        items = stored if isinstance(stored, list | tuple) else [_ABSENT] * len(live)
        for index, (item, saved) in enumerate(zip(live, items, strict=True)):
            yield from _missing(item, saved, (*path, str(index)))
    elif stored is _ABSENT:
        yield path


def _merge(live: Any, stored: Any) -> Any:
    """The live value brought to the stored one, the same container and the same tensors where there are any."""
    if isinstance(live, _TENSORS):
        return live
    if isinstance(live, dict):
        live.update({key: _merge(live.get(key), item) for key, item in stored.items()})
        return live
    if isinstance(live, list | tuple) and any(_tensors(live, ())):
        merged = [_merge(item, saved) for item, saved in zip(live, stored, strict=True)]
    else:
        merged = like(live, stored)
    if isinstance(live, list):
        live[:] = merged
        return live
    return tuple(merged) if isinstance(live, tuple) else merged
