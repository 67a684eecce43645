"""Who writes what: replicas once, bytes balanced, the result checked to tile every tensor."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from checkpoint.errors import TilingError
from checkpoint.format.dtypes import DTYPES
from checkpoint.format.index import TensorRow
from checkpoint.planner.balance import choose_writers
from checkpoint.planner.description import Described, join
from checkpoint.tiling import find_untiled, padded_shapes

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """What is to be stored and by whom; n boxes, in order of tensor and offset.

    Attributes:
        tensors: Global tensors, sorted by (group, key).
        first: Boxes of tensor ``i`` are ``first[i]`` to ``first[i + 1]``; int64 ``[num_tensors + 1]``.
        offsets: First index of each box, 0 where a tensor has fewer dimensions; int64 ``[max_dims, n]``.
        lengths: Extent of each box, 1 where a tensor has fewer dimensions; int64 ``[max_dims, n]``.
        held: Whose it is, among the boxes that all ranks described, in order of rank; int64 ``[n]``.
        held_first: Of those, the ones of rank ``r`` are ``held_first[r]`` to ``held_first[r + 1]``; int64
            ``[num_ranks + 1]``.
    """

    tensors: list[TensorRow]
    first: Ints
    offsets: Ints
    lengths: Ints
    held: Ints
    held_first: Ints

    @cached_property
    def tensor_id(self) -> Ints:
        """Tensor of each box; int64 ``[n]``."""
        return np.repeat(np.arange(len(self.tensors)), np.diff(self.first))

    @cached_property
    def num_dims(self) -> Ints:
        """Dimensions of each box; int64 ``[n]``."""
        return np.asarray([len(tensor.shape) for tensor in self.tensors], dtype=np.int64)[self.tensor_id]

    @property
    def rank(self) -> Ints:
        """Who writes each box; int64 ``[n]``."""
        return _rank_of(self.held, self.held_first)

    def shares(self) -> Iterator[bytes]:
        """For each rank which of the boxes it described it is to write; see :func:`positions_in`."""
        written = np.zeros(int(self.held_first[-1]), dtype=bool)
        written[self.held] = True
        for begin, end in itertools.pairwise(self.held_first.tolist()):
            yield np.packbits(written[begin:end]).tobytes()


def positions_in(share: bytes, num_boxes: int) -> Ints:
    """The boxes that a rank is to write, by position among the ``num_boxes`` it described; ascending."""
    bits = np.unpackbits(np.frombuffer(share, dtype=np.uint8), count=num_boxes)
    return np.flatnonzero(bits).astype(np.int64)


def make_plan(messages: Sequence[bytes]) -> Plan:
    """Join what all ranks hold into one plan; the same messages give the same plan.

    Boxes that several ranks hold are written once, see :func:`choose_writers`; where they may differ, by the lowest.

    Args:
        messages: From :func:`checkpoint.planner.describe`, by rank.

    Raises:
        StateError: Ranks disagree about dtype or shape of a tensor.
        TilingError: The boxes of a tensor have gaps or overlap without being equal; names it.
    """
    held = join(messages)
    tensors = held.tensors
    extents = padded_shapes([tensor.shape for tensor in tensors])
    itemsize = np.asarray([DTYPES[tensor.dtype].itemsize for tensor in tensors], dtype=np.int64)

    # Where a box begins among the elements of all tensors, one after the other: a single number to sort by.
    begin = _element(extents, held)
    order = np.argsort(begin, kind="stable")  # stable: equal ones stay in order of rank
    begin = begin[order]
    tensor_id, offsets, lengths = held.tensor_id[order], held.offsets[:, order], held.lengths[:, order]
    equal = (begin[1:] == begin[:-1]) & (tensor_id[1:] == tensor_id[:-1])
    for columns in (offsets, lengths):
        for column in columns:
            equal &= column[1:] == column[:-1]
    first = np.flatnonzero(np.concatenate([[True], ~equal])) if len(begin) else np.zeros(0, dtype=np.int64)
    tensor_id, offsets, lengths = tensor_id[first], offsets[:, first], lengths[:, first]
    box_first = np.searchsorted(tensor_id, np.arange(len(tensors) + 1)).astype(np.int64)
    rows = np.append(first, len(order))

    untiled = find_untiled([tensor.shape for tensor in tensors], box_first, offsets, lengths)
    if untiled is not None:
        index, error = untiled
        part = order[rows[box_first[index]] : rows[box_first[index + 1]]]
        holders = np.unique(_rank_of(part, held.first)).tolist()
        tensor = tensors[index]
        raise TilingError(f"{tensor.group}/{tensor.key}: {error} (boxes held by ranks {_short(holders)})")

    rank = _rank_of(order, held.first)
    num_bytes = lengths.prod(axis=0) * itemsize[tensor_id]
    chosen = choose_writers(num_bytes, rows, rank, len(messages), held.may_differ[tensor_id])
    return Plan(
        tensors=tensors,
        first=box_first,
        offsets=offsets,
        lengths=lengths,
        held=order[chosen],
        held_first=held.first,
    )


def _element(extents: Ints, held: Described) -> Ints:
    """Number of the first element of each box, counted over all tensors in order; of a wrong box one of its tensor."""
    extents = np.where((extents == 0).any(axis=0), 1, extents)
    strides = np.ones_like(extents)
    for dim in reversed(range(len(extents) - 1)):
        strides[dim] = strides[dim + 1] * extents[dim + 1]
    sizes = extents.prod(axis=0)
    element: Ints = (np.cumsum(sizes) - sizes)[held.tensor_id]
    for offset, extent, stride in zip(held.offsets, extents, strides, strict=True):
        element += np.clip(offset, 0, extent[held.tensor_id] - 1) * stride[held.tensor_id]
    return element


def _rank_of(held: Ints, first: Ints) -> Ints:
    """The rank that described each box."""
    ranks = np.repeat(np.arange(len(first) - 1), np.diff(first))
    found: Ints = ranks[held]
    return found


def _short(ranks: list[int]) -> str:
    return str(ranks) if len(ranks) <= 8 else f"{ranks[:8]} and {len(ranks) - 8} more"
