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
