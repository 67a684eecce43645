"""``save``, ``load``, ``async_save``: the functions people call."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Final

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore

from checkpoint.compression import Compression
from checkpoint.engine.coordination import Coordinator
from checkpoint.engine.load import Loader, LoadReport
from checkpoint.engine.match import DtypePolicy, LoadOptions
from checkpoint.engine.options import SaveOptions
from checkpoint.engine.save import Saver
from checkpoint.frameworks.state import capture, finish, targets
from checkpoint.frameworks.values import Found, Leeway, LocalTensor, Stored
from checkpoint.handle import SaveHandle, SaveReport
from storage import Store

DEFAULT_TIMEOUT_S: Final = 600.0
"""Longest wait for other ranks in each stage, seconds."""

State = Mapping[str, object]
Place = str | os.PathLike[str] | Store


def save(
    path: Place,
    state: State,
    *,
    step: int | None = None,
    overwrite: bool = False,
    storage_options: Mapping[str, object] | None = None,
    process_group: dist.ProcessGroup | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    user_metadata: Mapping[str, object] | None = None,
    compression: Compression | None = None,
) -> SaveReport:
    """Save training state and return when it is committed.

    All ranks call it with the same arguments. A rank that dies at any point leaves nothing visible; what this
    returns from is complete and durable.

    Args:
        path: Directory or URL of the checkpoint, or an open store.
        state: Name to module, optimizer, object with ``state_dict`` and ``load_state_dict``, or nested dict or list
            of tensors and plain values. With an optimizer goes the module that owns its parameters.
        step: Step number to note in the manifest, from 0.
        overwrite: Replace a committed checkpoint at ``path``; it stays readable until the new one is committed.
        storage_options: Passed to the storage driver of a remote URL.
        process_group: The ranks that save together; all ranks by default. Only its store is used, never a
            collective.
        timeout_s: Longest wait for other ranks in each stage.
        user_metadata: Plain values to note in the manifest. Those of rank 0 count.
        compression: Groups or patterns to codecs, as in ``{"model": "zstd"}`` or ``{"optimizer/*exp_avg*": "zstd"}``;
            what none fits is not compressed. Lossless; loading needs no such argument, and may still read parts.

    Raises:
        ValueError: ``step`` is no whole number from 0, or ``compression`` no dict of patterns to codecs.
        AlreadyCommitted: ``path`` holds a checkpoint and ``overwrite`` is False; it is untouched.
        StateError: Something in ``state`` cannot be saved; names it.
        RanksFailed: Some ranks failed; every rank raises it.
        CoordinationTimeout: Some ranks did not come; names them.
    """
    return _save(
        path,
        state,
        step,
        overwrite,
        storage_options,
        process_group,
        timeout_s,
        user_metadata,
        compression,
        background=False,
    ).result()


def async_save(
    path: Place,
    state: State,
    *,
    step: int | None = None,
    overwrite: bool = False,
    storage_options: Mapping[str, object] | None = None,
    process_group: dist.ProcessGroup | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    user_metadata: Mapping[str, object] | None = None,
    compression: Compression | None = None,
) -> SaveHandle:
    """Copy training state and return; a background thread writes and commits it.

    It writes local files with what training leaves of the cores, at the lowest priority. The state may change as soon
    as this returns. At most two saves are in flight: a third call waits. A failure is raised by the handle's
    ``result``, or else by the next save, on all ranks alike. Arguments and errors are those of :func:`save`.

    Returns:
        A handle; its ``result()`` waits for the commit.
    """
    return _save(
        path,
        state,
        step,
        overwrite,
        storage_options,
        process_group,
        timeout_s,
        user_metadata,
        compression,
        background=True,
    )


def _save(
    path: Place,
    state: Mapping[str, object],
    step: int | None,
    overwrite: bool,
    storage_options: Mapping[str, object] | None,
    process_group: dist.ProcessGroup | None,
    timeout_s: float,
    user_metadata: Mapping[str, object] | None,
    compression: Compression | None,
    *,
    background: bool,
) -> SaveHandle:
    saver = session_of(process_group).saver
    name = saver.next_call()
    with saver.checking_arguments(name, timeout_s):
        options = SaveOptions(
            step=step,
            overwrite=overwrite,
            timeout_s=timeout_s,
            user_metadata={} if user_metadata is None else user_metadata,
            compression=compression,
        )
        store = as_store(path, storage_options)
    return saver.save(store, lambda: capture(state), options, background=background, name=name)


def load(
    path: Place,
    state: State,
    *,
    strict: bool = True,
    allow_missing: Sequence[str] = (),
    allow_unexpected: Sequence[str] = (),
    dtype_policy: DtypePolicy = "same",
    verify: bool = True,
    storage_options: Mapping[str, object] | None = None,
    process_group: dist.ProcessGroup | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> LoadReport:
    """Load a checkpoint into training state, in place, whatever layout and number of ranks wrote it.

    All ranks call it with the same arguments. Keys, shapes and dtypes are checked before the first byte of a
    tensor is read, and nothing of the state is touched before that. If a file turns out to be damaged later, some
    tensors may have been filled; optimizer settings, loaders and plain values are applied last, or not at all.
    The random number generators of Python, NumPy and PyTorch go on where this rank saved them; on another number of
    ranks they are seeded anew, from the run, the step and the rank.

    What several ranks need is read by one of them and handed on, through shared memory to ranks of the same machine and
    else over connections made for this call, so that the job reads each byte once; no collective of a process group is
    called.

    Args:
        path: Directory or URL of the checkpoint, or an open store.
        state: As for :func:`save`; may have fewer groups than were saved.
        strict: Raise for groups and plain values that only the state has, and for tensors that only the state or only
            the checkpoint has; otherwise report them, and leave what is missing as it is.
        allow_missing: Groups, or patterns of ``group/key`` for tensors and plain values, that the checkpoint may lack
            although ``strict``.
        allow_unexpected: Groups, or patterns of ``group/key``, that the state may lack although ``strict``.
        dtype_policy: ``"same"`` refuses tensors of another element type, ``"widen"`` accepts floating-point types whose
            every value the state's type can hold, ``"convert"`` any floating-point type, rounding to nearest.
            Optimizer state that does not exist yet gets the type of its parameter where that is allowed, else the
            stored one.
        verify: Check the digest of everything that is read.
        storage_options: Passed to the storage driver of a remote URL.
        process_group: The ranks that load together; all ranks by default. Only its store is used.
        timeout_s: Longest wait for other ranks in each stage.

    Raises:
        ValueError: ``dtype_policy`` is none of the three.
        NotACheckpoint: Nothing is committed at ``path``.
        MismatchError: State and checkpoint do not fit; names keys, shapes and what to do.
        CorruptCheckpoint: Files are missing, too short or changed; names file and tensor.
        FormatError: The metadata does not follow the format.
        RanksFailed: Some ranks failed; every rank raises it.
        CoordinationTimeout: Some ranks did not come; names them.
    """
    loader = session_of(process_group).loader
    name = loader.next_call()
    with loader.checking_arguments(name, timeout_s):
        options = LoadOptions(
            strict=strict,
            allow_missing=tuple(allow_missing),
            allow_unexpected=tuple(allow_unexpected),
            dtype_policy=dtype_policy,
            verify=verify,
            timeout_s=timeout_s,
        )
        store = as_store(path, storage_options)
        groups = list(state)
    leeway = Leeway(strict=strict, allow_missing=options.allow_missing, may_become=options.may_become)

    def find(stored: Stored) -> Found:
        return targets(state, stored, leeway)

    def apply(
        stored: Stored, found: Sequence[LocalTensor], rank_objects: Mapping[str, object] | None
    ) -> None:
        finish(state, stored, found, rank_objects=rank_objects)

    return loader.load(store, groups, find, apply, options, name=name)


class Session:
    """What one process keeps between calls with one process group.

    Args:
        coordinator: This rank's seat in it.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self.saver = Saver(coordinator)
        self.loader = Loader(coordinator)


_sessions: weakref.WeakKeyDictionary[dist.ProcessGroup, Session] = weakref.WeakKeyDictionary()
_alone: list[Session] = []  # at most one: the session of a process without torch.distributed


def _forget_sessions() -> None:
    _sessions.clear()
    _alone.clear()


# A forked child has none of their threads, so that it makes its own.
os.register_at_fork(after_in_child=_forget_sessions)


def session_of(process_group: dist.ProcessGroup | None) -> Session:
    """The session of a process group; of this process alone where torch.distributed is not initialised.

    Raises:
        ValueError: This rank is not in the group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        if not _alone:
            _alone.append(Session(Coordinator(HashStore(), 0, 1)))
        return _alone[0]
    group = process_group if process_group is not None else dist.group.WORLD
    # To ranks that are not in a group torch gives something else for it.
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"process_group is {group!r:.60}: rank {dist.get_rank()} is not in it, so it cannot take part"
        )
    session = _sessions.get(group)
    if session is None:
        store = PrefixStore("omniload.checkpoint", group.get_group_store())
        session = Session(Coordinator(store, group.rank(), group.size()))
        _sessions[group] = session
    return session


def as_store(path: Place, storage_options: Mapping[str, object] | None) -> Store:
    """The store of a checkpoint or of a directory of checkpoints."""
    return path if isinstance(path, Store) else Store(path, storage_options)
