"""Transforms that the tests' mixtures name."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]


def drop_a_third(row: Row) -> Row | None:
    """A filter."""
    return None if row["input_ids"][0] % 3 == 0 else row


def in_three(row: Row) -> list[Row]:
    """One row to three samples: the whole, its first half and its reverse."""
    ids = row["input_ids"]
    return [{"input_ids": ids}, {"input_ids": ids[: len(ids) // 2 + 1]}, {"input_ids": ids[::-1]}]


def as_tokens(row: Row) -> Row:
    """The number that the text is, as the only token."""
    return {"input_ids": [int(row["text"])]}


def to_bytes(row: Row) -> Row:
    """The bytes of the text as tokens."""
    return {"input_ids": list(row["text"].encode())}
