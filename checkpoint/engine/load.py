"""Loading: open, match, read, apply. Each stage is a round, so that all ranks go on or none does."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from checkpoint.engine.coordination import Coordinator
from checkpoint.engine.read import ReadStats, Wanted, read_boxes
from checkpoint.errors import MismatchError
from checkpoint.format.manifest import MANIFEST, decode_manifest, read_manifest
from checkpoint.frameworks.rng import derive_rng
from checkpoint.frameworks.values import LocalTensor, Stored
from checkpoint.planner import torch_dtype
from checkpoint.stored import StoredCheckpoint
from storage import Store
from storage.spans import span

_MAX_NAMED = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """What a load did.

    Attributes:
        url: Where the checkpoint is.
        step: Its step number, if it has one.
        attempt: Id of the committed attempt.
        num_tensors: Tensors that this rank holds a part of and that were filled.
        missing: Tensors of the state that the checkpoint lacks (``group/key``), left as they were; on this rank.
        unexpected: Tensors of the checkpoint that no rank's state has; only in groups that the state names.
        rng_restored: Whether the generators of random numbers were set back to what this rank saved. On another
            number of ranks they are seeded from the run, the step and the rank instead.
        num_bytes_read: Payload bytes that this rank read.
        num_bytes_wanted: Stored bytes that this rank needed, each counted once.
    """

    url: str
    step: int | None
    attempt: str
    num_tensors: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    rng_restored: bool
    num_bytes_read: int
    num_bytes_wanted: int


class StoredView:
    """A checkpoint as the framework layer wants to see it.

    Args:
        checkpoint: The checkpoint.
    """

    def __init__(self, checkpoint: StoredCheckpoint) -> None:
        self._checkpoint = checkpoint
        self._tensors = {
            (tensor.group, tensor.key): (torch_dtype(tensor.dtype), tensor.shape)
            for tensor in checkpoint.tables.tensors
        }

    @property
    def tensors(self) -> Mapping[tuple[str, str], tuple[torch.dtype, tuple[int, ...]]]:
        """(group, key) to dtype and global shape."""
        return self._tensors

    @property
    def objects(self) -> Mapping[str, object]:
        """Group to its tree of plain values."""
        return self._checkpoint.objects


Targets = Callable[[Stored], Sequence[LocalTensor]]
Finish = Callable[[Stored, Sequence[LocalTensor], Mapping[str, object] | None], None]


class Loader:
    """Loads of one rank.

    Args:
        coordinator: This rank's seat.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    def load(
        self,
        store: Store,
        groups: Sequence[str],
        targets: Targets,
        finish: Finish,
        *,
        strict: bool,
        verify: bool,
        timeout_s: float,
    ) -> LoadReport:
        """Load; see ``checkpoint.load``.

        Args:
            store: The checkpoint directory.
            groups: Top-level names of the state.
            targets: Gives the tensors to fill; must not change the state.
            finish: Applies everything that is not tensor bytes, once they have arrived.
            strict: Raise for tensors that only one side has.
            verify: Check digests.
            timeout_s: Longest wait for other ranks, in each stage.

        Raises:
            NotACheckpoint, FormatError, CorruptCheckpoint, TilingError, MismatchError: On all ranks alike; all but
                CorruptCheckpoint before the state is touched.
        """
        name = self._coordinator.next_call("load")

        def round_of(stage: str, local: Callable[[], bytes], decide: Callable[[list[bytes]], bytes]) -> bytes:
            return self._coordinator.round(name, stage, local, decide, timeout_s=timeout_s)

        with span("checkpoint.open", path=store.url):
            checkpoint = self._open(store, round_of)
        with span("checkpoint.match", path=store.url):
            match = self._match(checkpoint, groups, targets, round_of, strict=strict)

        stats: ReadStats | None = None

        def read() -> bytes:
            nonlocal stats
            with torch.no_grad():
                stats = read_boxes(checkpoint, match.wanted, verify=verify)
            return b""

        round_of("read", read, _nothing)
        assert stats is not None

        manifest = checkpoint.manifest
        rank_objects: Mapping[str, object] | None = None
        if manifest.writer.get("world_size") == self._coordinator.world_size:
            rank_objects = checkpoint.rank_objects(self._coordinator.rank) or None

        def apply() -> bytes:
            finish(match.view, match.targets, rank_objects)
            if rank_objects is None:
                derive_rng(int(manifest.run_id, 16), manifest.step or 0, self._coordinator.rank)
            return b""

        round_of("apply", apply, _nothing)
        return LoadReport(
            url=store.url,
            step=manifest.step,
            attempt=manifest.attempt,
            num_tensors=len(match.targets),
            missing=match.missing,
            unexpected=match.unexpected,
            rng_restored=rank_objects is not None,
            num_bytes_read=stats.num_bytes_read,
            num_bytes_wanted=stats.num_bytes_wanted,
        )

    def _open(self, store: Store, round_of: _RoundOf) -> StoredCheckpoint:
        """Agree on the attempt: rank 0 reads the manifest, since it may be replaced at any time."""

        def decide(_: list[bytes]) -> bytes:
            manifest, data = read_manifest(store)
            StoredCheckpoint(store, manifest).check_files()
            return data

        data = round_of("open", bytes, decide)
        return StoredCheckpoint(store, decode_manifest(data, f"{store.url}/{MANIFEST}"))

    def _match(
        self,
        checkpoint: StoredCheckpoint,
        groups: Sequence[str],
        targets: Targets,
        round_of: _RoundOf,
        *,
        strict: bool,
    ) -> _Match:
        """Find out what goes where, and that it fits, before any payload is read."""
        view = StoredView(checkpoint)
        ids = checkpoint.tensor_ids
        found: list[LocalTensor] = []
        wanted: list[Wanted] = []
        missing: list[str] = []

        def local() -> bytes:
            for tensor in targets(view):
                tensor_id = ids.get((tensor.group, tensor.key))
                if tensor_id is None:
                    missing.append(f"{tensor.group}/{tensor.key}")
                    continue
                found.append(tensor)
                for box, one in zip(tensor.boxes, tensor.views, strict=True):
                    wanted.append(Wanted(tensor_id=tensor_id, box=box, view=one))
            _check_fit(checkpoint, view, found)
            if strict and missing:
                raise MismatchError(
                    f"{checkpoint.store.url}: has no {_named(missing)}; load the state that was saved, "
                    "or pass strict=False to leave them as they are"
                )
            for tensor_id in sorted({one.tensor_id for one in wanted}):
                checkpoint.tables.check_tiling(tensor_id)
            known = np.zeros(len(ids), dtype=bool)
            known[[ids[tensor.group, tensor.key] for tensor in found]] = True
            return np.packbits(known).tobytes()

        def decide(messages: list[bytes]) -> bytes:
            known = np.bitwise_or.reduce([np.frombuffer(one, dtype=np.uint8) for one in messages])
            bits = np.unpackbits(known, count=len(ids)) if len(ids) else known
            unexpected = [
                f"{tensor.group}/{tensor.key}"
                for tensor, is_known in zip(checkpoint.tables.tensors, bits.tolist(), strict=True)
                if not is_known and tensor.group in groups
            ]
            if strict and unexpected:
                raise MismatchError(
                    f"{checkpoint.store.url}: {_named(unexpected)} have no place in the state; load into the state "
                    "that was saved, or pass strict=False to leave them out"
                )
            return json.dumps(unexpected).encode()

        unexpected = json.loads(round_of("match", local, decide))
        return _Match(
            view=view, targets=found, wanted=wanted, missing=tuple(missing), unexpected=tuple(unexpected)
        )


_RoundOf = Callable[[str, Callable[[], bytes], Callable[[list[bytes]], bytes]], bytes]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Match:
    view: StoredView
    targets: list[LocalTensor]
    wanted: list[Wanted]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def _check_fit(checkpoint: StoredCheckpoint, view: StoredView, found: Sequence[LocalTensor]) -> None:
    problems = []
    for tensor in found:
        dtype, shape = view.tensors[tensor.group, tensor.key]
        if tuple(tensor.shape) != shape:
            problems.append(f"{tensor.group}/{tensor.key} is {list(tensor.shape)}, stored {list(shape)}")
        elif tensor.dtype != dtype:
            problems.append(f"{tensor.group}/{tensor.key} is {tensor.dtype}, stored {dtype}")
    if problems:
        raise MismatchError(
            f"{checkpoint.store.url}: {_named(problems)}; build the state with the shapes and dtypes it was saved with"
        )


def _named(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMED])
    return shown if len(names) <= _MAX_NAMED else f"{shown} and {len(names) - _MAX_NAMED} more"


def _nothing(_: list[bytes]) -> bytes:
    return b""
