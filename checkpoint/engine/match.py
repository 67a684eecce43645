"""What of a checkpoint goes where in a state, found out and checked before any payload is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
import torch

from checkpoint.engine.views import Wanted
from checkpoint.errors import MismatchError
from checkpoint.format.index import Tables
from checkpoint.frameworks.values import Found, LocalTensor
from checkpoint.patterns import fits
from checkpoint.planner import torch_dtype
from checkpoint.stored import StoredCheckpoint

DtypePolicy = Literal["same", "widen", "convert"]

DTYPE_POLICIES: Final = ("same", "widen", "convert")

_MAX_NAMED: Final = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadOptions:
    """How to load; equal on all ranks.

    Attributes:
        strict: Raise for tensors that only the state or only the checkpoint has.
        allow_missing: Patterns of tensors and plain values that the checkpoint may lack all the same.
        allow_unexpected: Patterns of tensors that the state may lack all the same.
        dtype_policy: Which element types may differ: ``"same"`` none, ``"widen"`` floating-point types whose every
            value the state's type holds, ``"convert"`` any floating-point types.
        verify: Check digests.
        timeout_s: Longest wait for other ranks, in each stage.
    """

    strict: bool = True
    allow_missing: tuple[str, ...] = ()
    allow_unexpected: tuple[str, ...] = ()
    dtype_policy: DtypePolicy = "same"
    verify: bool = True
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ValueError: One is not allowed.
        """
        check_dtype_policy(self.dtype_policy)

    def may_become(self, stored: torch.dtype, live: torch.dtype) -> bool:
        """Whether ``dtype_policy`` allows to load what is stored in one element type into another."""
        if stored == live:
            return True
        if self.dtype_policy == "same" or not (stored.is_floating_point and live.is_floating_point):
            return False
        return self.dtype_policy == "convert" or _holds_all(live, stored)


def check_dtype_policy(policy: str) -> None:
    """Check that a policy is one of ``DTYPE_POLICIES``.

    Raises:
        ValueError: It is not.
    """
    if policy not in DTYPE_POLICIES:
        raise ValueError(f"dtype_policy is {policy!r}: it is one of {', '.join(DTYPE_POLICIES)}")


class StoredView:
    """A checkpoint as the framework layer wants to see it.

    Args:
        checkpoint: The checkpoint.
    """

    def __init__(self, checkpoint: StoredCheckpoint) -> None:
        self._checkpoint = checkpoint
        self._tensors = {
            (tensor.group, tensor.key): (torch_dtype(tensor.dtype), tensor.shape)
            for tensor in checkpoint.catalog.tensors
        }

    @property
    def tensors(self) -> Mapping[tuple[str, str], tuple[torch.dtype, tuple[int, ...]]]:
        """(group, key) to dtype and global shape."""
        return self._tensors

    @property
    def objects(self) -> Mapping[str, object]:
        """Group to its tree of plain values."""
        return self._checkpoint.objects


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Match:
    """What goes where on this rank.

    Attributes:
        targets: Tensors of the state that the checkpoint has.
        ids: Id of each of them in the checkpoint.
        missing: What of the state it lacks: groups by their names, tensors and plain values as ``group/key``.
        converted: Tensors whose element type changes, as ``group/key``.
        wanted: The boxes to fill.
    """

    targets: list[LocalTensor]
    ids: list[int]
    missing: list[str]
    converted: list[str]
    wanted: list[Wanted]


def match(checkpoint: StoredCheckpoint, view: StoredView, where: Found, options: LoadOptions) -> Match:
    """Find the stored tensor of each target.

    Raises:
        MismatchError: The checkpoint lacks one, or has it with another shape or element type; names them.
    """
    found = Match(targets=[], ids=[], missing=list(where.missing), converted=[], wanted=[])
    problems: list[str] = []
    refused: list[str] = []
    for tensor in where.tensors:
        name = f"{tensor.group}/{tensor.key}"
        tensor_id = checkpoint.tensor_ids.get((tensor.group, tensor.key))
        if tensor_id is None:
            found.missing.append(name)
            if not _any_fits(options.allow_missing, tensor.group, tensor.key):
                refused.append(name)
            continue
        dtype, shape = view.tensors[tensor.group, tensor.key]
        if tuple(tensor.shape) != shape:
            problems.append(f"{name} is {list(tensor.shape)}, stored {list(shape)}")
        elif not options.may_become(dtype, tensor.dtype):
            problems.append(f"{name} is {tensor.dtype}, stored {dtype}")
        if tensor.dtype != dtype:
            found.converted.append(name)
        found.targets.append(tensor)
        found.ids.append(tensor_id)
        stored = None if tensor.dtype == dtype else dtype
        for box, one in zip(tensor.boxes, tensor.views, strict=True):
            found.wanted.append(Wanted(tensor_id=tensor_id, box=box, view=one, stored=stored))
    if problems:
        raise MismatchError(
            f"{checkpoint.store.url}: {named(problems)}; build the state with the shapes and dtypes it was saved with"
            + (", or allow other floating-point types with dtype_policy" if found.converted else "")
        )
    if options.strict and refused:
        raise MismatchError(
            f"{checkpoint.store.url}: has no {named(refused)}; load the state that was saved, name them in "
            "allow_missing, or pass strict=False to leave them as they are"
        )
    return found


def check_shared(tables: Tables, wanted: Sequence[Wanted], where: str) -> None:
    """Check that tensors which are the same memory in the state are the same bytes in the checkpoint.

    Args:
        tables: Of the checkpoint.
        wanted: The boxes to fill.
        where: The checkpoint, for messages.

    Raises:
        MismatchError: Two are not; names them.
    """
    first: dict[int, Wanted] = {}
    for one in wanted:
        other = first.setdefault(one.view.data_ptr(), one)
        if other.tensor_id == one.tensor_id or other.view.shape != one.view.shape:
            continue
        digests, others = (_digests(tables, each.tensor_id) for each in (one, other))
        # Of as many pieces: cut or compressed in another way, equal ones would differ as well.
        if len(digests) == len(others) and (digests != others).any():
            names = (
                f"{row.group}/{row.key}" for row in (tables.tensors[each.tensor_id] for each in (other, one))
            )
            raise MismatchError(
                f"{where}: {' and '.join(names)} share memory in the state, but differ in the checkpoint; give them "
                "memory of their own, or leave one out of the state"
            )


def _digests(tables: Tables, tensor_id: int) -> npt.NDArray[np.uint64]:
    boxes = tables.boxes
    first, end = boxes.piece_first[boxes.first[[tensor_id, tensor_id + 1]]].tolist()
    return boxes.digests[first:end]


def check_unexpected(
    checkpoint: StoredCheckpoint, is_known: Sequence[bool], groups: Sequence[str], options: LoadOptions
) -> list[str]:
    """Stored tensors that no rank's state has, as ``group/key``; only those of groups that the state names.

    Args:
        checkpoint: The checkpoint.
        is_known: For each of its tensors, whether some rank has it.
        groups: Top-level names of the state.
        options: What is allowed.

    Raises:
        MismatchError: There are some that are not allowed.
    """
    unexpected, refused = [], []
    for tensor, known in zip(checkpoint.catalog.tensors, is_known, strict=True):
        if not known and tensor.group in groups:
            unexpected.append(f"{tensor.group}/{tensor.key}")
            if not _any_fits(options.allow_unexpected, tensor.group, tensor.key):
                refused.append(unexpected[-1])
    if options.strict and refused:
        raise MismatchError(
            f"{checkpoint.store.url}: {named(refused)} have no place in the state; load into the state that was saved, "
            "name them in allow_unexpected, or pass strict=False to leave them out"
        )
    return unexpected


def named(names: Sequence[str]) -> str:
    """The first few of some names, for a message."""
    shown = ", ".join(names[:_MAX_NAMED])
    return shown if len(names) <= _MAX_NAMED else f"{shown} and {len(names) - _MAX_NAMED} more"


def _any_fits(patterns: Sequence[str], group: str, key: str) -> bool:
    return any(fits(pattern, group, key) for pattern in patterns)


def _holds_all(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether each value of one floating-point type is one of another."""
    outer, inner = torch.finfo(wide), torch.finfo(narrow)
    return (
        outer.eps <= inner.eps and outer.max >= inner.max and outer.smallest_normal <= inner.smallest_normal
    )
