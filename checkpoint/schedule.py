"""When it is time to save: every so many steps, or minutes, and on all ranks alike."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from checkpoint.engine.coordination import Coordinator


class Schedule:
    """Says at which steps to save.

    Steps need no talk between ranks. Minutes are those of rank 0, which tells the others. Between two looks at its
    clock lies half of what is left of the interval, so that all but about ten steps of an interval cost nothing.

    Args:
        every_steps: Save at multiples of this; None: never for that reason.
        every_minutes: Save when this has passed since the last save, or since the start; None: never for that reason.
        coordinator: This rank's seat.
        timeout_s: Longest wait for other ranks.
        clock: Seconds, on rank 0.

    Raises:
        ValueError: An interval is not positive.
    """

    def __init__(
        self,
        *,
        every_steps: int | None,
        every_minutes: float | None,
        coordinator: Coordinator,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if every_steps is not None and every_steps < 1:
            raise ValueError(f"save_every_steps is {every_steps}: it must be at least 1, or None")
        if every_minutes is not None and not every_minutes > 0:
            raise ValueError(f"save_every_minutes is {every_minutes}: it must be above 0, or None")
        self._every_steps = every_steps
        self._every_s = None if every_minutes is None else 60 * every_minutes
        self._coordinator = coordinator
        self._timeout_s = timeout_s
        self._clock = clock
        self._began = clock()
        self._first_step: int | None = None
        self._next_look = 0

    def due(self, step: int, name: str) -> bool:
        """Whether to save now; all ranks ask at the same steps, ascending, each once.

        Args:
            step: Steps done; nothing is due at 0.
            name: Of the call, equal on all ranks, for a round.
        """
        if step <= 0:
            return False
        if self._first_step is None:
            self._first_step = step
        due = self._every_steps is not None and step % self._every_steps == 0
        if not due and self._every_s is not None and step >= self._next_look:
            answer = self._coordinator.round(
                name, "clock", bytes, lambda _: self._look(step), timeout_s=self._timeout_s
            )
            due, self._next_look = json.loads(answer)
        if due:
            self._began, self._first_step, self._next_look = self._clock(), step, step + 1
        return due

    def _look(self, step: int) -> bytes:
        """On rank 0: whether the time has come, and else at which step to look again."""
        assert self._every_s is not None
        assert self._first_step is not None
        passed_s = self._clock() - self._began
        left_s = self._every_s - passed_s
        if left_s <= 0:
            return json.dumps([True, step]).encode()
        step_s = passed_s / max(1, step - self._first_step + 1)
        ahead = int(left_s / 2 / step_s) if step_s > 0 else 1
        return json.dumps([False, step + min(max(1, ahead), 1 << 20)]).encode()
