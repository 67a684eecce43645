"""The identity of a stream: digests of everything, besides the state, that its plans depend on.

Saved with the state and compared when it is loaded, so that a resume with another mixture, other data or another
tokenizer is refused by name and never silently trains on something else. Where the data lies is not part of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from omniload.digests import Digests
from omniload.errors import StateError
from omniload.mixture import Mixture
from omniload.planner.costs import cost_model
from omniload.planner.packing import MAX_WAIT_STEPS
from omniload.planner.rules import SLACK_PERCENT
from omniload.planner.strategies import source_of

# What a source's entry does not depend on: where the files are, how to get at them, and when to give up.
_ELSEWHERE = {
    *("path", "storage_options", "chat_template"),
    *("max_failures", "max_failure_fraction", "on_unreachable"),
}
# Top-level keys with an entry of their own, or that only say when to stop, where to report and where to run.
_NOT_SHAPE = {"sources", "tokenizer", "chat_template", "steps", "quarantine", "execution", "ray"}

# What no key of the mixture says, and plans depend on.
_CONSTANTS = (SLACK_PERCENT, MAX_WAIT_STEPS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """Digests by what they cover."""

    shape: dict[str, Any]
    """The mixture's top-level keys, as they are or, where long, by digest."""
    tokenizer: str
    """Digest of the tokenizer; empty without one."""
    sources: dict[str, tuple[str, str, int]]
    """For each source the digests of its definition and of its data, and the number of its files."""

    @classmethod
    def of(cls, mixture: Mixture, digests: Sequence[Digests], split: str) -> Self:
        """The identity of the stream of these sources, in the order of `Mixture.names`."""
        shape: dict[str, Any] = mixture.model_dump(mode="json", exclude=_NOT_SHAPE)
        shape["schedule"] = _digest(shape["schedule"])
        shape["split"] = split
        shape["strategy"] = [mixture.strategy, _digest([*_CONSTANTS, source_of(mixture.strategy)])]
        shape["cost"] = cost_model(mixture.cost).fingerprint
        definitions = {
            name: spec.model_dump(mode="json", exclude=_ELSEWHERE) for name, spec in mixture.sources.items()
        }
        return cls(
            shape=shape,
            tokenizer=digests[0].of["tokenizer"],
            sources={
                name: (
                    _digest([definitions[name], found.of["template"], found.of["transforms"]]),
                    found.of["data"],
                    found.num_files,
                )
                for name, found in zip(mixture.names, digests, strict=True)
            },
        )

    def to_json(self) -> dict[str, Any]:
        """JSON-serialisable form."""
        return {
            "shape": self.shape,
            "tokenizer": self.tokenizer,
            "sources": {name: list(entry) for name, entry in self.sources.items()},
        }

    def check(self, saved: object) -> None:
        """Compare with a saved identity.

        Raises:
            StateError: it is of another stream; names the first thing that differs.
        """
        if not isinstance(saved, dict) or saved.keys() != self.to_json().keys():
            raise StateError("the state holds no identity of its mixture; it was not saved by this loader")
        remedy = "resume with the mixture and data it was saved with, or start a new run"
        for key, value in self.shape.items():
            if saved["shape"].get(key) != value:
                was, now = saved["shape"].get(key), value
                detail = "" if key == "schedule" else f" from {was!r} to {now!r}"
                raise StateError(f"mixture: '{key}' changed{detail} since the state was saved; {remedy}")
        if saved["tokenizer"] != self.tokenizer:
            raise StateError(f"mixture: the tokenizer changed since the state was saved; {remedy}")
        for name in sorted(saved["sources"].keys() | self.sources.keys()):
            if name not in self.sources:
                raise StateError(f"mixture: source '{name}' was removed since the state was saved; {remedy}")
            if name not in saved["sources"]:
                raise StateError(f"mixture: source '{name}' was added since the state was saved; {remedy}")
            was_definition, was_data, was_files = saved["sources"][name]
            definition, data, files = self.sources[name]
            if was_definition != definition:
                raise StateError(
                    f"mixture: source '{name}' is defined differently than when the state was saved; {remedy}"
                )
            if was_data != data:
                what = (
                    f"it has {files} files, not {was_files}," if files != was_files else "its files changed"
                )
                raise StateError(f"source '{name}': {what} since the state was saved; {remedy}")


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
