"""Any map-style torch dataset as a source of a mixture: a row is a sample, a block a run of them."""

from __future__ import annotations

import functools
import importlib
import json
import threading
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from omniload.errors import MixtureError, SourceError
from omniload.sources.protocol import BadRow, FileEntry, Row

BLOCK_ROWS = 512
"""Samples per block; part of the order of the rows."""
_FILE = "dataset"


class DatasetSource:
    """A dataset with ``len`` and random access, presented as one file.

    A sample is a dict of columns; text, token ids (a list, array or tensor of integers) or a list of messages by
    itself is a row of that one column. The dataset must give the same sample for the same index every time, in every
    process. It is asked for a sample when the row is needed, from one thread at a time.

    Args:
        name: name of the source.
        dataset: the dataset.
        identity: what made the dataset: it and the length are all that its fingerprint can say.

    Raises:
        MixtureError: the dataset is iterable only, or has no length.
    """

    def __init__(self, name: str, dataset: Any, identity: str = "") -> None:
        self.name = name
        from torch.utils.data import IterableDataset  # not needed by sources of files

        where = identity or f"{name}:{type(dataset).__name__}"
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise MixtureError(
                f"source '{name}': {where} gives a {type(dataset).__name__}, which cannot be entered in the middle;"
                " give it __getitem__ and __len__, or write its rows to Parquet or JSONL files"
            )
        try:
            self._num_rows = len(dataset)
        except (TypeError, NotImplementedError):
            raise MixtureError(
                f"source '{name}': {where} gives a {type(dataset).__name__} without a length; give it __len__"
            ) from None
        self._reader = _Reader(name, dataset)
        digest = xxhash.xxh3_128_hexdigest(f"{identity}\0{self._num_rows}".encode())
        find_digest = functools.partial(str, digest)
        self.files = [FileEntry(path=_FILE, url=where, size=self._num_rows, find_digest=find_digest)]
        self.fingerprint = xxhash.xxh3_128_hexdigest(f"dataset {BLOCK_ROWS}\0{digest}".encode())

    def num_blocks(self, file: int) -> int:
        """Blocks of the dataset."""
        return -(-self._num_rows // BLOCK_ROWS)

    def schema(self, file: int) -> pa.Schema | None:
        """Keys of the first sample, with null for their types; None if it is no row."""
        row = self._reader.rows([0])[0] if self._num_rows else None
        return pa.schema([(key, pa.null()) for key in row]) if isinstance(row, dict) else None

    def read_block(self, file: int, block: int, columns: Iterable[str] | None = None) -> DatasetBlock:
        """A block; nothing is read yet, and ``columns`` changes nothing, samples are read whole."""
        return DatasetBlock(self._reader, self.row_ids(file, block))

    def num_rows(self, file: int) -> int:
        """Samples of the dataset."""
        return self._num_rows

    def read_rows(self, file: int, rows: np.ndarray, columns: Iterable[str] | None = None) -> DatasetBlock:
        """Some samples by index; nothing is read yet."""
        return DatasetBlock(self._reader, rows)

    def row_ids(self, file: int, block: int) -> np.ndarray:
        """``int64[rows]``: the index of each sample."""
        start = block * BLOCK_ROWS
        return np.arange(start, min(start + BLOCK_ROWS, self._num_rows), dtype=np.int64)

    def close(self) -> None:
        """Nothing is open here."""


class DatasetBlock:
    """A run of samples, each read when asked for.

    Args:
        reader: reads them.
        row_ids: ``int64[rows]`` their indices.
    """

    table = None

    def __init__(self, reader: _Reader, row_ids: np.ndarray) -> None:
        self._reader = reader
        self.row_ids = row_ids

    @property
    def num_rows(self) -> int:
        """Samples in the block."""
        return len(self.row_ids)

    @property
    def num_bytes(self) -> int:
        """Host memory held by the block; what the dataset holds is its own."""
        return int(self.row_ids.nbytes)

    def rows(self, indices: np.ndarray) -> list[Row | BadRow]:
        """The samples at ``indices`` as dicts."""
        return self._reader.rows(self.row_ids[indices].tolist())


class _Reader:
    """Reads samples for all blocks, one thread at a time: rows of two blocks may be asked for at once."""

    def __init__(self, name: str, dataset: Any) -> None:
        self._name = name
        self._dataset = dataset
        self._lock = threading.Lock()

    def rows(self, indices: list[int]) -> list[Row | BadRow]:
        together = getattr(self._dataset, "__getitems__", None)
        with self._lock:
            if together is not None:
                return [_row(sample) for sample in self._asked(together, indices, f"samples {indices[:3]} …")]
            return [
                _row(self._asked(self._dataset.__getitem__, index, f"sample {index}")) for index in indices
            ]

    def _asked(self, get: Any, index: Any, what: str) -> Any:
        try:
            return get(index)
        except Exception as error:
            reason = " ".join(str(error).split()) or "no message"
            raise SourceError(
                f"source '{self._name}': {what} of the dataset cannot be read: {type(error).__name__}: {reason}"
            ) from error


def open_dataset(name: str, factory: str, args: Mapping[str, Any]) -> DatasetSource:
    """Make the dataset that a mixture names.

    Args:
        name: name of the source.
        factory: ``package.module:function``, or a class.
        args: its keyword arguments.

    Raises:
        MixtureError: it cannot be imported or called, or makes no map-style dataset.
    """
    module, _, attribute = factory.partition(":")
    try:
        make: Any = importlib.import_module(module)
        for part in attribute.split("."):
            make = getattr(make, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise MixtureError(
            f"source '{name}': dataset {factory} cannot be imported ({error}); is it on PYTHONPATH?"
        ) from error
    try:
        dataset = make(**args)
    except Exception as error:
        reason = " ".join(str(error).split()) or "no message"
        raise MixtureError(
            f"source '{name}': dataset {factory} cannot be made: {type(error).__name__}: {reason}"
        ) from error
    arguments = json.dumps(dict(args), sort_keys=True, default=repr)
    return DatasetSource(name, dataset, factory if not args else f"{factory} with {arguments}")


def _row(sample: Any) -> Row | BadRow:
    if isinstance(sample, Mapping):
        return {key: _plain(value) for key, value in sample.items()}
    value = _plain(sample)
    if isinstance(value, str):
        return {"text": value}
    if isinstance(value, list) or (isinstance(value, np.ndarray) and value.ndim):
        messages = len(value) > 0 and isinstance(value[0], Mapping)
        return {"messages" if messages else "input_ids": value}
    return BadRow(reason=f"a {type(sample).__name__} is neither a dict, text nor token ids")


def _plain(value: Any) -> Any:
    """A tensor as the array it is."""
    return value.numpy(force=True) if hasattr(value, "numpy") and not isinstance(value, np.ndarray) else value
