"""A committed checkpoint as it lies in storage: metadata read, verified and cross-checked; payload untouched."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from checkpoint.errors import CorruptCheckpoint, FormatError
from checkpoint.format.digest import Digester, digest64
from checkpoint.format.index import Catalog, Tables, decode_boxes, decode_catalog
from checkpoint.format.manifest import Manifest, read_manifest, read_metadata
from checkpoint.format.objects import decode_objects
from checkpoint.format.partial import can_read_rows, read_rows
from checkpoint.format.tables import decode_table
from storage import Store

_BOXES: Final = ("shards.parquet", "stored.parquet")

# Below this the tables of boxes are read whole, in two requests and not four.
_WHOLE_BYTES: Final = 128 << 10


class StoredCheckpoint:
    """Metadata of one committed checkpoint.

    Args:
        store: The checkpoint directory.
        manifest: Its manifest. Whatever is committed there later, this object stays with this attempt.
    """

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self.store = store
        self.manifest = manifest
        self.data = store.sub(manifest.data_dir)
        self._only: npt.NDArray[np.int64] | None = None  # ids of the tensors whose boxes are read; None: all

    @classmethod
    def open(cls, store: Store) -> StoredCheckpoint:
        """Open what is committed at ``store``.

        Raises:
            NotACheckpoint: Nothing is.
            FormatError, CorruptCheckpoint: The manifest is damaged.
        """
        return cls(store, read_manifest(store)[0])

    def __repr__(self) -> str:
        return f"StoredCheckpoint({self.store.url!r}, step={self.manifest.step})"

    @cached_property
    def catalog(self) -> Catalog:
        """Tensors and files.

        Raises:
            FormatError, CorruptCheckpoint: A table is damaged or contradicts itself.
        """
        return decode_catalog(self._table("tensors.parquet"), self._table("files.parquet"), self.data.url)

    @cached_property
    def tables(self) -> Tables:
        """Tensors, files and all boxes.

        Raises:
            FormatError, CorruptCheckpoint: A table is damaged or contradicts another.
        """
        only = self._only
        num_bytes = sum(self.manifest.files[name].num_bytes for name in _BOXES)
        partly = num_bytes > _WHOLE_BYTES and all(can_read_rows(self.manifest, name) for name in _BOXES)
        if only is None or not partly:
            shards, stored = (self._table(name) for name in _BOXES)
            return decode_boxes(self.catalog, shards, stored, self.data.url)
        counts = self.catalog.box_counts
        end = np.cumsum(counts)[only]
        shards, stored = (
            read_rows(self.store, self.manifest, name, int(counts.sum()), end - counts[only], end)
            for name in _BOXES
        )
        return decode_boxes(self.catalog, shards, stored, self.data.url, only=only)

    def narrowed(self, tensor_ids: Iterable[int]) -> StoredCheckpoint:
        """The same checkpoint, with the boxes of some tensors only.

        Of large tables of boxes only the parts that hold them are read. Whether boxes share bytes is then known of
        these alone; everything else is checked as if all had been read.
        """
        narrow = StoredCheckpoint(self.store, self.manifest)
        narrow.catalog = self.catalog
        narrow._only = np.asarray(sorted(set(tensor_ids)), dtype=np.int64)
        return narrow

    @cached_property
    def tensor_ids(self) -> Mapping[tuple[str, str], int]:
        """Id of each tensor by (group, key)."""
        return {(tensor.group, tensor.key): index for index, tensor in enumerate(self.catalog.tensors)}

    @cached_property
    def objects(self) -> Mapping[str, Any]:
        """Global objects: top-level name in the state to its tree."""
        name = "objects.json"
        objects = decode_objects(self._read(name), f"{self.data.url}/{name}")
        if not isinstance(objects, dict) or not all(isinstance(group, str) for group in objects):
            raise FormatError(f"{self.data.url}/{name}: not an object")
        return objects

    def rank_objects(self, rank: int) -> Mapping[str, Any]:
        """Rank-local objects of one rank of the job that wrote this; empty if there was no such rank."""
        name = "rank_objects.parquet"
        where = f"{self.data.url}/{name}"
        table = decode_table(name, self._read(name), where, rank=rank)
        columns = (table.column(one).to_pylist() for one in ("key", "value"))
        return {
            key: decode_objects(value.encode(), f"{where}: rank {rank}, {key}")
            for key, value in zip(*columns, strict=True)
        }

    def check_files(self) -> None:
        """Check that every payload file is there with its full size; one listing, nothing is read.

        Raises:
            CorruptCheckpoint: One is not; names it.
        """
        sizes = {file.path: file.size for file in self.data.list()}
        for file in self.catalog.files:
            size = sizes.get(file.path)
            if size != file.num_bytes:
                found = "is missing" if size is None else f"has {size} bytes"
                raise CorruptCheckpoint(
                    f"{self.data.url}/{file.path}: {found}, {file.num_bytes} were written; "
                    "restore the file or load an earlier checkpoint"
                )

    def check_header(self, file_id: int, header: memoryview) -> None:
        """Check the bytes of a payload file's header.

        Raises:
            CorruptCheckpoint: They do not match their digest.
        """
        file = self.catalog.files[file_id]
        if digest64(header) != file.header_xxh3:
            raise CorruptCheckpoint(
                f"{self.data.url}/{file.path}: its header does not match its digest; load an earlier checkpoint"
            )

    def digester(self, pieces: npt.NDArray[np.int64]) -> Digester:
        """Digests whole pieces, for :meth:`check_digests`."""
        return Digester(self.tables.boxes.piece_bytes[pieces].tolist())

    def check_digests(self, pieces: npt.NDArray[np.int64], found: Sequence[int]) -> None:
        """Check whole pieces.

        Args:
            pieces: Which, as rows of the pieces in ``tables.boxes``.
            found: Digest of each as it was read.

        Raises:
            CorruptCheckpoint: A digest does not match; names file, bytes and tensor.
        """
        boxes = self.tables.boxes
        differ = boxes.digests[pieces] != np.asarray(found, dtype=np.uint64)
        if differ.any():
            piece = int(pieces[differ.argmax()])
            row = boxes.row_of_piece(piece)
            file = self.tables.files[int(boxes.file_id[row])].path
            at = int(boxes.piece_offset[piece])
            raise CorruptCheckpoint(
                f"{self.data.url}/{file}: bytes {at}..{at + int(boxes.piece_bytes[piece])} of tensor "
                f"{self.tensor_of(row)} do not match their digest; load an earlier checkpoint"
            )

    def tensor_of(self, row: int) -> str:
        """Name of the tensor that a stored box belongs to: ``group/key``."""
        tensor = self.tables.tensors[self.tables.boxes.tensor_id(row)]
        return f"{tensor.group}/{tensor.key}"

    def _table(self, name: str) -> pa.Table:
        return decode_table(name, self._read(name), f"{self.data.url}/{name}")

    def _read(self, name: str) -> bytes:
        return read_metadata(self.store, self.manifest, name)
