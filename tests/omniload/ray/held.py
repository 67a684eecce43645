"""A transform that does not come back for a while, as where storage or a lock hangs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

_AT_MOST_S = 300.0


def hold(row: dict[str, Any], folder: str) -> dict[str, Any]:
    """The row. Who finds the file ``armed`` in the folder removes it, and waits until there is one named ``freed``."""
    here = Path(folder)
    try:
        (here / "armed").unlink()
    except FileNotFoundError:
        return row
    (here / "held").touch()
    deadline = time.monotonic() + _AT_MOST_S
    while not (here / "freed").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return row


def wait(row: dict[str, Any], folder: str) -> dict[str, Any]:
    """The row, once there is the file ``freed`` in the folder."""
    deadline = time.monotonic() + _AT_MOST_S
    while not (Path(folder) / "freed").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return row


def slow(row: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The row, after a while."""
    time.sleep(seconds)
    return row
