"""The ledger: where the tokens of every source went, and the realised mixture beside the declared one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from omniload.mixture import Mixture
from omniload.planner import StreamState


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceLedger:
    """The account of one source. ``read = emitted + truncated + dropped``; ``emitted = served + carried``."""

    weight: float
    """Declared share of the stream at the current step, normalised."""
    share: float
    """Share of all tokens emitted so far; differs from ``weight`` once the schedule has moved."""
    rows: int
    """Raw rows consumed."""
    failures: int
    """Rows among them that were quarantined."""
    read_tokens: int
    """Tokens of all samples drawn."""
    emitted_tokens: int
    """Tokens that entered the stream."""
    truncated_tokens: int
    """Tokens cut off by ``overflow: truncate``."""
    dropped_tokens: int
    """Tokens lost with samples dropped by ``overflow: drop``."""
    carried_tokens: int
    """Tokens drawn and waiting for a pack; at the end of the stream, dropped."""
    exhausted: bool
    """Whether the source gave its last sample."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ledger:
    """The accounts of all sources before ``step``."""

    step: int
    """Steps planned."""
    sources: dict[str, SourceLedger]
    """By name."""

    @classmethod
    def of(cls, mixture: Mixture, state: StreamState) -> Self:
        """The ledger of a stream state."""
        weights = mixture.weights_at(max(state.step - 1, 0))
        carried = np.bincount(
            state.carried["source"], weights=state.carried["length"], minlength=len(weights)
        ).astype(np.int64)
        emitted = [s.read_tokens - s.truncated_tokens - s.dropped_tokens for s in state.sources]
        return cls(
            step=state.step,
            sources={
                name: SourceLedger(
                    weight=weights[i] / sum(weights),
                    share=emitted[i] / max(sum(emitted), 1),
                    rows=source.rows,
                    failures=source.failures,
                    read_tokens=source.read_tokens,
                    emitted_tokens=emitted[i],
                    truncated_tokens=source.truncated_tokens,
                    dropped_tokens=source.dropped_tokens,
                    carried_tokens=int(carried[i]),
                    exhausted=source.exhausted,
                )
                for i, (name, source) in enumerate(zip(mixture.names, state.sources, strict=True))
            },
        )
