"""datasets, the two ways it loads: rows of a dataset on disk, and a stream with a shuffle buffer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets  # type: ignore[import-not-found]
import numpy as np
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-not-found]

from benchmarks.peers.packed import Documents, Packed, num_tokens

_BUFFER_ROWS = 1000
_BATCH_ROWS = 1000

datasets.disable_progress_bars()


def write(parquet: Sequence[Path], directory: Path) -> Path:
    """Save what Parquet files hold in Arrow files. Returns the directory."""
    rows = datasets.Dataset.from_parquet([str(path) for path in parquet], cache_dir=f"{directory}-cache")
    rows.save_to_disk(str(directory))
    return directory


class MapStyle:
    """Rows of saved datasets, in an order shuffled over all of them.

    Args:
        directories: written by `write`.
        column: the one to load.
    """

    def __init__(self, directories: Sequence[Path], column: str) -> None:
        parts = [datasets.load_from_disk(str(directory)) for directory in directories]
        rows = datasets.concatenate_datasets(parts).select_columns([column])
        self._rows = rows.shuffle(seed=0, keep_in_memory=True)
        self._column = column

    def rows(self, worker: int, num_workers: int) -> Iterator[np.ndarray]:
        """Row by row, as arrays of numpy."""
        return (row[self._column] for row in self._part(worker, num_workers).with_format("numpy"))

    def batches(self, worker: int, num_workers: int) -> Iterator[np.ndarray]:
        """The same documents, views of Arrow tables of a thousand rows."""
        for table in self._part(worker, num_workers).with_format("arrow").iter(_BATCH_ROWS):
            documents = table.column(0).combine_chunks()
            tokens, bounds = documents.values.to_numpy(), documents.offsets.to_numpy().tolist()
            yield from (tokens[start:end] for start, end in itertools.pairwise(bounds))

    def _part(self, worker: int, num_workers: int) -> Any:
        if num_workers == 1:
            return self._rows
        return self._rows.shard(num_workers, worker, contiguous=False, keep_in_memory=True)


def images(parquet: Sequence[Path], directory: Path, column: str) -> Callable[[int, int], Iterator[Any]]:
    """Images of a saved dataset, decoded by the library, in shuffled order."""
    saved = datasets.load_from_disk(str(write(parquet, directory)))
    rows = saved.cast_column(column, datasets.Image()).shuffle(seed=0, keep_in_memory=True)
    return lambda worker, num_workers: (rows[i][column] for i in range(worker, len(rows), num_workers))


def streamed(parquet: Sequence[Path], column: str) -> Documents:
    """Documents of Parquet files as arrays of numpy."""
    rows = _shuffled(_stream(parquet).select_columns([column])).with_format("numpy")
    return lambda worker, num_workers: (row[column] for row in rows)


def tokenised(parquet: Sequence[Path], encode: Callable[[list[str]], Sequence[Any]]) -> Documents:
    """Documents of Parquet files of text, tokenised in batches before they are shuffled."""

    def encoded(batch: dict[str, list[str]]) -> dict[str, list[np.ndarray]]:
        return {"input_ids": [np.array(one.ids, np.uint16) for one in encode(batch["text"])]}

    rows = _stream(parquet).map(encoded, batched=True, batch_size=100, remove_columns=["text"])
    rows = _shuffled(rows)
    return lambda worker, num_workers: (row["input_ids"] for row in rows)


def _stream(parquet: Sequence[Path]) -> Any:
    """Rows as they are stored; workers share the files."""
    files = [str(path) for path in parquet]
    return datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)


def _shuffled(rows: Any) -> Any:
    return rows.shuffle(seed=0, buffer_size=_BUFFER_ROWS)


def packed_tokens(documents: Documents, num_workers: int) -> int:
    """Load all documents once in a StatefulDataLoader. Returns the tokens delivered."""
    return num_tokens(StatefulDataLoader(Packed(documents), batch_size=None, num_workers=num_workers))
