"""A process that writes to a quarantine file; a module of its own, so that the process starts without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omniload.pieces import Failure
from omniload.quarantine import Quarantine

STEPS = 50


def failure(row: int, **keys: Any) -> Failure:
    """A bad row."""
    defaults = {"source": "s", "path": "p", "epoch": 0, "window": 2, "position": 3, "reason": "empty"}
    return Failure(**{**defaults, **keys}, row_id=row)


def write_many(path: Path, start: Any) -> None:
    """Write three rows a step."""
    quarantine = Quarantine(path)
    start.wait(60)
    for step in range(STEPS):
        quarantine.add([failure(step * 3 + i) for i in range(3)], step)
