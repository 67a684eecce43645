"""grain: records with random access, shuffled by index and packed by its own concatenation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import grain  # type: ignore[import-not-found]
import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter  # type: ignore[import-not-found]
from grain.experimental import ConcatThenSplitIterDataset  # type: ignore[import-not-found]
from grain.sources import ArrayRecordDataSource  # type: ignore[import-not-found]

from benchmarks.peers.packed import ROWS, SEQ_LEN


def write(records: Iterable[bytes], path: Path) -> Path:
    """Write records that can be read one at a time. Returns the path."""
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()
    return path


def records(paths: Sequence[Path]) -> Any:
    """The records of files, to be loaded."""
    return ArrayRecordDataSource([str(path) for path in paths])


def as_tokens(record: bytes | np.ndarray) -> dict[str, np.ndarray]:
    """A document of ``uint16`` tokens."""
    return {"input_ids": np.frombuffer(record, np.uint16)}


def packed_tokens(
    source: Any,
    as_document: Callable[[Any], dict[str, np.ndarray]],
    num_workers: int,
    *,
    num_threads: int = 0,
) -> int:
    """Load, shuffle, pack and batch everything once. Returns the tokens delivered.

    Args:
        source: of random access.
        as_document: makes a document of an item.
        num_workers: processes.
        num_threads: that read ahead; the library's default is 16.
    """
    options = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=500 if num_threads else 0)
    rows = grain.MapDataset.source(source).shuffle(seed=0).map(as_document).to_iter_dataset(options)
    batches = ConcatThenSplitIterDataset(rows, length_struct={"input_ids": SEQ_LEN}).batch(ROWS)
    if num_workers:
        batches = batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=num_workers))
    return sum(batch["input_ids"].astype(np.int64).size for batch in batches)
