"""What the framework layer hands to the engine, and what it wants to know of a checkpoint."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

import torch

from checkpoint.boxes import Box
from checkpoint.frameworks.layout import tensor_boxes
from checkpoint.patterns import fits

# Key to dtype and global shape of the stored tensors of one group.
Rows: TypeAlias = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


# Not frozen: that takes three times as long, for each tensor at each save.
@dataclass(kw_only=True, slots=True, eq=False)
class LocalTensor:
    """One global tensor as this rank holds it; not to be changed.

    Attributes:
        group: Top-level name in the state ("model", "optimizer", ...).
        key: Name inside the group: a parameter's name, or "state.<parameter>.exp_avg" in an optimizer.
        dtype: Element type.
        shape: Global shape.
        boxes: Parts held by this rank, possibly none.
        views: One tensor per box, of the box's lengths, sharing memory with ``tensor``; may be strided.
        tensor: The tensor in the live state, or one made for it that ``finish`` puts there.
        may_differ: Whether ranks that hold the same box may hold other values in it; those of the lowest are saved.
    """

    group: str
    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    views: tuple[torch.Tensor, ...]
    tensor: torch.Tensor
    may_differ: bool = False

    @classmethod
    def of(cls, group: str, key: str, tensor: torch.Tensor) -> LocalTensor:
        """Describe a tensor or DTensor.

        Raises:
            UnsupportedLayout: If its layout cannot be described by boxes.
        """
        boxes, views = tensor_boxes(f"{group}: {key}", tensor)
        return cls(
            group=group,
            key=key,
            dtype=tensor.dtype,
            shape=tuple(tensor.shape),
            boxes=boxes,
            views=views,
            tensor=tensor,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CapturedState:
    """What a rank has to save.

    Attributes:
        tensors: Sorted by (group, key); views of live memory, not copies.
        objects: Group to a tree of dicts, lists and plain values (str, int, float, bool, None, bytes); a private
            copy, the same on every rank, with an entry for every group of the state.
        rank_objects: Rank-local leaves by name, trees of the same kind: "rng".
    """

    tensors: list[LocalTensor]
    objects: dict[str, object]
    rank_objects: dict[str, object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Leeway:
    """How far a checkpoint may differ from the state that it is loaded into.

    Attributes:
        strict: Refuse objects that do not fit; otherwise load what does.
        allow_missing: Patterns of what the checkpoint may lack although ``strict``.
        may_become: Whether what is stored in one element type, the first, may be loaded into another.
    """

    strict: bool = True
    allow_missing: tuple[str, ...] = ()
    may_become: Callable[[torch.dtype, torch.dtype], bool] = operator.eq

    def may_lack(self, group: str, key: str) -> bool:
        """Whether the checkpoint may lack a tensor or a plain value of the state."""
        return not self.strict or any(fits(pattern, group, key) for pattern in self.allow_missing)


NO_LEEWAY: Final = Leeway()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Found:
    """Where a checkpoint goes in a state.

    Attributes:
        tensors: Where its tensors go, sorted by (group, key).
        missing: What else of the state the checkpoint lacks: groups by their names, plain values as ``group/key``.
    """

    tensors: Sequence[LocalTensor]
    missing: Sequence[str] = ()


class Stored(Protocol):
    """What restoring needs to know of a checkpoint before any payload is read.

    The engine implements it over the checkpoint's tables, so that this layer knows nothing of files.
    """

    @property
    def tensors(self) -> Mapping[tuple[str, str], tuple[torch.dtype, tuple[int, ...]]]:
        """(group, key) to dtype and global shape of every stored tensor."""
        ...

    @property
    def objects(self) -> Mapping[str, object]:
        """Group to the tree that ``capture`` gave for it."""
        ...


class Group(Protocol):
    """One top-level entry of the state, by kind: module, optimizer, stateful object, tree.

    ``targets`` checks and allocates but changes nothing that is live; ``apply`` runs after all checks of all
    groups have passed and the targets hold their bytes.
    """

    @property
    def kind(self) -> str:
        """Name of the kind, stored with the group's objects."""
        ...

    def tensors(self) -> list[LocalTensor]:
        """The live tensors."""
        ...

    def objects(self) -> dict[str, object]:
        """A private copy of everything that is not a tensor."""
        ...

    def targets(self, rows: Rows, stored: Mapping[str, object], leeway: Leeway) -> list[LocalTensor]:
        """Where the stored tensors go, given the group's stored tensors and objects.

        Raises:
            MismatchError: If the stored objects do not fit the live ones.
        """
        ...

    def missing(self, stored: Mapping[str, object]) -> list[str]:
        """Keys of live plain values that the stored objects, which fit otherwise, lack; of all where there are none."""
        ...

    def apply(self, stored: Mapping[str, object], targets: list[LocalTensor]) -> None:
        """Take over the stored objects, and the targets that are not live yet."""
        ...
