"""A directory of checkpoints by step: save, find the newest, restore, remove the old."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping
from typing import Final

import torch.distributed as dist

from checkpoint.api import DEFAULT_TIMEOUT_S, as_store, session_of
from checkpoint.api import load as load_checkpoint
from checkpoint.engine.save import SaveOptions
from checkpoint.format.manifest import MANIFEST
from checkpoint.frameworks.state import capture
from checkpoint.handle import SaveHandle, SaveReport
from storage import Store
from storage.errors import StorageError

_logger = logging.getLogger("checkpoint")

_STEP_DIR: Final = re.compile(r"step-(\d{8,18})")


def step_dir(step: int) -> str:
    """Name of the directory of a step."""
    return f"step-{step:08d}"


def committed_steps(store: Store) -> list[int]:
    """Steps that are committed below ``store``, ascending. What has no manifest does not exist."""
    steps = sorted(int(match[1]) for name in store.list_dirs() if (match := _STEP_DIR.fullmatch(name)))
    return [step for step in steps if store.exists(f"{step_dir(step)}/{MANIFEST}")]


class CheckpointManager:
    """The checkpoints of one run, in ``<root>/step-<8 digits>``.

    All ranks make one with the same arguments and call its methods together, :meth:`latest` and :meth:`steps`
    excepted, which only look.

    Args:
        root: Directory or URL of the run.
        keep_last: How many committed checkpoints to keep, counted in steps, never by time; None keeps all. Older
            ones are removed after a commit, so the newest is never at risk.
        storage_options: Passed to the storage driver of a remote URL.
        process_group: The ranks that save and load together; all ranks by default.
        timeout_s: Longest wait for other ranks in each stage.

    Raises:
        ValueError: ``keep_last`` is below 1.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | Store,
        *,
        keep_last: int | None = 3,
        storage_options: Mapping[str, object] | None = None,
        process_group: dist.ProcessGroup | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        if keep_last is not None and keep_last < 1:
            raise ValueError(f"keep_last is {keep_last}: keep at least 1 checkpoint, or None for all of them")
        self._store = as_store(root, storage_options)
        self._keep_last = keep_last
        self._process_group = process_group
        self._timeout_s = timeout_s
        self._session = session_of(process_group)

    def __repr__(self) -> str:
        return f"CheckpointManager({self._store.url!r}, keep_last={self._keep_last})"

    def save(
        self,
        step: int,
        state: Mapping[str, object],
        *,
        overwrite: bool = False,
        user_metadata: Mapping[str, object] | None = None,
    ) -> SaveReport:
        """Save and return when it is committed; see ``checkpoint.save``."""
        return self._save(step, state, overwrite, user_metadata, background=False).result()

    def async_save(
        self,
        step: int,
        state: Mapping[str, object],
        *,
        overwrite: bool = False,
        user_metadata: Mapping[str, object] | None = None,
    ) -> SaveHandle:
        """Copy the state and return; see ``checkpoint.async_save``."""
        return self._save(step, state, overwrite, user_metadata, background=True)

    def _save(
        self,
        step: int,
        state: Mapping[str, object],
        overwrite: bool,
        user_metadata: Mapping[str, object] | None,
        *,
        background: bool,
    ) -> SaveHandle:
        if step < 0:
            raise ValueError(f"step is {step}: steps count from 0")
        options = SaveOptions(
            step=step, overwrite=overwrite, timeout_s=self._timeout_s, user_metadata=dict(user_metadata or {})
        )
        return self._session.saver.save(
            self._store.sub(step_dir(step)),
            lambda: capture(state),
            options,
            background=background,
            on_commit=self._remove_old,
        )

    def steps(self) -> list[int]:
        """Committed steps, ascending."""
        return committed_steps(self._store)

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
        verify: bool = True,
    ) -> int | None:
        """Load a step into ``state``, by default the newest committed one; see ``checkpoint.load``.

        Returns:
            The step, the same on all ranks; None if nothing is committed, and then the state is untouched.
        """

        def decide(_: list[bytes]) -> bytes:
            return json.dumps(self.latest() if step is None else step).encode()

        # Ranks that look for themselves may see different steps while a save is in flight.
        coordinator = self._session.coordinator
        name = coordinator.next_call("restore")
        answer = coordinator.round(name, "latest", bytes, decide, timeout_s=self._timeout_s)
        found: int | None = json.loads(answer)
        if found is None:
            return None
        load_checkpoint(
            self._store.sub(step_dir(found)),
            state,
            strict=strict,
            verify=verify,
            process_group=self._process_group,
            timeout_s=self._timeout_s,
        )
        return found

    def wait(self) -> None:
        """Wait until no save is in flight.

        Raises:
            TimeoutError: They are not done in time.
            AsyncSaveFailed: One failed, and nobody asked its handle.
        """
        self._session.saver.wait(self._timeout_s)

    def _remove_old(self) -> None:
        """Remove what is older than the newest ``keep_last`` committed checkpoints; on rank 0."""
        if self._keep_last is None:
            return
        try:
            for step in self.steps()[: -self._keep_last]:
                # First the manifest: from then on it does not exist, however far the rest gets.
                self._store.delete(f"{step_dir(step)}/{MANIFEST}")
                self._store.delete_tree(step_dir(step))
        except StorageError as error:
            # The save itself is committed; what is left is found again after the next one.
            _logger.warning("could not remove old checkpoints: %s", error)
