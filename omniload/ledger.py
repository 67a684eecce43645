"""The ledger: where the tokens of every source went, and the realised mixture beside the declared one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from omniload.mixture import Mixture
from omniload.planner import StreamState
from omniload.planner.state import scheduled_weights


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceLedger:
    """The account of one source. ``read = emitted + truncated + dropped``; ``emitted = served + carried + skipped``."""

    weight: float
    """Declared share of the stream at the current step, normalised."""
    share: float
    """Share of all tokens emitted so far, or of all samples if the weights are of samples; differs from ``weight``
    once the schedule has moved, a source is exhausted, or one is at its ``max_fraction``."""
    rows: int
    """Raw rows consumed."""
    failures: int
    """Rows among them that were quarantined."""
    emitted_samples: int
    """Samples that entered the stream."""
    read_tokens: int
    """Tokens of all samples drawn."""
    emitted_tokens: int
    """Tokens that entered the stream."""
    truncated_tokens: int
    """Tokens cut off by ``overflow: truncate``."""
    dropped_tokens: int
    """Tokens lost with samples dropped by ``overflow: drop``."""
    served_tokens: int
    """Tokens in the steps planned."""
    carried_tokens: int
    """Tokens drawn and waiting for a pack."""
    skipped_tokens: int
    """Tokens that were left out by decision: with steps, or with the source."""
    dropped_at_end: int
    """Tokens among them that will wait for ever, because the stream has ended."""
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
        weights = state.decided.weights or scheduled_weights(mixture, state.sources, max(state.step - 1, 0))
        total_weight = sum(weights)
        carried = np.zeros(len(weights), np.int64)
        np.add.at(carried, state.carried["source"], state.carried["length"].astype(np.int64))
        by_samples = mixture.unit == "samples"
        emitted = [s.emitted_samples if by_samples else s.emitted_tokens for s in state.sources]
        total = max(sum(emitted), 1)
        ended = state.ended or state.step == mixture.steps
        return cls(
            step=state.step,
            sources={
                name: SourceLedger(
                    weight=weights[i] / total_weight,
                    share=emitted[i] / total,
                    rows=source.rows,
                    failures=source.failures,
                    emitted_samples=source.emitted_samples,
                    read_tokens=source.read_tokens,
                    emitted_tokens=source.emitted_tokens,
                    truncated_tokens=source.truncated_tokens,
                    dropped_tokens=source.dropped_tokens,
                    served_tokens=source.emitted_tokens - waiting - source.skipped_tokens,
                    carried_tokens=waiting,
                    skipped_tokens=source.skipped_tokens,
                    dropped_at_end=waiting if ended else 0,
                    exhausted=source.exhausted,
                )
                for i, (name, source, waiting) in enumerate(
                    zip(mixture.names, state.sources, carried.tolist(), strict=True)
                )
            },
        )
