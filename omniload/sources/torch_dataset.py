"""Any map-style torch dataset as a source of a mixture: a row is a sample, a block a run of them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Mapping, Sized
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from omniload.errors import MixtureError, SourceError, kind_and_message
from omniload.sources.protocol import BadRow, FileEntry, Row
from omniload.sources.shared import reader_of
from omniload.sources.torch_rows import copy_of, row_of

BLOCK_ROWS = 512
"""Samples per block; part of the order of the rows."""


class DatasetSource:
    """A dataset with ``len`` and random access, presented as one file.

    A sample is a dict of columns; text, token ids (a list, array or tensor of integers) or a list of messages by
    itself is a row of that one column. The dataset must give the same sample for the same index every time, in every
    process. It is asked for a sample when the row is needed, from one thread at a time.

    Args:
        name: name of the source.
        dataset: the dataset.
        where: what made the dataset, for messages. This, ``identity`` and the length are all that its fingerprint says.
        identity: what the dataset says about its rows.

    Raises:
        MixtureError: the dataset has no length.
    """

    def __init__(self, name: str, dataset: Any, where: str = "", identity: str = "") -> None:
        self.name = name
        try:
            self._num_rows = len(dataset)
        except Exception as error:
            raise MixtureError(
                f"source '{name}': {where} gives a {type(dataset).__name__} without a length"
                f" ({kind_and_message(error)}); give it __len__"
            ) from error
        self._reader = reader_of(dataset, _Reader)
        known = f"{where}\0{self._num_rows}" + (f"\0{identity}" if identity else "")
        digest = xxhash.xxh3_128_hexdigest(known.encode())
        find_digest = functools.partial(str, digest)
        self.files = [FileEntry(path="dataset", url=where, size=self._num_rows, find_digest=find_digest)]
        self.fingerprint = xxhash.xxh3_128_hexdigest(f"dataset {BLOCK_ROWS}\0{digest}".encode())

    def num_blocks(self, file: int) -> int:
        """Blocks of the dataset."""
        return -(-self._num_rows // BLOCK_ROWS)

    def schema(self, file: int) -> pa.Schema | None:
        """Keys of the first sample, with null for their types; None if it is no row."""
        row = self._reader.rows(self.name, [0])[0] if self._num_rows else None
        return pa.schema([(key, pa.null()) for key in row]) if isinstance(row, dict) else None

    def read_block(self, file: int, block: int, columns: Iterable[str] | None = None) -> DatasetBlock:
        """A block; nothing is read yet, and ``columns`` changes nothing, samples are read whole."""
        return DatasetBlock(self.name, self._reader, self.row_ids(file, block))

    def num_rows(self, file: int) -> int:
        """Samples of the dataset."""
        return self._num_rows

    def read_rows(self, file: int, rows: np.ndarray, columns: Iterable[str] | None = None) -> DatasetBlock:
        """Some samples by index; nothing is read yet."""
        return DatasetBlock(self.name, self._reader, rows)

    def row_ids(self, file: int, block: int) -> np.ndarray:
        """``int64[rows]``: the index of each sample."""
        start = block * BLOCK_ROWS
        return np.arange(start, min(start + BLOCK_ROWS, self._num_rows), dtype=np.int64)

    def close(self) -> None:
        """Nothing is open here."""


class DatasetBlock:
    """A run of samples, each read when asked for.

    Args:
        source: name of the source, for errors.
        reader: reads them.
        row_ids: ``int64[rows]`` their indices.
    """

    table = None

    def __init__(self, source: str, reader: _Reader, row_ids: np.ndarray) -> None:
        self._source = source
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
        """The samples at ``indices`` as dicts; copies, as a dataset may hold what it gives.

        Raises:
            SourceError: the dataset raises an error, or gives something else than a sample for each index.
        """
        return self._reader.rows(self._source, self.row_ids[indices].tolist())


class _Reader:
    """Reads samples for all blocks, one thread at a time: rows of two blocks may be asked for at once."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._lock = threading.Lock()

    def rows(self, source: str, indices: list[int]) -> list[Row | BadRow]:
        together = getattr(self._dataset, "__getitems__", None)
        with self._lock:
            if together is not None:
                samples = _asked(source, together, indices, f"samples {indices[:3]} …")
                _check_each(source, samples, len(indices))
            else:
                get = self._dataset.__getitem__
                samples = [_asked(source, get, index, f"sample {index}") for index in indices]
            return [copy_of(row_of(sample)) for sample in samples]


def _check_each(source: str, samples: Any, wanted: int) -> None:
    """Refuse columns in place of samples, and samples that are too few or too many."""
    if isinstance(samples, Mapping) or not isinstance(samples, Sized):
        given = f"a {type(samples).__name__}"
    elif len(samples) != wanted:
        given = f"{len(samples)} samples"
    else:
        return
    raise SourceError(
        f"source '{source}': __getitems__ of the dataset gave {given} for {wanted} indices; it has to give a list of"
        " one sample for each, or not be there"
    )


def _asked(source: str, get: Any, index: Any, what: str) -> Any:
    try:
        return get(index)
    except Exception as error:
        raise SourceError(
            f"source '{source}': {what} of the dataset cannot be read: {kind_and_message(error)}"
        ) from error
