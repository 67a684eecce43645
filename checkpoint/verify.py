"""Checking a whole checkpoint: metadata, headers, tilings and every byte of payload."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from checkpoint.errors import CheckpointError, FormatError
from checkpoint.format.digest import PIECE_BYTES
from checkpoint.format.dtypes import DTYPES
from checkpoint.format.payload import decode_header, entry_name
from checkpoint.stored import StoredCheckpoint
from storage.errors import StorageError

_UNIT_BYTES: Final = 4 * PIECE_BYTES
_NUM_THREADS: Final = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyReport:
    """What a verification looked at.

    Attributes:
        num_files: Payload files.
        num_tensors: Global tensors.
        num_bytes: Payload bytes.
        problems: One line for each thing that is wrong, at most 100; empty if all is well.
    """

    num_files: int
    num_tensors: int
    num_bytes: int
    problems: tuple[str, ...]


_MAX_PROBLEMS: Final = 100

# Pieces that follow each other in one file: file, first byte, size, and which pieces.
_Unit = tuple[int, int, int, npt.NDArray[np.int64]]


def verify(checkpoint: StoredCheckpoint, progress: Callable[[int], None] = lambda _: None) -> VerifyReport:
    """Check everything that can be checked.

    Args:
        checkpoint: What to check; its manifest has been.
        progress: Called with the number of bytes checked since the last call, from several threads.

    Raises:
        CheckpointError: The metadata is damaged, so that nothing more can be said, or a file is not there in full.
    """
    tables = checkpoint.tables
    problems: list[str] = []

    def check(work: Callable[[], None]) -> None:
        try:
            if len(problems) < _MAX_PROBLEMS:
                work()
        except (CheckpointError, StorageError) as error:
            problems.append(str(error))

    _ = checkpoint.objects
    checkpoint.rank_objects(0)
    checkpoint.check_files()
    for tensor_id in range(len(tables.tensors)):
        check(partial(tables.check_tiling, tensor_id))

    def payload(unit: _Unit) -> None:
        check(partial(_check_unit, checkpoint, unit))
        progress(unit[2])

    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="checkpoint-verify") as pool:
        rows = np.argsort(tables.boxes.file_id, kind="stable")
        rows_of = np.split(rows, np.searchsorted(tables.boxes.file_id[rows], np.arange(1, len(tables.files))))
        headers = [
            pool.submit(check, partial(_check_header, checkpoint, file_id, of_file.tolist()))
            for file_id, of_file in zip(range(len(tables.files)), rows_of, strict=False)
        ]
        for future in [*headers, *(pool.submit(payload, unit) for unit in _units(checkpoint))]:
            future.result()
    return VerifyReport(
        num_files=len(tables.files),
        num_tensors=len(tables.tensors),
        num_bytes=int(tables.boxes.stored_bytes.sum()),
        problems=tuple(problems[:_MAX_PROBLEMS]),
    )


def _units(checkpoint: StoredCheckpoint) -> Iterator[_Unit]:
    boxes = checkpoint.tables.boxes
    files = np.repeat(boxes.file_id, np.diff(boxes.piece_first))
    order = np.lexsort((boxes.piece_offset, files))
    sizes = boxes.piece_bytes[order]
    # A unit ends with its file, or where it would become too large.
    of_unit = np.cumsum(sizes) // _UNIT_BYTES
    starts = np.flatnonzero((np.diff(files[order], prepend=-1) != 0) | (np.diff(of_unit, prepend=-1) != 0))
    for pieces in np.split(order, starts[1:]) if len(order) else []:
        first = int(pieces[0])
        yield (
            int(files[first]),
            int(boxes.piece_offset[first]),
            int(boxes.piece_bytes[pieces].sum()),
            pieces,
        )


def _check_unit(checkpoint: StoredCheckpoint, unit: _Unit) -> None:
    file_id, start, num_bytes, pieces = unit
    path = checkpoint.tables.files[file_id].path
    (memory,) = checkpoint.data.read_ranges([(path, start, start + num_bytes)])
    digester = checkpoint.digester(pieces)
    digester.update(memory)
    checkpoint.check_digests(pieces, digester.digests)


def _check_header(checkpoint: StoredCheckpoint, file_id: int, rows: Sequence[int]) -> None:
    """The header is the one that was written, and says the same as the tables."""
    tables = checkpoint.tables
    file = tables.files[file_id]
    where = f"{checkpoint.data.url}/{file.path}"
    (header,) = checkpoint.data.read_ranges([(file.path, 0, file.header_bytes)])
    checkpoint.check_header(file_id, header)
    entries = decode_header(bytes(header), where)
    if len(entries) != len(rows):
        raise FormatError(f"{where}: its header has {len(entries)} entries, the tables {len(rows)}")
    for row in rows:
        tensor = tables.tensors[tables.boxes.tensor_id(row)]
        box = tables.boxes.box(row)
        num_bytes = int(tables.boxes.stored_bytes[row])
        begin = int(tables.boxes.byte_offset[row]) - file.header_bytes
        native = None if tables.boxes.compressed[row] else DTYPES[tensor.dtype].safetensors
        name = entry_name(tensor.key, tensor.shape, box)
        expected = {
            "dtype": native or "U8",
            "shape": list(box.lengths) if native else [num_bytes],
            "data_offsets": [begin, begin + num_bytes],
        }
        if entries.get(name) != expected:
            raise FormatError(f"{where}: entry {name!r} of its header disagrees with the tables")
