"""Where the checkpoints of a run lie: one durable directory, and perhaps a fast local one in front of it.

::

    save ──► local ──drain──► root          with a local tier
    save ──────────────────► root          without

A step that is committed at local is drained in the background: copied, and committed at the root only after every byte
of the local copy has been verified. It is evicted from local when it is committed at the root and newer ones have
come. Whatever is removed, another copy, or a newer checkpoint, is committed and whole at that time.
"""

from __future__ import annotations

import logging
import math
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Final

from checkpoint.errors import CheckpointError, CorruptCheckpoint
from checkpoint.format.manifest import MANIFEST
from checkpoint.retention import Retention
from checkpoint.stored import StoredCheckpoint
from checkpoint.verify import verify
from storage import Drainer, Store, Tier, Tiers
from storage.errors import Stalled, StorageError

_logger = logging.getLogger("checkpoint")

_STEP_DIR: Final = re.compile(r"step-(\d{8,18})")

METRICS: Final = "metrics"
"""Key of the metrics in the user metadata of a checkpoint."""


def step_dir(step: int) -> str:
    """Name of the directory of a step."""
    return f"step-{step:08d}"


def committed_steps(store: Store) -> list[int]:
    """Steps that are committed below ``store``, ascending. What has no manifest does not exist."""
    steps = sorted(int(match[1]) for name in store.list_dirs() if (match := _STEP_DIR.fullmatch(name)))
    return [step for step in steps if store.exists(f"{step_dir(step)}/{MANIFEST}")]


class Places:
    """The directories of a run, as one process sees them.

    Looking is for all ranks. What changes anything is for one of them: it has a ``keeper``.

    Args:
        root: The durable directory.
        local: The fast one in front of it, seen by all ranks; None: there is none.
    """

    def __init__(self, root: Store, local: Store | None) -> None:
        self.root = root
        self.local = local
        self.tiers = (
            None if local is None else Tiers(local=local, remote=root, marker=MANIFEST, verify=_check)
        )

    def steps(self) -> list[int]:
        """Steps that are committed anywhere, ascending."""
        found = set(committed_steps(self.root))
        if self.local is not None:
            found |= set(committed_steps(self.local))
        return sorted(found)

    def copies(self, step: int) -> list[Tier]:
        """Where a step is committed, in the order in which to read it; the root decides which attempt it is."""
        name = step_dir(step)
        if self.tiers is None:
            return [Tier.REMOTE] if self.root.exists(f"{name}/{MANIFEST}") else []
        committed = self.tiers.committed(name)
        if len(set(committed.values())) > 1:
            return [Tier.REMOTE]
        # A damaged manifest commits nothing, but is to be found out by who loads it.
        stores = self.tiers.stores
        return [tier for tier in stores if tier in committed or stores[tier].exists(f"{name}/{MANIFEST}")]

    def directory(self, tier: Tier) -> Store:
        """The directory of all steps in one tier."""
        store = self.local if tier is Tier.LOCAL else self.root
        assert store is not None
        return store

    def store_of(self, tier: Tier, step: int) -> Store:
        """The directory of a step in one tier."""
        return self.directory(tier).sub(step_dir(step))


class Keeper:
    """Removes what need not stay, and drains what is at local only; in one process of a job, from any of its threads.

    Args:
        places: Where.
        retention: What stays.
        keep_local: How many of the newest steps stay at local when they have been drained.
        on_commit: Called with step and URL when a step is committed: at local, and again at the root once drained.
    """

    def __init__(
        self,
        places: Places,
        retention: Retention,
        *,
        keep_local: int,
        on_commit: Callable[[int, str], None] | None,
    ) -> None:
        self._places = places
        self._retention = retention
        self._keep_local = keep_local
        self._on_commit = on_commit
        self._lock = threading.Lock()
        self._drains: dict[int, Future[None]] = {}  # until all that follows from their end is done
        self._drains_changed = threading.Condition()
        self._drainer = None if places.tiers is None else Drainer(places.tiers)
        self._saved: list[int] = []  # by this manager, the last one last
        self._ahead: frozenset[int] = frozenset()  # of the step that was restored

    def restored(self, step: int, ahead: frozenset[int]) -> None:
        """The run goes on from a step; those that are ahead of it count as older than all others."""
        with self._lock:
            self._saved = [one for one in self._saved if one <= step]
            self._ahead = ahead

    def committed(self, step: int, tier: Tier) -> None:
        """A save has committed a step. Raises nothing: what fails here is no failure of the save."""
        with self._lock:
            self._saved = [*(one for one in self._saved if one != step), step]
            self._ahead -= {step}
        if tier is Tier.REMOTE and self._places.local is not None:
            self._try(f"remove what was replaced of step {step}", lambda: self._remove(Tier.LOCAL, step))
        self._tell(step, tier)
        self.drain()
        self._try("remove old checkpoints", self.retain)

    def drain(self) -> None:
        """Begin to drain all steps that are at local only."""
        if self._drainer is not None and self._places.tiers is not None:
            self._try("drain", partial(self._drain, self._drainer, self._places.tiers))

    def _drain(self, drainer: Drainer, tiers: Tiers) -> None:
        for name in tiers.undrained():
            match = _STEP_DIR.fullmatch(name)
            # What was replaced at the root, by a process that ended before it removed it here, has had its time.
            if match is None or Tier.REMOTE in tiers.committed(name):
                continue
            step = int(match[1])
            source = self._places.store_of(Tier.LOCAL, step)
            future = drainer.submit(name, before_commit=partial(_verify, source))
            with self._drains_changed:
                known = self._drains.get(step) is future
                self._drains[step] = future
            if not known:
                future.add_done_callback(partial(self._drained, step))

    def wait(self, timeout_s: float) -> None:
        """Wait until all that was committed is at the root.

        Raises:
            Stalled: It is not done in time.
            ExceptionGroup: Some could not be drained; they are still at local.
        """
        if self._drainer is None:
            return
        self._drainer.wait(timeout_s)
        with self._drains_changed:
            if not self._drains_changed.wait_for(lambda: not self._drains, timeout_s):
                raise Stalled(self._places.root.url, f"old checkpoints not removed within {timeout_s:g} s")

    def settle(self, timeout_s: float) -> None:
        """Wait until nothing is being drained, whether or not it could be.

        Raises:
            Stalled: It is not done in time.
        """
        try:
            self.wait(timeout_s)
        except ExceptionGroup as failed:
            _logger.warning("%s", failed)

    def close(self) -> None:
        """Stop draining; what is at local only stays there, and is drained by the next process."""
        if self._drainer is not None:
            self._drainer.close()

    def retain(self) -> None:
        """Remove what no rule keeps."""
        with self._lock:
            at_root = self._by_age(committed_steps(self._places.root))
            at_local = [] if self._places.local is None else self._by_age(committed_steps(self._places.local))
            if at_root:
                # Nothing is removed for the sake of a checkpoint that is damaged itself.
                _check(self._places.store_of(Tier.REMOTE, at_root[-1]))
            # Only what is at the root counts there, so that its last good one stays however far ahead local is.
            kept = self._retention.kept(at_root, self._value_of)
            for step in at_root:
                if step not in kept:
                    if step in at_local:
                        self._remove(Tier.LOCAL, step)
                    self._remove(Tier.REMOTE, step)
            if self._places.tiers is not None:
                self._retain_local(self._places.tiers, at_local, at_root)

    def _retain_local(self, tiers: Tiers, at_local: Sequence[int], at_root: Sequence[int]) -> None:
        kept = self._retention.kept(self._by_age({*at_local, *at_root}), self._value_of)
        for step in at_local:
            drain = self._drains.get(step)
            # Newer ones have come before its turn to be drained did; one that is being drained goes on.
            if step not in at_root and step not in kept and (drain is None or drain.cancel()):
                self._remove(Tier.LOCAL, step)
        drained = [step for step in at_local if step in at_root]
        for step in drained[: max(0, len(drained) - self._keep_local)]:
            tiers.evict(step_dir(step))

    def _by_age(self, steps: Iterable[int]) -> list[int]:
        """Steps of this run from the oldest on: after going back to one, the highest is not the newest.

        Steps ahead of what was saved, which nobody went back from, are those of another run. They stay.
        """
        nth = {step: number for number, step in enumerate(self._saved)}
        first = min(self._saved, default=math.inf)
        own = (step for step in steps if step in nth or step in self._ahead or step < first)
        return sorted(own, key=lambda step: (step not in self._ahead, nth.get(step, -1), step))

    def _drained(self, step: int, drain: Future[None]) -> None:
        try:
            if drain.cancelled():
                return
            if (error := drain.exception()) is not None:
                _logger.warning("step %d is at local only, it could not be drained: %s", step, error)
                return
            self._tell(step, Tier.REMOTE)
            self._try("remove old checkpoints", self.retain)
        finally:
            with self._drains_changed:
                if self._drains.get(step) is drain:
                    del self._drains[step]
                self._drains_changed.notify_all()

    def _tell(self, step: int, tier: Tier) -> None:
        if self._on_commit is not None:
            try:
                self._on_commit(step, self._places.store_of(tier, step).url)
            except Exception:
                _logger.exception("step %d is committed, but on_commit failed", step)

    def _remove(self, tier: Tier, step: int) -> None:
        # First the manifest: from then on it does not exist, however far the rest gets.
        self._places.store_of(tier, step).delete(MANIFEST)
        self._places.directory(tier).delete_tree(step_dir(step))

    def _value_of(self, step: int, metric: str) -> float | None:
        """Value of a metric at a step, if its manifest can be read and has one."""
        for tier in self._places.copies(step):
            try:
                metrics = StoredCheckpoint.open(self._places.store_of(tier, step)).manifest.user_metadata.get(
                    METRICS
                )
            except (CheckpointError, StorageError):
                continue
            value = metrics.get(metric) if isinstance(metrics, Mapping) else None
            return float(value) if isinstance(value, int | float) else None
        return None

    def _try(self, what: str, call: Callable[[], None]) -> None:
        try:
            call()
        except (OSError, ValueError) as error:  # what storage and formats raise; anything else is a bug
            _logger.warning("could not %s: %s", what, error)


def _check(store: Store) -> None:
    """By one listing: all files of the checkpoint at ``store`` are there with their sizes."""
    StoredCheckpoint.open(store).check_files()


def _verify(store: Store) -> None:
    """Every byte of the checkpoint at ``store``.

    Raises:
        CorruptCheckpoint: Some are not as they were written.
    """
    problems = verify(StoredCheckpoint.open(store)).problems
    if problems:
        raise CorruptCheckpoint(problems[0])
