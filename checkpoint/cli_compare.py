"""What the states in two checkpoints, A and B, do not have in common, bit for bit.

Only state is compared: not how it is cut into boxes, nor step, time, writer and user metadata. Where both store the
same box their digests tell, and nothing is read for it; whether digests are right is for ``verify`` to say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from checkpoint.boxes import Box
from checkpoint.cli_common import progress_bar
from checkpoint.format.dtypes import DTYPES
from checkpoint.format.manifest import read_metadata
from checkpoint.format.objects import decode_objects, first_difference
from checkpoint.format.tables import decode_table
from checkpoint.stored import StoredCheckpoint

# Part of a tensor that both have: its id in A, its id in B, and the box.
_Part = tuple[int, int, Box]


class Kind(StrEnum):
    """What was found of a tensor or plain value."""

    ONLY_IN_A = "only in A"
    ONLY_IN_B = "only in B"
    OTHER_FORM = "other shape or dtype"
    OTHER_VALUES = "other values"
    EQUAL = "equal"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One tensor or plain value.

    Attributes:
        kind: What was found.
        key: ``group/key`` of a tensor; path of a plain value, up to the first place that differs.
        forms: Dtype and shape in A and in B, if that is what differs.
    """

    kind: Kind
    key: str
    forms: tuple[str, str] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What comparing two checkpoints found.

    Attributes:
        findings: One for each tensor and plain value of either, by kind; a plain value that is a list counts as one.
        num_bytes_read: Payload read from both together, where digests could not tell.
        num_ranks: How many ranks wrote each, if not equally many. Rank-local values mean nothing on another number
            of ranks and were then left out.
    """

    findings: Mapping[Kind, Sequence[Finding]]
    num_bytes_read: int
    num_ranks: tuple[object, object] | None

    @property
    def equal(self) -> bool:
        """Whether no difference was found."""
        return not any(found for kind, found in self.findings.items() if kind is not Kind.EQUAL)


def compare(a: StoredCheckpoint, b: StoredCheckpoint) -> Comparison:
    """Compare two checkpoints.

    Raises:
        FormatError, CorruptCheckpoint, TilingError: One of them is damaged.
        StorageError: One could not be read.
    """
    found, num_bytes_read = _compare_tensors(a, b)
    found += _compare_trees(a.objects, b.objects, "")
    ranks = a.manifest.writer.get("world_size"), b.manifest.writer.get("world_size")
    if ranks[0] == ranks[1]:
        found += _compare_trees(_rank_objects(a), _rank_objects(b), "")
    return Comparison(
        findings={kind: [one for one in found if one.kind is kind] for kind in Kind},
        num_bytes_read=num_bytes_read,
        num_ranks=None if ranks[0] == ranks[1] else ranks,
    )


def _compare_tensors(a: StoredCheckpoint, b: StoredCheckpoint) -> tuple[list[Finding], int]:
    found = []
    names: dict[int, str] = {}  # tensors of A that B has in the same form
    differing: set[int] = set()
    unknown: list[_Part] = []
    for group, key in sorted(a.tensor_ids.keys() | b.tensor_ids.keys()):
        name = f"{group}/{key}"
        id_a, id_b = (one.tensor_ids.get((group, key)) for one in (a, b))
        if id_a is None:
            found.append(Finding(kind=Kind.ONLY_IN_B, key=name))
        elif id_b is None:
            found.append(Finding(kind=Kind.ONLY_IN_A, key=name))
        elif (forms := (_form(a, id_a), _form(b, id_b)))[0] != forms[1]:
            found.append(Finding(kind=Kind.OTHER_FORM, key=name, forms=forms))
        else:
            names[id_a] = name
            boxes = _not_told_by_digests(a, b, id_a, id_b)
            if boxes is None:
                differing.add(id_a)
            else:
                unknown += [(id_a, id_b, box) for box in boxes]
    num_bytes_read = _read_and_compare(a, b, unknown, differing) if unknown else 0
    for id_a, name in names.items():
        found.append(Finding(kind=Kind.OTHER_VALUES if id_a in differing else Kind.EQUAL, key=name))
    return found, num_bytes_read


def _form(checkpoint: StoredCheckpoint, tensor_id: int) -> str:
    row = checkpoint.tables.tensors[tensor_id]
    return f"{row.dtype} {list(row.shape)}"


def _not_told_by_digests(
    a: StoredCheckpoint, b: StoredCheckpoint, id_a: int, id_b: int
) -> Sequence[Box] | None:
    """Boxes of A that B does not store as well; None if one that both store has other digests."""
    for checkpoint, tensor_id in ((a, id_a), (b, id_b)):
        checkpoint.tables.check_tiling(tensor_id)
    corners_a, corners_b = _corners(a, id_a), _corners(b, id_b)
    rows_a, rows_b = a.tables.boxes.rows_of(id_a), b.tables.boxes.rows_of(id_b)
    compressed_a, compressed_b = a.tables.boxes.compressed, b.tables.boxes.compressed
    plain = not (compressed_a[list(rows_a)].any() or compressed_b[list(rows_b)].any())
    if plain and np.array_equal(corners_a, corners_b):  # the usual case, without a loop over boxes
        return [] if np.array_equal(_digests(a, rows_a), _digests(b, rows_b)) else None
    row_in_b = {corners.tobytes(): row for corners, row in zip(corners_b, rows_b, strict=True)}
    unknown = []
    for corners, row in zip(corners_a, rows_a, strict=True):
        other = row_in_b.get(corners.tobytes())
        if other is None or compressed_a[row] != compressed_b[other]:
            unknown.append(a.tables.boxes.box(row))
        elif not np.array_equal(a.tables.boxes.digests_of(row), b.tables.boxes.digests_of(other)):
            if not compressed_a[row]:
                return None
            unknown.append(a.tables.boxes.box(row))  # the same may be compressed in several ways
    return unknown


def _corners(checkpoint: StoredCheckpoint, tensor_id: int) -> npt.NDArray[np.int64]:
    """Offsets and lengths of the boxes of a tensor, ``[num_boxes, 2 * num_dims]``."""
    num_dims = len(checkpoint.tables.tensors[tensor_id].shape)
    return np.concatenate(checkpoint.tables.boxes.corners_of(tensor_id, num_dims), axis=1)


def _digests(checkpoint: StoredCheckpoint, rows: range) -> npt.NDArray[np.uint64]:
    boxes = checkpoint.tables.boxes
    return boxes.digests[int(boxes.piece_first[rows.start]) : int(boxes.piece_first[rows.stop])]


def _read_and_compare(
    a: StoredCheckpoint, b: StoredCheckpoint, parts: Sequence[_Part], differing: set[int]
) -> int:
    """Compare parts of tensors by their bytes.

    Args:
        a: One checkpoint.
        b: The other.
        parts: Which parts.
        differing: Ids in A of the tensors that are known to differ, which are not read; those found are added.

    Returns:
        Bytes of payload that were read.
    """
    # Imports torch, which most comparisons do without.
    from checkpoint.cli_read import parts_of, read_parts

    itemsizes = [DTYPES[tensor.dtype].itemsize for tensor in a.tables.tensors]
    num_bytes_read = 0
    total = sum(box.num_elements * itemsizes[id_a] for id_a, _, box in parts)
    with progress_bar("comparing", total) as advance:
        small = ((id_a, id_b, part) for id_a, id_b, box in parts for part in parts_of(box, itemsizes[id_a]))
        for batch in _batches(small, itemsizes, differing):
            left, num_bytes_of_a = read_parts(a, [(id_a, box) for id_a, _, box in batch])
            right, num_bytes_of_b = read_parts(b, [(id_b, box) for _, id_b, box in batch])
            num_bytes_read += num_bytes_of_a + num_bytes_of_b
            for (id_a, _, _), bytes_a, bytes_b in zip(batch, left, right, strict=True):
                if not np.array_equal(bytes_a, bytes_b):
                    differing.add(id_a)
                advance(len(bytes_a))
    return num_bytes_read


def _batches(parts: Iterator[_Part], itemsizes: Sequence[int], differing: set[int]) -> Iterator[list[_Part]]:
    """Parts that are read together, without those of tensors that were found to differ meanwhile."""
    from checkpoint.cli_read import PART_BYTES

    batch: list[_Part] = []
    num_bytes = 0
    for part in parts:
        size = part[2].num_elements * itemsizes[part[0]]
        if batch and num_bytes + size > PART_BYTES:
            yield batch
            batch, num_bytes = [], 0
        if part[0] not in differing:
            batch.append(part)
            num_bytes += size
    if batch:
        yield batch


def _rank_objects(checkpoint: StoredCheckpoint) -> dict[str, Any]:
    """Rank-local values of all ranks, as ``rank <rank>/<key>``."""
    name = "rank_objects.parquet"
    where = f"{checkpoint.data.url}/{name}"
    table = decode_table(name, read_metadata(checkpoint.store, checkpoint.manifest, name), where)
    columns = (table.column(one).to_pylist() for one in ("rank", "key", "value"))
    return {
        f"rank {rank}/{key}": decode_objects(value.encode(), f"{where}: rank {rank}, {key}")
        for rank, key, value in zip(*columns, strict=True)
    }


def _compare_trees(a: Mapping[Any, Any], b: Mapping[Any, Any], prefix: str) -> list[Finding]:
    """Compare trees of plain values, dict by dict."""
    found = []
    for key in [*a, *(key for key in b if key not in a)]:
        name = f"{prefix}{key}"
        if key not in b:
            found.append(Finding(kind=Kind.ONLY_IN_A, key=name))
        elif key not in a:
            found.append(Finding(kind=Kind.ONLY_IN_B, key=name))
        elif isinstance(a[key], dict) and isinstance(b[key], dict):
            found += _compare_trees(a[key], b[key], f"{name}." if prefix else f"{name}/")
        elif (differs := first_difference(a[key], b[key], name)) is not None:
            found.append(Finding(kind=Kind.OTHER_VALUES, key=differs))
        else:
            found.append(Finding(kind=Kind.EQUAL, key=name))
    return found
