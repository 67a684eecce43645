"""Parts of stored tensors as bytes, verified, a bounded number of them at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import torch

from checkpoint.boxes import Box
from checkpoint.engine.memory import Bytes, flat_bytes
from checkpoint.engine.read import Wanted, read_boxes
from checkpoint.engine.views import flat_range_boxes
from checkpoint.format.dtypes import DTYPES
from checkpoint.planner import torch_dtype
from checkpoint.stored import StoredCheckpoint

PART_BYTES: Final = 32 << 20
"""Largest part that is read at a time."""


def parts_of(box: Box, itemsize: int) -> Iterator[Box]:
    """Cut a box into boxes of at most :data:`PART_BYTES` that follow each other in row-major order.

    Args:
        box: Part of a tensor.
        itemsize: Bytes of an element.
    """
    step = PART_BYTES // itemsize
    for begin in range(0, box.num_elements, step):
        yield from flat_range_boxes(box, begin, min(begin + step, box.num_elements))


def read_in_parts(checkpoint: StoredCheckpoint, tensor_id: int, box: Box) -> Iterator[Bytes]:
    """The bytes of a box of one tensor, part by part; otherwise as :func:`read_parts`."""
    for part in parts_of(box, DTYPES[checkpoint.tables.tensors[tensor_id].dtype].itemsize):
        (data,), _ = read_parts(checkpoint, [(tensor_id, part)])
        yield data


def read_parts(checkpoint: StoredCheckpoint, parts: Sequence[tuple[int, Box]]) -> tuple[list[Bytes], int]:
    """Read boxes, each with all its bytes in row-major order, checking the digests of the pieces they lie in.

    Args:
        checkpoint: Where from; the tilings of the tensors have been checked.
        parts: Tensor id and box, which has elements.

    Returns:
        The bytes of each box, and how many bytes of payload were read.

    Raises:
        CorruptCheckpoint: A digest does not match; names file and tensor.
        StorageError: Reading failed.
    """
    wanted = []
    for tensor_id, box in parts:
        dtype = torch_dtype(checkpoint.tables.tensors[tensor_id].dtype)
        # torch warns of complex32 when it allocates one; only its bits matter here.
        dtype = torch.int32 if dtype == torch.complex32 else dtype
        wanted.append(
            Wanted(tensor_id=tensor_id, box=box, view=torch.empty(box.lengths, dtype=dtype, device="cpu"))
        )
    stats = read_boxes(checkpoint, wanted, verify=True)
    return [flat_bytes(one.view) for one in wanted], stats.num_bytes_read
