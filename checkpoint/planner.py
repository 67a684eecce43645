"""Who writes what: replicas deduplicated, bytes spread over ranks, the result checked to tile every tensor.

Each rank describes its boxes as a compact table (``describe``). One rank joins the tables into a plan
(``make_plan``) and tells every rank which of its own boxes to write, by their position in what it sent. All of
it is numpy columns; the only loops are over tensors and over boxes that several ranks hold.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from checkpoint.boxes import Box, check_tiling
from checkpoint.errors import StateError, TilingError
from checkpoint.format.dtypes import DTYPES
from checkpoint.format.index import TensorRow
from checkpoint.format.payload import check_group
from checkpoint.frameworks.values import LocalTensor

_TENSORS = pa.schema(
    {"group": pa.string(), "key": pa.string(), "dtype": pa.string(), "shape": pa.list_(pa.int64())}
)


def dtype_name(dtype: torch.dtype, where: str) -> str:
    """The stored name of a torch dtype.

    Raises:
        StateError: It cannot be stored; ``where`` names the tensor.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise StateError(
            f"{where}: tensors of {dtype} cannot be stored; convert it to one of {', '.join(DTYPES)}"
        )
    return name


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a stored name."""
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def local_boxes(tensors: Sequence[LocalTensor]) -> Iterator[tuple[LocalTensor, Box, torch.Tensor]]:
    """All boxes of a rank in the order that plans count them: tensors as given, boxes as given."""
    for tensor in tensors:
        for box, view in zip(tensor.boxes, tensor.views, strict=True):
            yield tensor, box, view


def describe(tensors: Sequence[LocalTensor]) -> bytes:
    """What one rank holds, for :func:`make_plan`.

    Raises:
        StateError: A group or dtype that cannot be stored.
    """
    for group in sorted({tensor.group for tensor in tensors}):
        check_group(group)
    rows = pa.Table.from_arrays(
        [
            pa.array([tensor.group for tensor in tensors], type=pa.string()),
            pa.array([tensor.key for tensor in tensors], type=pa.string()),
            pa.array(
                [dtype_name(tensor.dtype, f"{tensor.group}/{tensor.key}") for tensor in tensors],
                type=pa.string(),
            ),
            pa.array([list(tensor.shape) for tensor in tensors], type=pa.list_(pa.int64())),
        ],
        schema=_TENSORS,
    )
    num_dims = max((len(tensor.shape) for tensor in tensors), default=0)
    corners = np.zeros((sum(len(tensor.boxes) for tensor in tensors), 1 + 2 * num_dims), dtype=np.int64)
    corners[:, 1 + num_dims :] = 1  # missing dimensions are one element long
    row = 0
    for index, tensor in enumerate(tensors):
        for box in tensor.boxes:
            corners[row, 0] = index
            corners[row, 1 : 1 + len(box.offsets)] = box.offsets
            corners[row, 1 + num_dims : 1 + num_dims + len(box.lengths)] = box.lengths
            row += 1
    boxes = pa.table({str(column): corners[:, column] for column in range(corners.shape[1])})
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    for table in (rows, boxes):
        with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
            writer.write_table(table)
    return bytes(sink.getvalue())


def _parse(message: bytes) -> tuple[pa.Table, npt.NDArray[np.int64]]:
    source = pa.BufferReader(message)
    rows = pa.ipc.open_stream(source).read_all()
    boxes = pa.ipc.open_stream(source).read_all()
    columns = [boxes.column(index).to_numpy() for index in range(boxes.num_columns)]
    corners: npt.NDArray[np.int64] = np.column_stack(columns).astype(np.int64, copy=False)
    return rows, corners


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Plan:
    """What is to be stored and by whom.

    Attributes:
        tensors: Global tensors, sorted by (group, key).
        box_counts: Boxes of each tensor; int64 ``[num_tensors]``.
        tensor_id: Tensor of each stored box, ascending; int64 ``[num_boxes]``.
        offsets: First index of each box, 0 where a tensor has fewer dimensions; int64 ``[num_boxes, max_dims]``.
        lengths: Extent of each box, 1 where a tensor has fewer dimensions; int64 ``[num_boxes, max_dims]``.
        rank: Who writes each box; int64 ``[num_boxes]``.
        position: Which of the boxes that the rank described it is; int64 ``[num_boxes]``.
    """

    tensors: list[TensorRow]
    box_counts: npt.NDArray[np.int64]
    tensor_id: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    rank: npt.NDArray[np.int64]
    position: npt.NDArray[np.int64]

    def positions_of(self, rank: int) -> npt.NDArray[np.int64]:
        """Boxes that ``rank`` is to write, in the order of the rows of the plan."""
        positions: npt.NDArray[np.int64] = self.position[self.rank == rank]
        return positions


def make_plan(messages: Sequence[bytes]) -> Plan:
    """Join what all ranks hold into one plan; the same messages give the same plan.

    Boxes that several ranks hold are written once: largest first, each by the one of its holders that has the
    fewest bytes to write so far (longest processing time first).

    Args:
        messages: From :func:`describe`, by rank.

    Raises:
        StateError: Ranks disagree about dtype or shape of a tensor, or one names a tensor twice.
        TilingError: The boxes of a tensor have gaps or overlap without being equal; names it.
    """
    parsed = [_parse(message) for message in messages]
    tensors, global_ids = _join_tensors([rows for rows, _ in parsed])
    max_dims = max((len(tensor.shape) for tensor in tensors), default=0)
    corners, rank, position = _join_boxes([boxes for _, boxes in parsed], global_ids, max_dims)

    # Equal boxes become neighbours, by tensor and offset, holders in order of rank.
    order = np.lexsort((rank, *corners.T[::-1]))
    corners, rank, position = corners[order], rank[order], position[order]
    new = np.ones(len(corners), dtype=bool)
    new[1:] = (corners[1:] != corners[:-1]).any(axis=1)
    first = np.flatnonzero(new)
    tensor_id = corners[first, 0]
    lengths = corners[first, 1 + max_dims :]
    itemsize = np.asarray([DTYPES[tensor.dtype].itemsize for tensor in tensors], dtype=np.int64)
    num_bytes = lengths.prod(axis=1) * itemsize[tensor_id] if len(first) else np.zeros(0, dtype=np.int64)
    chosen = _assign(num_bytes, np.append(first, len(corners)), rank)

    plan = Plan(
        tensors=tensors,
        box_counts=np.bincount(tensor_id, minlength=len(tensors)).astype(np.int64),
        tensor_id=tensor_id,
        offsets=corners[first, 1 : 1 + max_dims],
        lengths=lengths,
        rank=rank[chosen],
        position=position[chosen],
    )
    _check(plan)
    return plan


def _join_tensors(rows: Sequence[pa.Table]) -> tuple[list[TensorRow], list[npt.NDArray[np.int64]]]:
    """Global tensors in order, and for each rank the global id of each tensor it described."""
    found: dict[tuple[str, str], tuple[str, list[int], int]] = {}
    names_by_rank = []
    for rank, table in enumerate(rows):
        groups, keys = table.column("group").to_pylist(), table.column("key").to_pylist()
        names = list(zip(groups, keys, strict=True))
        repeated = [name for name, count in Counter(names).items() if count > 1]
        if repeated:
            raise StateError(
                f"rank {rank} holds {'/'.join(repeated[0])} twice; each tensor needs a name of its own"
            )
        dtypes, shapes = table.column("dtype").to_pylist(), table.column("shape").to_pylist()
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
            dtype_there, shape_there, rank_there = found.setdefault(name, (dtype, shape, rank))
            if (dtype, shape) != (dtype_there, shape_there):
                raise StateError(
                    f"{'/'.join(name)}: {dtype} {shape} on rank {rank}, but {dtype_there} {shape_there} on rank "
                    f"{rank_there}; the global tensor must be the same on all ranks"
                )
        names_by_rank.append(names)
    ordered = sorted(found)
    ids = {name: index for index, name in enumerate(ordered)}
    tensors = []
    for name in ordered:
        dtype, shape, _ = found[name]
        num_bytes = DTYPES[dtype].itemsize
        for length in shape:
            num_bytes *= length
        tensors.append(
            TensorRow(group=name[0], key=name[1], dtype=dtype, shape=tuple(shape), num_bytes=num_bytes)
        )
    return tensors, [np.asarray([ids[name] for name in names], dtype=np.int64) for names in names_by_rank]


def _join_boxes(
    boxes: Sequence[npt.NDArray[np.int64]], global_ids: Sequence[npt.NDArray[np.int64]], max_dims: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """All boxes as rows (tensor id, offsets, lengths), with the rank and position of each."""
    counts = [len(local) for local in boxes]
    corners = np.zeros((sum(counts), 1 + 2 * max_dims), dtype=np.int64)
    corners[:, 1 + max_dims :] = 1
    start = 0
    for local, ids in zip(boxes, global_ids, strict=True):
        num_dims = (local.shape[1] - 1) // 2
        part = corners[start : start + len(local)]
        part[:, 0] = ids[local[:, 0]]
        part[:, 1 : 1 + num_dims] = local[:, 1 : 1 + num_dims]
        part[:, 1 + max_dims : 1 + max_dims + num_dims] = local[:, 1 + num_dims :]
        start += len(local)
    rank = np.repeat(np.arange(len(boxes)), counts)
    position = np.concatenate([np.arange(count) for count in counts]) if counts else np.zeros(0)
    return corners, rank.astype(np.int64), position.astype(np.int64)


def _assign(
    num_bytes: npt.NDArray[np.int64], first: npt.NDArray[np.int64], rank: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Choose a holder for each distinct box.

    Args:
        num_bytes: Size of each distinct box, ``[n]``.
        first: Holders of box ``i`` are the rows ``first[i]`` to ``first[i + 1]``; ``[n + 1]``.
        rank: Rank of each row.

    Returns:
        The chosen row of each box, ``[n]``.
    """
    chosen = first[:-1].copy()
    num_holders = np.diff(first)
    load = np.zeros(int(rank.max()) + 1 if len(rank) else 1, dtype=np.int64)
    alone = num_holders == 1
    np.add.at(load, rank[chosen[alone]], num_bytes[alone])
    shared = np.flatnonzero(~alone)
    shared = shared[np.argsort(-num_bytes[shared], kind="stable")]

    # One heap for each set of holders: there are few sets (the replica groups of the mesh), but many boxes.
    heaps: dict[bytes, list[tuple[int, int, int]]] = {}
    for box in shared.tolist():
        start, stop = int(first[box]), int(first[box + 1])
        holders = rank[start:stop]
        heap = heaps.get(holders.tobytes())
        if heap is None:
            heap = [(int(load[one]), int(one), offset) for offset, one in enumerate(holders)]
            heapq.heapify(heap)
            heaps[holders.tobytes()] = heap
        # A rank may be in several heaps: loads only grow, so a stale top is pushed back with its present load.
        while heap[0][0] != load[heap[0][1]]:
            _, one, offset = heap[0]
            heapq.heapreplace(heap, (int(load[one]), one, offset))
        _, one, offset = heap[0]
        chosen[box] = start + offset
        load[one] += num_bytes[box]
        heapq.heapreplace(heap, (int(load[one]), one, offset))
    return chosen


def _check(plan: Plan) -> None:
    first = np.concatenate([[0], np.cumsum(plan.box_counts)])
    for index, tensor in enumerate(plan.tensors):
        rows = slice(int(first[index]), int(first[index + 1]))
        num_dims = len(tensor.shape)
        try:
            check_tiling(tensor.shape, plan.offsets[rows, :num_dims], plan.lengths[rows, :num_dims])
        except TilingError as error:
            holders = sorted(set(plan.rank[rows].tolist()))
            raise TilingError(
                f"{tensor.group}/{tensor.key}: {error} (boxes held by ranks {_short(holders)})"
            ) from None


def _short(ranks: list[int]) -> str:
    return str(ranks) if len(ranks) <= 8 else f"{ranks[:8]} and {len(ranks) - 8} more"
