"""What tells a source from any other, as its loader says it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Digests:
    """What tells a source, and what is made of it, from any other."""

    of: dict[str, str]
    """Digests of the ``data``, and of the ``template``, ``tokenizer`` and ``transforms`` that are used on it."""
    num_files: int
    """Files it has."""
