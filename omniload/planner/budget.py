"""The budget of quarantined rows of one source."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from fractions import Fraction

from omniload.errors import TooManyFailures
from omniload.mixture import SourceSpec
from omniload.pieces import Cursor, Failure

JUDGED_FROM_ROWS = 100
"""``max_failure_fraction`` is judged of no fewer rows: a fraction of a handful says nothing."""
_REASONS = 3


class Budget:
    """Judges a source at every quarantined row it consumes, by the rows and failures up to it.

    So the verdict depends on the order of the source alone, and not on where chunks are cut or the run was resumed.

    Args:
        name: the source.
        spec: its part of the mixture.
        quarantine: file that the rows are written to, for the message.
    """

    def __init__(self, name: str, spec: SourceSpec, quarantine: str | None) -> None:
        self._name = name
        self._most = spec.max_failures
        self._fraction = spec.max_failure_fraction
        self._exact = None if self._fraction is None else Fraction(self._fraction)
        self._see = (
            f"{quarantine} lists them" if quarantine else "set quarantine: to a file that shall list them"
        )
        self._rows = self._failures = 0
        self._last: deque[Failure] = deque(maxlen=_REASONS)

    @property
    def last_reasons(self) -> str:
        """The rows consumed last and what is wrong with them, as the end of a clause; empty if there were none."""
        last = "; ".join(f"{one.path}, row {one.row_id}: {one.reason}" for one in self._last)
        return f", the last {last}" if last else ""

    def begin(self, cursor: Cursor, *, rows: int, failures: int) -> None:
        """A chunk begins at ``cursor``, before which so many rows and failures were consumed."""
        self._rows = rows - cursor.position - bool(cursor.sub)  # at position 0 of the window
        self._failures = failures

    def spend(self, failed: Sequence[Failure], before: Iterable[Iterable[Failure]]) -> None:
        """Consume the next quarantined rows of the chunk.

        Args:
            failed: the rows.
            before: those of the same step that were consumed before.

        Raises:
            TooManyFailures: they are too many.
        """
        for i, failure in enumerate(failed):
            self._failures += 1
            self._last.append(failure)
            over = self._over(self._rows + failure.position + 1)
            if over:
                raise TooManyFailures(
                    f"source '{self._name}': {over}{self.last_reasons}; mend the data or raise the budget; {self._see}",
                    (*itertools.chain.from_iterable(before), *failed[: i + 1]),
                )

    def _over(self, rows: int) -> str:
        """Which limit is exceeded after so many rows, as the beginning of a sentence; empty if none is."""
        so_far = f"{self._failures} of {rows} rows quarantined, over its"
        if self._most is not None and self._failures > self._most:
            return f"{so_far} max_failures: {self._most}"
        if self._exact is not None and rows >= JUDGED_FROM_ROWS and self._failures > self._exact * rows:
            return f"{so_far} max_failure_fraction: {self._fraction:g}"
        return ""
