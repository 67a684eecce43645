"""The state of the stream between two steps: what the next plan depends on besides mixture and data.

About 100 bytes per source and 36 per carried piece; ids only, never payload.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from omniload.errors import StateError
from omniload.pieces import PIECE, Cursor


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceState:
    """How far one source is read, and where its tokens went."""

    cursor: Cursor = field(default_factory=Cursor)
    """The next sample to draw."""
    deficit: int = 0
    """What the source is owed against its weight, in tokens times `WEIGHT_UNIT`."""
    exhausted: bool = False
    """Whether it gave its last sample."""
    rows: int = 0
    """Raw rows consumed."""
    failures: int = 0
    """Rows among them that were quarantined."""
    read_tokens: int = 0
    """Tokens of the samples drawn."""
    truncated_tokens: int = 0
    """Tokens among them cut off by ``overflow: truncate``."""
    dropped_tokens: int = 0
    """Tokens among them lost with samples dropped by ``overflow: drop``."""

    def to_list(self) -> list[Any]:
        """The fields as a JSON-serialisable list."""
        return [
            self.cursor.to_list(),
            self.deficit,
            int(self.exhausted),
            self.rows,
            self.failures,
            self.read_tokens,
            self.truncated_tokens,
            self.dropped_tokens,
        ]

    @classmethod
    def from_list(cls, values: list[Any]) -> Self:
        """Inverse of `to_list`."""
        cursor, deficit, exhausted, rows, failures, read, truncated, dropped = values
        return cls(
            cursor=Cursor.from_list(cursor),
            deficit=deficit,
            exhausted=bool(exhausted),
            rows=rows,
            failures=failures,
            read_tokens=read,
            truncated_tokens=truncated,
            dropped_tokens=dropped,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamState:
    """The stream before ``step``."""

    step: int
    """Index of the next step to plan."""
    sources: tuple[SourceState, ...]
    """In the order of `Mixture.names`."""
    carried: np.ndarray
    """``PIECE[n]``: drawn, not yet in a plan; in the order drawn."""

    @classmethod
    def initial(cls, num_sources: int) -> Self:
        """The stream before its first step."""
        return cls(step=0, sources=(SourceState(),) * num_sources, carried=np.empty(0, PIECE))

    def to_json(self, names: list[str]) -> dict[str, Any]:
        """JSON-serialisable form; the sources are keyed by name."""
        return {
            "step": self.step,
            "sources": {name: source.to_list() for name, source in zip(names, self.sources, strict=True)},
            "carried": base64.b64encode(self.carried.tobytes()).decode("ascii"),
        }

    @classmethod
    def from_json(cls, values: dict[str, Any], names: list[str]) -> Self:
        """Inverse of `to_json`.

        Raises:
            StateError: the sources are others, or the state is damaged.
        """
        try:
            saved: dict[str, list[Any]] = values["sources"]
            if set(saved) != set(names):
                raise StateError(
                    f"the state has the sources {sorted(saved)}, the mixture {sorted(names)}:"
                    " resume with the mixture it was saved with"
                )
            carried = np.frombuffer(base64.b64decode(values["carried"], validate=True), PIECE).copy()
            if len(carried) and int(carried["source"].max()) >= len(names):
                raise StateError("the loader state is damaged: a carried piece is of no known source")
            return cls(
                step=int(values["step"]),
                sources=tuple(SourceState.from_list(saved[name]) for name in names),
                carried=carried,
            )
        except (KeyError, TypeError, ValueError, IndexError) as error:
            if isinstance(error, StateError):
                raise
            raise StateError(f"the loader state is damaged: {error!r}") from error
