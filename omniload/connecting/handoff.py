"""From the thread that makes steps to the training loop: one is ready while the next one is on its way."""

from __future__ import annotations

import threading
from collections import deque

from omniload.runtime.steps import End, Step

Item = Step | End | BaseException


class HandOff:
    """Room for one step, and after the last one for what ended them."""

    def __init__(self) -> None:
        self._steps: deque[Step] = deque()
        self._last: End | BaseException | None = None
        self._moved = threading.Condition()
        self._stopping = False

    @property
    def stopping(self) -> bool:
        """Whether there is to be no further step."""
        return self._stopping

    def held(self) -> list[Step]:
        """The step that is ready, if any."""
        with self._moved:
            return list(self._steps)

    def wait_for_room(self, timeout_s: float) -> bool:
        """Whether a step can be put within that time."""
        with self._moved:
            self._moved.wait_for(lambda: not self._steps or self._stopping, timeout_s)
            return not self._steps

    def put(self, step: Step) -> None:
        """Hand a step over; there is room."""
        with self._moved:
            assert not self._steps, "only the one thread that found room puts a step"
            self._steps.append(step)
            self._moved.notify_all()

    def finish(self, last: End | BaseException) -> None:
        """What comes after the steps, whoever asks how often; what comes first stays."""
        with self._moved:
            self._last = self._last or last
            self._moved.notify_all()

    def get(self, timeout_s: float) -> Item | None:
        """The next step or what ended them; None if neither comes within that time."""
        with self._moved:
            self._moved.wait_for(lambda: self._steps or self._last is not None, timeout_s)
            if not self._steps:
                return self._last
            step = self._steps.popleft()
            self._moved.notify_all()
            return step

    def stop(self) -> None:
        """Ask for no further step."""
        with self._moved:
            self._stopping = True
            self._moved.notify_all()

    def abandon(self) -> None:
        """As `stop`, without a lock: it is seen at the end of the next wait for room."""
        self._stopping = True
