"""Where a run starts from."""

from __future__ import annotations

from collections.abc import Mapping

import checkpoint
from checkpoint import CheckpointManager
from storage import Store
from training.errors import ResumeError


def restore(
    resume: str,
    own: CheckpointManager,
    state: Mapping[str, object],
    progress: Mapping[str, int],
    *,
    timeout_s: float,
) -> int:
    """Load the state of an earlier run in place; every rank calls it.

    Args:
        resume: as in `TrainConfig`: ``auto``, ``none``, or a path.
        own: the checkpoints of this run.
        state: of this run, as it will be saved.
        progress: the part of ``state`` that says under ``step`` how many steps are done.
        timeout_s: longest wait for another rank, in seconds.

    Returns:
        The number of steps done, 0 for a fresh start.

    Raises:
        ResumeError: nothing is committed at the path, or this run would save over later checkpoints of its own.
    """
    if resume == "auto":
        own.restore(state)
        return progress["step"]
    if resume != "none":
        if Store(resume).exists("manifest.json"):
            checkpoint.load(resume, state, timeout_s=timeout_s)
        elif CheckpointManager(resume, timeout_s=timeout_s).restore(state) is None:
            raise ResumeError(
                f"resume: no complete checkpoint at {resume}; `omniload ckpt ls` shows what is there"
            )
    newest = own.latest()
    if newest is not None and newest > progress["step"]:
        raise ResumeError(
            f"{own} holds step {newest} already, and this run starts at {progress['step']}: "
            "resume with 'auto', or choose another 'out'"
        )
    return progress["step"]
