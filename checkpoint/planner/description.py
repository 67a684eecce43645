"""What a rank holds, as a compact message, and the messages of all ranks joined into columns.

A message is the *catalog* of the rank's tensors (group, key, dtype, shape, may differ) and its *rows*, one per box: the
number of the tensor in the catalog, offsets, lengths. Catalogs are the same on many ranks and are decoded once; rows
are never anything but columns of numbers.
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from checkpoint.boxes import Box
from checkpoint.errors import StateError
from checkpoint.format.dtypes import DTYPES
from checkpoint.format.index import TensorRow
from checkpoint.format.payload import check_group
from checkpoint.frameworks.values import LocalTensor

Ints = npt.NDArray[np.int64]

# Sizes of the catalog (compressed, raw) and of the rows (compressed, raw), dimensions, bytes of a number.
_HEAD: Final = struct.Struct("<QQQQHH")
_NARROW: Final = np.dtype("<u4")
_WIDE: Final = np.dtype("<i8")
_CODEC: Final = "zstd"
_INT64_MAX: Final = (1 << 63) - 1


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
    """What one rank holds, for :func:`join`.

    Raises:
        StateError: A group, key or dtype that cannot be stored, or a tensor that is there twice.
    """
    for group in sorted({tensor.group for tensor in tensors}):
        check_group(group)
    names = Counter(f"{tensor.group}/{tensor.key}" for tensor in tensors)
    repeated = next((name for name, count in names.items() if count > 1), None)
    if repeated is not None:
        raise StateError(f"{repeated}: is there twice; each tensor needs a name of its own")
    broken = next((name for name in names if name.encode(errors="ignore").decode() != name), None)
    if broken is not None:
        raise StateError(f"{broken!r}: is not Unicode text; rename the tensor")
    catalog = [
        (
            one.group,
            one.key,
            dtype_name(one.dtype, f"{one.group}/{one.key}"),
            list(one.shape),
            int(one.may_differ),
        )
        for one in tensors
    ]
    num_dims = max((len(tensor.shape) for tensor in tensors), default=0)
    rows = np.zeros((1 + 2 * num_dims, sum(len(tensor.boxes) for tensor in tensors)), dtype=np.int64)
    rows[1 + num_dims :] = 1  # missing dimensions are one element long
    column = 0
    for index, tensor in enumerate(tensors):
        for box in tensor.boxes:
            rows[0, column] = index
            rows[1 : 1 + len(box.offsets), column] = box.offsets
            rows[1 + num_dims : 1 + num_dims + len(box.lengths), column] = box.lengths
            column += 1
    return encode(catalog, rows)


def encode(catalog: Sequence[tuple[str, str, str, Sequence[int], int]], rows: Ints) -> bytes:
    """The message of one rank.

    Args:
        catalog: Group, key, dtype and global shape of each tensor, and whether its replicas may differ, 1 or 0.
        rows: Number of the tensor, offsets, and lengths of each box; ``[1 + 2 * dims, num_boxes]``, where a tensor has
            fewer dimensions with offset 0 and length 1.
    """
    text = json.dumps(catalog, separators=(",", ":")).encode()
    narrow = rows.size == 0 or (rows.min() >= 0 and rows.max() < 1 << 32)
    dtype = _NARROW if narrow else _WIDE
    numbers = np.ascontiguousarray(rows, dtype=dtype).tobytes()
    packed = [pa.compress(one, codec=_CODEC, asbytes=True) for one in (text, numbers)]
    sizes = (len(packed[0]), len(text), len(packed[1]), len(numbers))
    return _HEAD.pack(*sizes, len(rows) // 2, dtype.itemsize) + b"".join(packed)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Described:
    """What all ranks hold; n boxes, one held by several ranks counting several times.

    Attributes:
        tensors: Global tensors, sorted by (group, key).
        may_differ: Whether some rank says so of a tensor; bool ``[len(tensors)]``.
        tensor_id: Tensor of each box; int64 ``[n]``.
        offsets: First index of each box, 0 where a tensor has fewer dimensions; int64 ``[max_dims, n]``.
        lengths: Extent of each box, 1 where a tensor has fewer dimensions; int64 ``[max_dims, n]``.
        first: Boxes of rank ``r`` are ``first[r]`` to ``first[r + 1]``; int64 ``[num_ranks + 1]``.
    """

    tensors: list[TensorRow]
    may_differ: npt.NDArray[np.bool_]
    tensor_id: Ints
    offsets: Ints
    lengths: Ints
    first: Ints


def join(messages: Sequence[bytes]) -> Described:
    """Join what all ranks hold; only the numbers of ranks tell it in which order they come.

    Args:
        messages: From :func:`describe`, by rank.

    Raises:
        StateError: Ranks disagree about dtype or shape of a tensor, or the tensors are impossibly large.
    """
    heads = [_HEAD.unpack_from(message) for message in messages]
    catalogs: dict[bytes, int] = {}  # compressed, as they come: equal ones are not even decompressed
    holders: list[int] = []  # the first rank with each
    catalog_of = np.zeros(len(messages), dtype=np.int64)
    for rank, (message, head) in enumerate(zip(messages, heads, strict=True)):
        number = catalogs.setdefault(message[_HEAD.size : _HEAD.size + head[0]], len(catalogs))
        if number == len(holders):
            holders.append(rank)
        catalog_of[rank] = number
    sizes = [heads[rank][1] for rank in holders]
    tensors, may_differ, ids = _join_catalogs(
        [json.loads(_decompress(one, size)) for one, size in zip(catalogs, sizes, strict=True)], holders
    )
    max_dims = max((head[4] for head in heads), default=0)
    counts = [head[3] // (head[5] * (1 + 2 * head[4])) for head in heads]
    first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    tensor_id = np.empty(first[-1], dtype=np.int64)
    offsets = np.zeros((max_dims, first[-1]), dtype=np.int64)
    lengths = np.ones((max_dims, first[-1]), dtype=np.int64)
    begins = first.tolist()
    for rank, (message, head) in enumerate(zip(messages, heads, strict=True)):
        data = _decompress(memoryview(message)[_HEAD.size + head[0] :], head[3])
        numbers = np.frombuffer(data, dtype=_NARROW if head[5] == _NARROW.itemsize else _WIDE)
        rows = numbers.reshape(1 + 2 * head[4], counts[rank])
        part = slice(begins[rank], begins[rank + 1])
        tensor_id[part] = rows[0]
        offsets[: head[4], part] = rows[1 : 1 + head[4]]
        lengths[: head[4], part] = rows[1 + head[4] :]
    # From numbers in the catalogs to numbers of global tensors, for all boxes at once.
    starts = np.concatenate([[0], np.cumsum([len(one) for one in ids])])[:-1].astype(np.int64)
    tensor_id += np.repeat(starts[catalog_of], counts)
    tensor_id = np.concatenate([np.zeros(0, dtype=np.int64), *ids])[tensor_id]
    return Described(
        tensors=tensors,
        may_differ=may_differ,
        tensor_id=tensor_id,
        offsets=offsets,
        lengths=lengths,
        first=first,
    )


def _decompress(data: bytes | memoryview, num_bytes: int) -> bytes:
    return bytes(pa.decompress(data, decompressed_size=num_bytes, codec=_CODEC, asbytes=True))


def _join_catalogs(
    catalogs: Sequence[list[tuple[str, str, str, list[int], int]]], ranks: Sequence[int]
) -> tuple[list[TensorRow], npt.NDArray[np.bool_], list[Ints]]:
    """Global tensors in order, which of them may differ, and the global number of each tensor of each catalog."""
    found: dict[tuple[str, str], tuple[str, list[int], int]] = {}
    differing: set[tuple[str, str]] = set()
    for catalog, rank in zip(catalogs, ranks, strict=True):
        for group, key, dtype, shape, is_differing in catalog:
            if is_differing:
                differing.add((group, key))
            dtype_there, shape_there, rank_there = found.setdefault((group, key), (dtype, shape, rank))
            if (dtype, shape) != (dtype_there, shape_there):
                raise StateError(
                    f"{group}/{key}: {dtype} {shape} on rank {rank}, but {dtype_there} {shape_there} on rank "
                    f"{rank_there}; the global tensor must be the same on all ranks"
                )
    tensors = []
    total = 0
    for (group, key), (dtype, shape, _) in sorted(found.items(), key=lambda one: one[0]):
        num_bytes = math.prod(shape) * DTYPES[dtype].itemsize
        total += num_bytes
        if total > _INT64_MAX:
            raise StateError(f"{group}/{key}: with shape {shape} of {dtype} the state has over 2^63 bytes")
        tensors.append(TensorRow(group=group, key=key, dtype=dtype, shape=tuple(shape), num_bytes=num_bytes))
    numbers = {(tensor.group, tensor.key): index for index, tensor in enumerate(tensors)}
    ids = [
        np.asarray([numbers[group, key] for group, key, *_ in catalog], dtype=np.int64)
        for catalog in catalogs
    ]
    may_differ = np.zeros(len(tensors), dtype=bool)
    may_differ[[numbers[one] for one in differing]] = True
    return tensors, may_differ, ids
