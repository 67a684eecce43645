"""The objects of a plan log: their names and their bytes.

::

    claims/<generation>                          who may write; taken by create-if-absent, never removed
    <generation>/<number>-head-<step>            what the log consists of, and all decisions so far
    <generation>/<number>-snapshot-<step>        the stream before a step
    <generation>/<number>-decision-<step>        one decision, about a step
    <generation>/<number>-hashes-<step>          the hashes of the plans of a step and of those after it

A generation numbers what it writes from 0, without a gap. Each object consists of ``b"omniplg1"``, the XXH3-64 of its
path and body, and the body: hashes of 16 bytes each, else deflated JSON.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeAlias, cast

import xxhash

from omniload.planner.decisions import Decision, from_json, to_json

Kind: TypeAlias = Literal["head", "snapshot", "decision", "hashes"]

HASH_BYTES = 16
"""Bytes of a plan's hash."""

HASHES_EVERY = 8
"""Most hashes in an object. With 16 bytes of framing that makes 18 bytes a step; as many may be lost in a crash."""

_CLAIMS = "claims"
_MAGIC = b"omniplg1"
_HEADER_BYTES = len(_MAGIC) + 8
_PATH = re.compile(r"(\d{8})/(\d{10})-(head|snapshot|decision|hashes)-(\d{10})")


@dataclass(frozen=True, slots=True, order=True)
class Entry:
    """One object; entries sort in the order in which they were written."""

    generation: int
    """Of the log that wrote it."""
    number: int
    """Among what that log wrote, from 0."""
    kind: Kind
    """What it holds."""
    step: int
    """The step it is about, or the first one."""

    @property
    def path(self) -> str:
        """In the store of the log."""
        return f"{self.generation:08d}/{self.number:010d}-{self.kind}-{self.step:010d}"

    @classmethod
    def of(cls, path: str) -> Self | None:
        """Inverse of `path`; None for what is no entry."""
        found = _PATH.fullmatch(path)
        if found is None:
            return None
        generation, number, kind, step = found.groups()
        return cls(int(generation), int(number), cast("Kind", kind), int(step))


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """What a log consists of besides what its writer wrote after the head."""

    names: tuple[str, ...]
    """Of the sources, in the order of `Mixture.names`."""
    fingerprint: str
    """Of what the stream depends on besides state and decisions."""
    parts: tuple[tuple[int, int, int], ...]
    """By generation: the number of the first entry that belongs to the log, and one more than that of the last."""
    decisions: tuple[Decision, ...]
    """All about the step of the oldest snapshot and later ones, in the order in which they were made."""

    def to_body(self) -> bytes:
        """The body of the object."""
        return json_body(
            {
                "names": self.names,
                "fingerprint": self.fingerprint,
                "parts": self.parts,
                "decisions": [to_json(decision) for decision in self.decisions],
            }
        )

    @classmethod
    def from_body(cls, body: bytes) -> Self:
        """Inverse of `to_body`."""
        values = json_of(body)
        return cls(
            names=tuple(values["names"]),
            fingerprint=values["fingerprint"],
            parts=tuple((generation, first, end) for generation, first, end in values["parts"]),
            decisions=tuple(map(from_json, values["decisions"])),
        )


def claim_path(generation: int) -> str:
    """Where a generation is claimed."""
    return f"{_CLAIMS}/{generation:08d}"


def generation_of(path: str) -> int:
    """The generation that a claim or an entry is of; 0 for anything else."""
    entry = Entry.of(path)
    if entry is not None:
        return entry.generation
    name = path.removeprefix(f"{_CLAIMS}/")
    return int(name) if re.fullmatch(r"\d{8}", name) else 0


def parts_of(entries: Sequence[Entry]) -> tuple[tuple[int, int, int], ...]:
    """`Head.parts` of entries in order, of which those of one generation have no gap."""
    parts: dict[int, tuple[int, int, int]] = {}
    for entry in entries:
        _, first, _ = parts.get(entry.generation, (0, entry.number, 0))
        parts[entry.generation] = entry.generation, first, entry.number + 1
    return tuple(parts.values())


def seal(path: str, body: bytes) -> list[bytes]:
    """The buffers of an object."""
    return [_MAGIC, xxhash.xxh3_64_digest(path.encode() + body), body]


def unseal(path: str, data: bytes) -> bytes:
    """The body of an object.

    Raises:
        ValueError: it is not what `seal` made for that path.
    """
    body = data[_HEADER_BYTES:]
    if not data:
        raise ValueError("it is empty")
    if data[: len(_MAGIC)] != _MAGIC:
        raise ValueError(f"it does not begin with {_MAGIC!r}")
    if data[len(_MAGIC) : _HEADER_BYTES] != xxhash.xxh3_64_digest(path.encode() + body):
        raise ValueError("its digest does not match its content")
    return body


def json_body(values: Any) -> bytes:
    """JSON as the body of an object."""
    return zlib.compress(json.dumps(values, separators=(",", ":")).encode())


def json_of(body: bytes) -> Any:
    """Inverse of `json_body`."""
    return json.loads(zlib.decompress(body))
