"""From what the ranks wrote to a committed checkpoint.

Each rank reports what it wrote (its *vote*). With all votes, rank 0 writes the metadata files and then creates the
manifest; that one call is the commit.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from checkpoint.boxes import Box
from checkpoint.engine.write import WrittenFile
from checkpoint.errors import AlreadyCommitted, NotACheckpoint
from checkpoint.format.digest import digest_hex
from checkpoint.format.index import CODEC_NONE
from checkpoint.format.manifest import (
    MANIFEST,
    Manifest,
    MetadataFile,
    encode_manifest,
    read_manifest,
)
from checkpoint.format.objects import encode_objects
from checkpoint.format.payload import entry_name
from checkpoint.format.tables import encode_table
from checkpoint.planner import Plan
from storage import Store
from storage.errors import AlreadyExists, StorageError
from storage.spans import span

_logger = logging.getLogger(__name__)

_VOTE = pa.schema(
    {
        "position": pa.int64(),
        "file": pa.int64(),
        "byte_offset": pa.int64(),
        "stored_bytes": pa.int64(),
        "xxh3": pa.list_(pa.uint64()),
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One attempt to save.

    Attributes:
        attempt: 32 hex digits, new for every attempt.
        run_id: 32 hex digits, the same for all saves of a job.
        step: Step number, if there is one.
        overwrite: Whether a checkpoint that is committed at the place is replaced.
        user_metadata: What the caller wants in the manifest.
    """

    attempt: str
    run_id: str
    step: int | None
    overwrite: bool
    user_metadata: Mapping[str, object]

    @property
    def data_dir(self) -> str:
        """Directory that everything but the manifest goes to, relative to the checkpoint."""
        return f"data/{self.attempt}"


def encode_vote(files: Sequence[WrittenFile], rank_objects: Mapping[str, object]) -> bytes:
    """What one rank wrote, for :func:`commit`."""
    layouts = [file.layout for file in files]
    entries = [entry for layout in layouts for entry in layout.entries]
    positions = [layout.positions for layout in layouts]
    table = pa.Table.from_arrays(
        [
            pa.array(np.concatenate(positions) if positions else [], type=pa.int64()),
            pa.array(np.repeat(np.arange(len(files)), [len(one) for one in positions]), type=pa.int64()),
            pa.array([entry.byte_offset for entry in entries], type=pa.int64()),
            pa.array([entry.num_bytes for entry in entries], type=pa.int64()),
            pa.array([digests for file in files for digests in file.digests], type=_VOTE.field("xxh3").type),
        ],
        schema=_VOTE,
    )
    rest = {
        "files": [
            [
                file.layout.group,
                file.layout.index,
                file.layout.name,
                file.layout.num_bytes,
                file.layout.header_bytes,
                file.header_xxh3,
            ]
            for file in files
        ],
        "objects": {
            key: encode_objects(value, f"{key} (rank-local)").decode() for key, value in rank_objects.items()
        },
    }
    sink = pa.BufferOutputStream()
    schema = _VOTE.with_metadata({"rest": json.dumps(rest)})
    with pa.ipc.new_stream(sink, schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
        writer.write_table(table.replace_schema_metadata(schema.metadata))
    return bytes(sink.getvalue())


def commit(
    store: Store,
    attempt: Attempt,
    plan: Plan,
    objects: bytes,
    votes: Sequence[bytes],
) -> int:
    """Write the metadata and make the checkpoint visible.

    Args:
        store: The checkpoint directory.
        attempt: Which attempt it is.
        plan: What was to be written by whom.
        objects: Encoded global objects.
        votes: From :func:`encode_vote`, by rank.

    Returns:
        Bytes of payload.

    Raises:
        AlreadyCommitted: Something was committed there meanwhile; it is untouched.
        StorageError: It could not be written. If that concerns the manifest, the checkpoint may exist all the same.
    """
    tables, num_bytes = _encode_tables(plan, votes)
    contents = {**tables, "objects.json": objects}
    with span("checkpoint.commit", path=store.url, num_bytes=num_bytes):
        for name, data in contents.items():
            store.write(f"{attempt.data_dir}/{name}", data)
        manifest = Manifest(
            attempt=attempt.attempt,
            run_id=attempt.run_id,
            step=attempt.step,
            created=datetime.now(UTC).isoformat(timespec="milliseconds"),
            writer={"framework": f"torch {torch.__version__}", "world_size": len(votes)},
            files={
                name: MetadataFile(num_bytes=len(data), xxh3=digest_hex(data))
                for name, data in contents.items()
            },
            user_metadata=attempt.user_metadata,
        )
        _create_manifest(store, manifest, overwrite=attempt.overwrite)
    return num_bytes


def _create_manifest(store: Store, manifest: Manifest, *, overwrite: bool) -> None:
    if overwrite:
        try:
            old, _ = read_manifest(store)
        except NotACheckpoint:
            pass
        else:
            replaced = Manifest(
                attempt=manifest.attempt,
                run_id=manifest.run_id,
                step=manifest.step,
                created=manifest.created,
                writer=manifest.writer,
                files=manifest.files,
                replaces=old.attempt,
                user_metadata=manifest.user_metadata,
            )
            store.write(MANIFEST, encode_manifest(replaced))
            # Readers of the attempt replaced just now may still be at work; those of the one before had a whole
            # save to finish. Attempts of others are never touched.
            if old.replaces is not None:
                _remove(store, f"data/{old.replaces}")
            return
    try:
        store.create(MANIFEST, encode_manifest(manifest))
    except AlreadyExists:
        # Over a network our own success may come back as a loss: the attempt in the manifest tells.
        if read_manifest(store)[0].attempt != manifest.attempt:
            raise already_committed(store) from None


def _remove(store: Store, path: str) -> None:
    """Remove what nobody needs any more; that it stays is no failure of a save that is committed."""
    try:
        store.delete_tree(path)
    except StorageError as error:
        _logger.warning("%s: left over from a checkpoint that was replaced: %s", path, error)


def already_committed(store: Store) -> AlreadyCommitted:
    """The error for a place that holds a checkpoint."""
    return AlreadyCommitted(
        f"{store.url}: holds a committed checkpoint; save elsewhere, or replace it with overwrite=True"
    )


def _encode_tables(plan: Plan, votes: Sequence[bytes]) -> tuple[dict[str, bytes], int]:
    tables = [pa.ipc.open_stream(vote).read_all() for vote in votes]
    rests = [json.loads(table.schema.metadata[b"rest"]) for table in tables]
    file_ids, file_columns = _number_files(rests)

    # Both sides sorted by (rank, position) line up; so each row of the plan finds its row of the votes.
    joined = pa.concat_tables([table.replace_schema_metadata(None) for table in tables]).combine_chunks()
    voter = np.repeat(np.arange(len(tables)), [table.num_rows for table in tables])
    position = joined.column("position").to_numpy()
    planned = np.lexsort((plan.position, plan.rank))
    voted = np.lexsort((position, voter))
    assert np.array_equal(plan.position[planned], position[voted]), "votes and plan differ"
    assert np.array_equal(plan.rank[planned], voter[voted]), "votes and plan differ"
    row_of = np.empty(len(planned), dtype=np.int64)
    row_of[planned] = voted
    stored = joined.take(pa.array(row_of))
    file_starts = np.concatenate([[0], np.cumsum([len(rest["files"]) for rest in rests])])
    file_id = file_ids[file_starts[plan.rank] + stored.column("file").to_numpy()]

    num_dims = np.asarray([len(tensor.shape) for tensor in plan.tensors], dtype=np.int64)[plan.tensor_id]
    boxes = [
        Box(tuple(offsets[:count]), tuple(lengths[:count]))
        for offsets, lengths, count in zip(
            plan.offsets.tolist(), plan.lengths.tolist(), num_dims.tolist(), strict=True
        )
    ]
    tensors = plan.tensors
    encoded = {
        "tensors.parquet": {
            "tensor_id": range(len(tensors)),
            "group": [tensor.group for tensor in tensors],
            "key": [tensor.key for tensor in tensors],
            "dtype": [tensor.dtype for tensor in tensors],
            "shape": [tensor.shape for tensor in tensors],
            "nbytes": [tensor.num_bytes for tensor in tensors],
            "box_count": plan.box_counts,
            "splits": [None] * len(tensors),
        },
        "shards.parquet": {
            "tensor_id": plan.tensor_id,
            "offsets": [box.offsets for box in boxes],
            "lengths": [box.lengths for box in boxes],
            "file_id": file_id,
            "entry": [
                entry_name(tensors[tensor_id].key, tensors[tensor_id].shape, box)
                for tensor_id, box in zip(plan.tensor_id.tolist(), boxes, strict=True)
            ],
        },
        "stored.parquet": {
            "file_id": file_id,
            "byte_offset": stored.column("byte_offset"),
            "stored_bytes": stored.column("stored_bytes"),
            "codec": [CODEC_NONE] * len(boxes),
            "piece_bytes": [None] * len(boxes),
            "xxh3": stored.column("xxh3"),
        },
        "files.parquet": file_columns,
        "rank_objects.parquet": {
            "rank": [rank for rank, rest in enumerate(rests) for _ in rest["objects"]],
            "key": [key for rest in rests for key in rest["objects"]],
            "value": [value for rest in rests for value in rest["objects"].values()],
        },
    }
    num_bytes = int(stored.column("stored_bytes").to_numpy().sum())
    return {name: encode_table(name, columns) for name, columns in encoded.items()}, num_bytes


def _number_files(
    rests: Sequence[Mapping[str, list[list[object]]]],
) -> tuple[npt.NDArray[np.int64], dict[str, object]]:
    """Ids of all files in the order of the votes, and the columns of the file table in order of id.

    Ids follow (group, rank, index), so that they are the same for every save of a run.
    """
    files = [(file[0], rank, *file[1:]) for rank, rest in enumerate(rests) for file in rest["files"]]
    order = sorted(range(len(files)), key=lambda one: files[one][:3])
    ids = np.empty(len(files), dtype=np.int64)
    ids[order] = np.arange(len(files))
    ordered = [files[one] for one in order]
    columns: dict[str, object] = {"file_id": range(len(files))}
    for index, name in enumerate(("path", "num_bytes", "header_bytes", "header_xxh3"), start=3):
        columns[name] = [file[index] for file in ordered]
    return ids, columns
