"""The loader of this project, as a user drives it."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping
from typing import Any

from omniload import DataLoader
from omniload.constructor import DERIVED

_DRAIN_S = 30.0


def packed_tokens(mixture: Mapping[str, Any], derived: Collection[str] = DERIVED) -> int:
    """Iterate a new loader to the end of its steps, in one process.

    Opening the sources and waiting for the first step are part of it.

    Args:
        mixture: of a stated number of ``steps``.
        derived: what lanes have besides tokens.

    Returns:
        Tokens delivered, padding not counted.
    """
    tokens = 0
    with DataLoader(mixture, dp_rank=0, dp_size=1, derived=derived) as loader:
        for lane in loader:
            if lane["is_last_in_step"]:
                tokens += int(loader.plan(lane["step"]).pieces["length"].sum())
    return tokens


def packed_images(mixture: Mapping[str, Any]) -> int:
    """As `packed_tokens`, for a mixture whose lanes have the patches of images. Returns the images delivered."""
    with DataLoader(mixture, dp_rank=0, dp_size=1) as loader:
        return sum(len(lane["image_grid_thw"]) for lane in loader)


def drain() -> None:
    """Wait for the reads that a closed loader still has under way, which would weigh on whoever runs next.

    Raises:
        TimeoutError: They do not end; names the threads.
    """
    deadline = time.monotonic() + _DRAIN_S
    for thread in threading.enumerate():
        if thread.name.startswith("omniload"):
            thread.join(max(0.0, deadline - time.monotonic()))
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("omniload")]
    if left:
        raise TimeoutError(f"threads {left} of a closed loader did not end within {_DRAIN_S:g} s")
