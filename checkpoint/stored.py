"""A committed checkpoint as it lies in storage: metadata read, verified and cross-checked; payload untouched."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from checkpoint.errors import CorruptCheckpoint, FormatError
from checkpoint.format.digest import PIECE_BYTES, digest64
from checkpoint.format.index import Tables, decode_tables
from checkpoint.format.manifest import Manifest, read_manifest, read_metadata
from checkpoint.format.objects import decode_objects
from checkpoint.format.tables import decode_table
from storage import Store


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
    def tables(self) -> Tables:
        """Tensors, boxes and files.

        Raises:
            FormatError, CorruptCheckpoint: A table is damaged or contradicts another.
        """
        return decode_tables(self._read, self.data.url)

    @cached_property
    def tensor_ids(self) -> Mapping[tuple[str, str], int]:
        """Id of each tensor by (group, key)."""
        return {(tensor.group, tensor.key): index for index, tensor in enumerate(self.tables.tensors)}

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
        table = decode_table(name, self._read(name), where)
        columns = (table.column(one).to_pylist() for one in ("rank", "key", "value"))
        return {
            key: decode_objects(value.encode(), f"{where}: rank {rank}, {key}")
            for owner, key, value in zip(*columns, strict=True)
            if owner == rank
        }

    def check_files(self) -> None:
        """Check that every payload file is there with its full size; one listing, nothing is read.

        Raises:
            CorruptCheckpoint: One is not; names it.
        """
        sizes = {file.path: file.size for file in self.data.list()}
        for file in self.tables.files:
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
        file = self.tables.files[file_id]
        if digest64(header) != file.header_xxh3:
            raise CorruptCheckpoint(
                f"{self.data.url}/{file.path}: its header does not match its digest; load an earlier checkpoint"
            )

    def check_pieces(self, row: int, begin: int, memory: memoryview) -> None:
        """Check whole pieces of a stored box.

        Args:
            row: The stored box.
            begin: Where ``memory`` begins in it, a multiple of the piece size.
            memory: Bytes of the box, up to a piece boundary or its end.

        Raises:
            CorruptCheckpoint: A digest does not match; names file, bytes and tensor.
        """
        boxes = self.tables.boxes
        digests = boxes.digests_of(row)
        for start in range(0, len(memory), PIECE_BYTES):
            piece = memory[start : start + PIECE_BYTES]
            if digest64(piece) != int(digests[(begin + start) // PIECE_BYTES]):
                file = self.tables.files[int(boxes.file_id[row])].path
                at = int(boxes.byte_offset[row]) + begin + start
                raise CorruptCheckpoint(
                    f"{self.data.url}/{file}: bytes {at}..{at + len(piece)} of tensor {self.tensor_of(row)} do not "
                    "match their digest; load an earlier checkpoint"
                )

    def tensor_of(self, row: int) -> str:
        """Name of the tensor that a stored box belongs to: ``group/key``."""
        tensor = self.tables.tensors[self.tables.boxes.tensor_id(row)]
        return f"{tensor.group}/{tensor.key}"

    def _read(self, name: str) -> bytes:
        return read_metadata(self.store, self.manifest, name)
