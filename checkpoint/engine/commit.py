"""From what the ranks wrote to a committed checkpoint.

Each rank reports what it wrote (its *vote*). With all votes, rank 0 writes the metadata files and then creates the
manifest; that one call is the commit.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import torch

from checkpoint.engine.metadata import TableEncoder
from checkpoint.engine.votes import join_votes
from checkpoint.errors import AlreadyCommitted, CorruptCheckpoint, FormatError, NotACheckpoint
from checkpoint.format.manifest import (
    MANIFEST,
    Manifest,
    MetadataFile,
    decode_manifest,
    encode_manifest,
    read_manifest,
)
from checkpoint.format.tables import PARTLY_READ, footer_of
from storage import Store
from storage.errors import AlreadyExists, StorageError
from storage.spans import span

_logger = logging.getLogger(__name__)


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


def commit(
    store: Store,
    attempt: Attempt,
    tables: TableEncoder,
    objects: bytes,
    votes: Sequence[bytes],
) -> int:
    """Write the metadata and make the checkpoint visible.

    Called when all ranks have reported, so nobody writes to the attempt any more. Where it is certain that it will
    never be visible, it is removed, payload and all.

    Args:
        store: The checkpoint directory.
        attempt: Which attempt it is.
        tables: Encodes the tables of what was to be written.
        objects: Encoded global objects.
        votes: From :func:`checkpoint.engine.votes.encode_vote`, by rank.

    Returns:
        Bytes of payload.

    Raises:
        AlreadyCommitted: Something was committed there meanwhile; it is untouched.
        FormatError: No reader would take it.
        StorageError: It could not be written. If that concerns the manifest, the checkpoint may exist all the same.
    """
    written = join_votes(votes)
    num_bytes = int(written.stored_bytes.sum())
    with span("checkpoint.commit", path=store.url, num_bytes=num_bytes):
        try:
            contents = {**tables.encode(written), "objects.json": objects}
            for name, data in contents.items():
                store.write(f"{attempt.data_dir}/{name}", data)
            replaces, old = _look(store) if attempt.overwrite else (False, None)
            manifest = Manifest(
                attempt=attempt.attempt,
                run_id=attempt.run_id,
                step=attempt.step,
                created=datetime.now(UTC).isoformat(timespec="milliseconds"),
                writer={"framework": f"torch {torch.__version__}", "world_size": len(votes)},
                files={
                    name: MetadataFile.of(data, footer_of(data) if name in PARTLY_READ else None)
                    for name, data in contents.items()
                },
                replaces=None if old is None else old.attempt,
                user_metadata=attempt.user_metadata,
            )
            encoded = _encoded(store, manifest)
        except Exception:
            remove_data(store, attempt.data_dir)
            raise
        if replaces:
            _replace_manifest(store, old, encoded)
        else:
            _create_manifest(store, attempt, encoded)
    return num_bytes


def _look(store: Store) -> tuple[bool, Manifest | None]:
    """Whether something is committed there already, and its manifest, unless nobody can read that."""
    try:
        return True, read_manifest(store)[0]
    except NotACheckpoint:
        return False, None
    except (CorruptCheckpoint, FormatError) as error:
        _logger.warning("replaced, since it cannot be read: %s", error)
        return True, None


def _replace_manifest(store: Store, old: Manifest | None, encoded: bytes) -> None:
    store.write(MANIFEST, encoded)
    # Readers of the attempt replaced just now may still be at work; those of the one before had a whole
    # save to finish. Attempts of others are never touched.
    if old is not None and old.replaces is not None:
        remove_data(store, f"data/{old.replaces}")


def _create_manifest(store: Store, attempt: Attempt, encoded: bytes) -> None:
    try:
        store.create(MANIFEST, encoded)
    except AlreadyExists:
        # Over a network our own success may come back as a loss: the attempt in the manifest tells.
        if read_manifest(store)[0].attempt != attempt.attempt:
            remove_data(store, attempt.data_dir)
            raise already_committed(store) from None


def _encoded(store: Store, manifest: Manifest) -> bytes:
    """The bytes to commit, which a reader has taken: what cannot be read is never committed."""
    data = encode_manifest(manifest)
    decode_manifest(data, f"{store.url}/{MANIFEST}")
    return data


def remove_data(store: Store, path: str) -> None:
    """Remove the directory of an attempt that nobody needs; that it stays changes nothing about how a save went."""
    try:
        store.delete_tree(path)
    except StorageError as error:
        _logger.warning("%s: left over in %s: %s", path, store.url, error)


def already_committed(store: Store) -> AlreadyCommitted:
    """The error for a place that holds a checkpoint."""
    return AlreadyCommitted(
        f"{store.url}: holds a committed checkpoint; save elsewhere, or replace it with overwrite=True"
    )
