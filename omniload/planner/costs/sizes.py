"""Checks that the sizes of a model are sizes."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import TYPE_CHECKING

from omniload.errors import PlanError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


MOST = 2**31 - 1
"""Largest size of a part of a model; with more, products of two would not fit into 64 bits."""


def check_sizes(value: DataclassInstance, what: str, most: int | None = None) -> None:
    """Check every field of a dataclass of sizes and flags.

    A field whose default is 0 may be 0, one whose default is None may be None, and all other sizes are at least 1.

    Args:
        value: the dataclass.
        what: says what it is, for the message.
        most: largest size that is one; None if all are.

    Raises:
        PlanError: names the first field that is not as it should be.
    """
    for field in fields(value):
        size = getattr(value, field.name)
        if isinstance(field.default, bool):
            if not isinstance(size, bool):
                raise PlanError(f"{what}: {field.name}: {size!r} is not true or false")
            continue
        if size is None and field.default is None:
            continue
        least = 1 if field.default in (MISSING, None) else 0
        if type(size) is not int or size < least:
            raise PlanError(f"{what}: {field.name}: {size!r} is not an integer of at least {least}")
        if most is not None and size > most:
            raise PlanError(f"{what}: {field.name}: {size} is more than {most}")
