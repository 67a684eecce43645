"""Stop on SIGTERM between two steps."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any, Self


class StopRequest:
    """Turns SIGTERM into a flag while it is entered; read it at step boundaries.

    Nothing is done in the signal handler: what must be consistent across ranks is agreed in the step's own
    all-reduce and saved after it.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: Any = None

    def __enter__(self) -> Self:
        self._previous = signal.signal(signal.SIGTERM, self._request)
        return self

    def __exit__(self, *exc_info: object) -> None:
        signal.signal(signal.SIGTERM, self._previous)

    def _request(self, signum: int, frame: FrameType | None) -> None:
        self.requested = True
