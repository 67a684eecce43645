"""The state of the stream between two steps: what the next plan depends on besides mixture and data.

About 100 bytes per source and 44 per carried piece, and what is decided; ids only, never payload.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from omniload.errors import StateError
from omniload.mixture import Mixture
from omniload.pieces import PIECE, Cursor
from omniload.planner.decisions import Decided, Decision, check_names, from_json, to_json

_DIGEST_BYTES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceState:
    """How far one source is read, and where its tokens went."""

    cursor: Cursor = field(default_factory=Cursor)
    """The next sample to draw."""
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
    emitted_samples: int = 0
    """Samples that entered the stream."""
    skipped_tokens: int = 0
    """Tokens that entered the stream and were left out by a decision: with steps, or with the source."""

    @property
    def emitted_tokens(self) -> int:
        """Tokens that entered the stream."""
        return self.read_tokens - self.truncated_tokens - self.dropped_tokens

    def to_list(self) -> list[Any]:
        """The fields as a JSON-serialisable list."""
        return [
            self.cursor.to_list(),
            int(self.exhausted),
            self.rows,
            self.failures,
            self.read_tokens,
            self.truncated_tokens,
            self.dropped_tokens,
            self.emitted_samples,
            self.skipped_tokens,
        ]

    @classmethod
    def from_list(cls, values: list[Any]) -> Self:
        """Inverse of `to_list`.

        Raises:
            ValueError: a field is not there, or is no number that it can be.
        """
        cursor, exhausted, rows, failures, read, truncated, dropped, samples, skipped = values
        _check_counts(cursor, below=2**32)
        _check_counts(values[1:], below=2**63)
        return cls(
            cursor=Cursor.from_list(cursor),
            exhausted=bool(exhausted),
            rows=rows,
            failures=failures,
            read_tokens=read,
            truncated_tokens=truncated,
            dropped_tokens=dropped,
            emitted_samples=samples,
            skipped_tokens=skipped,
        )


def scheduled_weights(mixture: Mixture, sources: Sequence[SourceState], step: int) -> list[float]:
    """Weights of the schedule at a step, in the order of `Mixture.names`; not normalised.

    Args:
        mixture: the mixture.
        sources: before the step.
        step: the step.
    """
    specs = (mixture.sources[name] for name in mixture.names)
    return mixture.weights_at(
        step,
        tokens=sum(source.emitted_tokens for source in sources),
        epochs=[
            spec.repeat if source.exhausted else source.cursor.epoch
            for spec, source in zip(specs, sources, strict=True)
        ],
    )


def _with_digest(data: bytes) -> bytes:
    return data + hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


def _check_decisions(decisions: tuple[Decision, ...], step: int, names: list[str]) -> None:
    steps = [step, *(decision.step for decision in decisions)]
    if steps != sorted(steps):
        raise ValueError(f"decisions about the steps {steps[1:]}, before step {step}, are out of order")
    for decision in decisions:
        check_names(decision, names)


def _check_counts(values: list[Any], *, below: int) -> None:
    for value in values:
        if not isinstance(value, int) or not 0 <= value < below:
            raise ValueError(f"{value!r} is no count below {below}")


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamState:
    """The stream before ``step``."""

    step: int
    """Index of the next step to plan."""
    sources: tuple[SourceState, ...]
    """In the order of `Mixture.names`."""
    deficits: tuple[int, ...]
    """What each source is owed against its weight, in the unit of the weights times `WEIGHT_UNIT`."""
    carried: np.ndarray
    """``PIECE[n]``: drawn, not yet in a plan; in the order drawn."""
    ended: bool = False
    """Whether the stream ends here for want of data, and ``carried`` is what could not be served."""
    decided: Decided = field(default_factory=Decided)
    """What is in force by decisions about earlier steps."""
    decisions: tuple[Decision, ...] = ()
    """Those about ``step`` and later ones, by step."""

    @classmethod
    def initial(cls, num_sources: int) -> Self:
        """The stream before its first step."""
        return cls(
            step=0,
            sources=(SourceState(),) * num_sources,
            deficits=(0,) * num_sources,
            carried=np.empty(0, PIECE),
        )

    def to_json(self, names: list[str]) -> dict[str, Any]:
        """JSON-serialisable form; the sources are keyed by name."""
        decided: dict[str, Any] = {}
        if self.decided != Decided():
            decided["decided"] = self.decided.to_json()
        if self.decisions:
            decided["decisions"] = [to_json(decision) for decision in self.decisions]
        return {
            "step": self.step,
            "ended": self.ended,
            "sources": {
                name: [deficit, *source.to_list()]
                for name, source, deficit in zip(names, self.sources, self.deficits, strict=True)
            },
            "carried": base64.b64encode(_with_digest(self.carried.tobytes())).decode("ascii"),
            **decided,
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
            packed = base64.b64decode(values["carried"], validate=True)
            if packed != _with_digest(packed[:-_DIGEST_BYTES]):
                raise StateError(
                    "the loader state is damaged: its carried pieces are not those that were saved"
                )
            carried = np.frombuffer(packed[:-_DIGEST_BYTES], PIECE).copy()
            if len(carried) and int(carried["source"].max()) >= len(names):
                raise StateError("the loader state is damaged: a carried piece is of no known source")
            deficits = tuple(saved[name][0] for name in names)
            _check_counts([values["step"]], below=2**32)
            _check_counts(
                [abs(deficit) for deficit in deficits], below=2**128
            )  # as large as a sample is long
            decisions = tuple(from_json(one) for one in values.get("decisions", ()))
            _check_decisions(decisions, values["step"], names)
            return cls(
                step=values["step"],
                ended=bool(values["ended"]),
                decided=Decided.from_json(values["decided"], len(names))
                if "decided" in values
                else Decided(),
                decisions=decisions,
                sources=tuple(SourceState.from_list(saved[name][1:]) for name in names),
                deficits=deficits,
                carried=carried,
            )
        except (KeyError, TypeError, ValueError, IndexError) as error:
            if isinstance(error, StateError):
                raise
            raise StateError(f"the loader state is damaged: {error!r}") from error
