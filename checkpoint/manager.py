"""The checkpoints of one run: when to save, where they lie, which stay, and which one to go on from."""

from __future__ import annotations

import json
import logging
import os
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Final, Self

import torch.distributed as dist

from checkpoint.api import DEFAULT_TIMEOUT_S, Place, as_store, session_of
from checkpoint.api import load as load_checkpoint
from checkpoint.compression import Compression, check_codecs
from checkpoint.engine.match import DtypePolicy, check_dtype_policy
from checkpoint.engine.options import SaveOptions, step_number
from checkpoint.errors import (
    CheckpointError,
    CorruptCheckpoint,
    FormatError,
    NotACheckpoint,
    RanksFailed,
    TilingError,
    UnsupportedVersion,
)
from checkpoint.format.manifest import MANIFEST, read_manifest
from checkpoint.frameworks.state import capture
from checkpoint.handle import SaveHandle, SaveReport
from checkpoint.places import METRICS, Keeper, Places, committed_steps, step_dir
from checkpoint.retention import KeepBest, Retention
from checkpoint.schedule import Schedule
from storage import Store, Tier
from storage.errors import Corrupt, NotFound, StorageError

__all__ = ["CheckpointManager", "committed_steps", "step_dir"]

_logger = logging.getLogger("checkpoint")

_DAMAGE: Final = (CorruptCheckpoint, FormatError, TilingError, NotACheckpoint, Corrupt, NotFound)


class CheckpointManager:
    """The checkpoints of one run, in ``<root>/step-<8 digits>``.

    All ranks make one with the same arguments and call its methods together, :meth:`latest` and :meth:`steps`
    excepted, which only look. One manager saves into a root at a time.

    With a ``local`` tier, saves go there, are committed at the speed of that, and a thread of rank 0 drains them to
    ``root``. What is at local only is lost with that machine; a process that ends leaves it there, and the next manager
    drains it. All ranks must see the same ``local``: those of several machines need a shared one.

    Args:
        root: Directory or URL of the run.
        keep_last: How many committed checkpoints to keep; None keeps all. Older ones are removed after a commit, and
            none while the newest is incomplete. What this manager saves is newer than what it found, and of that the
            highest step is the newest; steps ahead of the one that :meth:`restore` gave count as the oldest. Where
            nothing was restored, steps ahead of what is saved are of another run, and stay. Clocks never count.
        keep_every: Keep steps that are multiples of this, too.
        keep_best: Keep those with the best value of a metric, too.
        save_every_steps: Steps between saves of :meth:`save_if_due`.
        save_every_minutes: Minutes between saves of :meth:`save_if_due`, by the clock of rank 0.
        local: Directory of a fast tier in front of ``root``.
        keep_local: How many of the newest checkpoints stay at ``local`` once they are at ``root``.
        on_commit: Called on rank 0 with step and URL of each checkpoint when it is committed, by the thread that did
            it; with a local tier once for each tier. What it raises is logged.
        storage_options: Passed to the storage driver of a remote ``root``.
        process_group: The ranks that save and load together; all ranks by default.
        timeout_s: Longest wait for other ranks in each stage.
        compression: Which tensors to compress, as for ``checkpoint.save``.

    Raises:
        ValueError: A number is out of bounds, ``compression`` names no codec, ``local`` is ``root``, or ranks see
            different local tiers.
    """

    def __init__(
        self,
        root: Place,
        *,
        keep_last: int | None = 3,
        keep_every: int | None = None,
        keep_best: KeepBest | None = None,
        save_every_steps: int | None = None,
        save_every_minutes: float | None = None,
        local: str | os.PathLike[str] | Store | None = None,
        keep_local: int = 1,
        on_commit: Callable[[int, str], None] | None = None,
        storage_options: Mapping[str, object] | None = None,
        process_group: dist.ProcessGroup | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        compression: Compression | None = None,
    ) -> None:
        check_codecs(compression)
        retention = Retention(last=keep_last, every=keep_every, best=keep_best)
        if keep_local < 0:
            raise ValueError(f"keep_local is {keep_local}: keep at least 0 checkpoints there")
        self._keep_last = keep_last
        self._process_group = process_group
        self._timeout_s = timeout_s
        self._compression = compression
        self._session = session_of(process_group)
        self._coordinator = self._session.coordinator
        self._schedule = Schedule(
            every_steps=save_every_steps,
            every_minutes=save_every_minutes,
            coordinator=self._coordinator,
            timeout_s=timeout_s,
        )
        durable = as_store(root, storage_options)
        fast = None if local is None else as_store(local, None)
        if fast is not None and fast.url == durable.url:
            raise ValueError(f"local is {fast.url!r}, as root is: give another directory, or leave it out")
        self._places = Places(durable, fast)
        # All of these are equal on all ranks. Steps that may be committed already, so that a save of one has to look:
        self._known: set[int] = set()
        # Steps that a save replaces unasked, and the save that is to do it, once it has begun.
        self._to_replace: dict[int, SaveHandle | None] = {}
        self._prepared = False
        self._keeper: Keeper | None = None
        if fast is not None:
            self._known = self._agree_on_local(fast)
        if self._coordinator.rank == 0:
            self._keeper = Keeper(self._places, retention, keep_local=keep_local, on_commit=on_commit)
            self._keeper.drain()

    def __repr__(self) -> str:
        local = "" if self._places.local is None else f", local={self._places.local.url!r}"
        return f"CheckpointManager({self._places.root.url!r}, keep_last={self._keep_last}{local})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.wait()
        finally:
            self.close()

    def save_if_due(
        self,
        step: int,
        state: Mapping[str, object],
        *,
        metrics: Mapping[str, float] | None = None,
        user_metadata: Mapping[str, object] | None = None,
    ) -> SaveHandle | None:
        """Begin an asynchronous save if ``save_every_steps`` or ``save_every_minutes`` says so; call it at each step.

        The first call, if no save is due, plans one and has its staging memory allocated in the background, so that the
        first save keeps training waiting no longer than later ones.

        Returns:
            The handle, on all ranks alike; None if it is not time.

        Raises:
            ValueError, CheckpointError: As :meth:`save`.
        """
        name = self._session.saver.next_call()
        step = step_number(step)
        # Also where it fails below: ranks that prepare and ranks that do not would wait for each other.
        prepared, self._prepared = self._prepared, True
        if not self._schedule.due(step, name):
            if not prepared:
                options = self._options(step, overwrite=True, user_metadata={})
                self._session.saver.prepare(self._places.root, lambda: capture(state), options, name)
            return None
        return self._save(step, state, False, metrics, user_metadata, background=True, name=name)

    def save(
        self,
        step: int,
        state: Mapping[str, object],
        *,
        overwrite: bool = False,
        metrics: Mapping[str, float] | None = None,
        user_metadata: Mapping[str, object] | None = None,
    ) -> SaveReport:
        """Save and return when it is committed; see ``checkpoint.save``.

        Args:
            step: Steps done, from 0.
            state: As for ``checkpoint.save``.
            overwrite: Replace a committed checkpoint of that step. One that :meth:`restore` found damaged, or that was
                ahead of the step it gave, is always replaced.
            metrics: For ``keep_best``; noted in the manifest. Those of rank 0 count.
            user_metadata: Plain values to note in the manifest. Those of rank 0 count.

        Raises:
            ValueError: ``step`` is no whole number from 0, or another argument is wrong.
            CheckpointError: As ``checkpoint.save``.
        """
        return self._save(step, state, overwrite, metrics, user_metadata, background=False).result()

    def async_save(
        self,
        step: int,
        state: Mapping[str, object],
        *,
        overwrite: bool = False,
        metrics: Mapping[str, float] | None = None,
        user_metadata: Mapping[str, object] | None = None,
    ) -> SaveHandle:
        """Copy the state and return; see :meth:`save` and ``checkpoint.async_save``."""
        return self._save(step, state, overwrite, metrics, user_metadata, background=True)

    def _save(
        self,
        step: int,
        state: Mapping[str, object],
        overwrite: bool,
        metrics: Mapping[str, float] | None,
        user_metadata: Mapping[str, object] | None,
        *,
        background: bool,
        name: str | None = None,
    ) -> SaveHandle:
        saver = self._session.saver
        # All rounds of the call have this name, taken first, so that whatever fails puts no rank out of step.
        name = name or saver.next_call()
        self._prepared = True
        with saver.checking_arguments(name, self._timeout_s):
            step = step_number(step)
        replaces = self._replaces(step)
        overwrite = overwrite or replaces
        tier = self._tier_for(name, step)
        self._known.add(step)
        with saver.checking_arguments(name, self._timeout_s):
            metadata = _with_metrics(user_metadata, metrics) if saver.leads else {}
        keeper = self._keeper
        handle = saver.save(
            self._places.store_of(tier, step),
            lambda: capture(state),
            self._options(step, overwrite=overwrite, user_metadata=metadata),
            background=background,
            on_commit=None if keeper is None else lambda: keeper.committed(step, tier),
            name=name,
        )
        if replaces:
            self._to_replace[step] = handle
        return handle

    def _replaces(self, step: int) -> bool:
        """Whether a save is to replace what is committed of the step, as no save since has."""
        handle = self._to_replace.get(step)
        if handle is not None and handle.wait(self._timeout_s) and handle.failure() is None:
            del self._to_replace[step]
        return step in self._to_replace

    def _options(self, step: int, *, overwrite: bool, user_metadata: Mapping[str, object]) -> SaveOptions:
        return SaveOptions(
            step=step,
            overwrite=overwrite,
            timeout_s=self._timeout_s,
            user_metadata=user_metadata,
            compression=self._compression,
        )

    def steps(self) -> list[int]:
        """Committed steps, ascending; with a local tier those of either."""
        return self._places.steps()

    def latest(self) -> int | None:
        """The newest committed step, or None if there is none."""
        steps = self.steps()
        return steps[-1] if steps else None

    def restore(
        self,
        state: Mapping[str, object],
        *,
        step: int | None = None,
        strict: bool = True,
        allow_missing: Sequence[str] = (),
        allow_unexpected: Sequence[str] = (),
        dtype_policy: DtypePolicy = "same",
        verify: bool = True,
    ) -> int | None:
        """Load a step into ``state``, by default the newest committed one that is whole.

        The arguments after ``step`` are those of ``checkpoint.load``.

        A copy that turns out to be damaged is passed over, with a warning in the log: for the other copy of the same
        step if there is one, then for the step before, unless ``step`` is given. The run goes on from what is given:
        saves of the steps that were passed over, or are ahead of it for another reason, replace them. As long as
        some are there, they are the ones that ``restore`` without ``step`` looks at first.

        Returns:
            The step, the same on all ranks; None if nothing is committed, and then the state is untouched.

        Raises:
            ValueError: ``dtype_policy`` is none of the three, or ``step`` is no whole number from 0.
            CheckpointError: As ``checkpoint.load``; of the newest copy if all are damaged.
        """
        name = self._coordinator.next_call("restore")
        with self._coordinator.checking(name, "latest", self._timeout_s):
            check_dtype_policy(dtype_policy)  # also where nothing is committed yet
            step = None if step is None else step_number(step)

        def decide(_: list[bytes]) -> bytes:
            steps = self.steps()[::-1]
            tried = steps if step is None else [step]
            return json.dumps(
                [steps, [[one, tier] for one in tried for tier in self._places.copies(one)]]
            ).encode()

        # Ranks that look for themselves may see different steps while a save is in flight.
        steps, found = json.loads(self._round(name, "latest", decide))
        copies: list[tuple[int, Tier]] = [(one, Tier(tier)) for one, tier in found]
        if step is not None and not copies:
            copies = [(step, Tier.REMOTE)]  # which raises that there is nothing
        first: Exception | None = None
        for one, tier in copies:
            try:
                load_checkpoint(
                    self._places.store_of(tier, one),
                    state,
                    strict=strict,
                    allow_missing=allow_missing,
                    allow_unexpected=allow_unexpected,
                    dtype_policy=dtype_policy,
                    verify=verify,
                    process_group=self._process_group,
                    timeout_s=self._timeout_s,
                )
            except (CheckpointError, StorageError) as error:
                if not _is_damage(error):
                    raise
                _logger.warning("step %d at %s is passed over: %s", one, tier, error)
                _let_go(error)
                first = first or error
                self._to_replace.setdefault(one, None)
            else:
                self._go_on_from(one, frozenset(other for other in steps if other > one))
                return one
        try:
            if first is not None:
                raise first
        finally:
            del first
        return None

    def _go_on_from(self, step: int, ahead: frozenset[int]) -> None:
        self._to_replace.pop(step, None)
        self._to_replace |= dict.fromkeys(ahead)
        if self._keeper is None:
            return
        self._keeper.restored(step, ahead)
        if ahead:
            _logger.warning(
                "step %d is restored, and committed steps are ahead of it (%s): saves from here on replace them and "
                "keep_last removes them first; until then restore() begins with them unless it is told a step",
                step,
                ", ".join(map(str, sorted(ahead))),
            )

    def wait(self) -> None:
        """Wait until no save is in flight, and all that is at a local tier is drained.

        Raises:
            TimeoutError: They are not done in time.
            AsyncSaveFailed: A save failed, and nobody asked its handle.
            ExceptionGroup: Some checkpoints could not be drained; on rank 0 only. They are still at local.
        """
        self._session.saver.wait(self._timeout_s)
        if self._keeper is not None:
            self._keeper.wait(self._timeout_s)

    def close(self) -> None:
        """Stop draining. What is at a local tier only stays there, and is drained by the next manager."""
        if self._keeper is not None:
            self._keeper.close()

    def _tier_for(self, name: str, step: int) -> Tier:
        """Where to save a step: at local, unless the root has it, where it is refused or replaced in one step."""
        if self._places.local is None and step not in self._to_replace:
            return Tier.REMOTE
        if step not in self._known and step not in self._to_replace:
            return Tier.LOCAL

        def settle() -> bytes:  # an earlier save of the same step may be in flight
            self._session.saver.wait(self._timeout_s)
            return b""

        def decide(_: list[bytes]) -> bytes:
            if self._keeper is not None:
                self._keeper.settle(self._timeout_s)
            copies = self._places.copies(step)
            if step in self._to_replace:
                for tier in copies:
                    _forget_unreadable(self._places.store_of(tier, step))
            fast = self._places.local is not None and Tier.REMOTE not in copies
            return json.dumps(Tier.LOCAL if fast else Tier.REMOTE).encode()

        return Tier(json.loads(self._round(name, "tier", decide, settle)))

    def _agree_on_local(self, local: Store) -> set[int]:
        """Make sure that all ranks see the same local tier; gives the steps that are committed anywhere."""
        probe = f"probe-{uuid.uuid4().hex}"

        def begin(_: list[bytes]) -> bytes:
            local.write(probe, b"")
            return json.dumps([probe, self._places.steps()]).encode()

        name, steps = json.loads(self._round(self._coordinator.next_call("local"), "begin", begin))

        def look() -> bytes:
            return b"" if local.exists(name) else str(self._coordinator.rank).encode()

        def decide(missing: list[bytes]) -> bytes:
            local.delete(name)
            return b", ".join(one for one in missing if one)

        ranks = self._round(self._coordinator.next_call("local"), "look", decide, look)
        if ranks:
            raise ValueError(
                f"local={local.url!r} is another directory on ranks {ranks.decode()} than on rank 0: "
                "give one that all ranks share, or leave it out"
            )
        return set(steps)

    def _round(
        self,
        name: str,
        stage: str,
        decide: Callable[[list[bytes]], bytes],
        local: Callable[[], bytes] = bytes,
    ) -> bytes:
        return self._coordinator.round(name, stage, local, decide, timeout_s=self._timeout_s)


def _with_metrics(
    user_metadata: Mapping[str, object] | None, metrics: Mapping[str, float] | None
) -> dict[str, object]:
    metadata = dict(user_metadata or {})
    if metrics is None:
        return metadata
    if METRICS in metadata:
        raise ValueError(f"user_metadata has {METRICS!r}: give them as metrics=")
    numbers = {}
    for name, value in metrics.items():
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError):
            raise ValueError(f"metrics[{name!r}] is {value!r:.60}: give a number") from None
    return {**metadata, METRICS: numbers}


def _let_go(error: BaseException) -> None:
    """Free what an error's traceback holds: optimizer state made for one load would lie beside that of the next."""
    one: BaseException | None = error
    while one is not None:
        traceback.clear_frames(one.__traceback__)
        one = one.__cause__ or one.__context__


def _is_damage(error: Exception) -> bool:
    """Whether an error, the same on all ranks, says that what was read is not what was written."""
    if isinstance(error, RanksFailed):
        return all(one.kind in {kind.__name__ for kind in _DAMAGE} for one in error.members)
    return isinstance(error, _DAMAGE) and not isinstance(error, UnsupportedVersion)


def _forget_unreadable(store: Store) -> None:
    """Remove a manifest that nobody can read, so that another may be committed in its place."""
    try:
        read_manifest(store)
    except NotACheckpoint:
        pass
    except (CorruptCheckpoint, FormatError):
        store.delete(MANIFEST)
