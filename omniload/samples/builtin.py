"""Transforms that are built in, by the short names a mixture calls them by."""

from __future__ import annotations

import re
from typing import Any, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, model_validator

from omniload.samples.sample import BadSample

Row: TypeAlias = dict[str, Any]

TRANSFORMS: dict[str, tuple[str, int]] = {
    "filter": ("omniload.samples.builtin:Filter", 1),
    "image_patches": ("omniload.samples.images:ImagePatches", 1),
    "rename": ("omniload.samples.builtin:Rename", 1),
}
"""Where each is, and its version: part of the stream's identity, to be raised when its results change."""


class BuiltIn(BaseModel):
    """A transform whose arguments are checked once, when it is made."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Filter(BuiltIn):
    """Keeps the rows whose value in a column meets every condition given; a null meets none."""

    column: str
    """Column to look at; a row without it is bad."""
    equals: Any = None
    """The value itself."""
    one_of: tuple[Any, ...] | None = None
    """Any of these."""
    none_of: tuple[Any, ...] | None = None
    """None of these."""
    at_least: float | None = None
    """Smallest number."""
    at_most: float | None = None
    """Largest number."""
    min_length: int | None = None
    """Fewest characters of a text, or items of a list."""
    max_length: int | None = None
    """Most characters or items."""
    matches: str | None = None
    """Regular expression to be found in the text."""

    @model_validator(mode="after")
    def _has_conditions(self) -> Self:
        if all(value is None for name, value in self if name != "column"):
            raise ValueError("no condition: give one of equals, one_of, at_least, min_length, matches, …")
        try:
            re.compile(self.matches or "")
        except re.error as error:
            raise ValueError(f"matches: not a regular expression: {error}") from None
        return self

    def __call__(self, row: Row) -> Row | None:
        """The row, or None."""
        if self.column not in row:
            raise BadSample(f"no column '{self.column}' to filter by")
        value = row[self.column]
        return row if value is not None and self._meets(value) else None

    def _meets(self, value: Any) -> bool:
        return (
            (self.equals is None or value == self.equals)
            and (self.one_of is None or value in self.one_of)
            and (self.none_of is None or value not in self.none_of)
            and (self.at_least is None or value >= self.at_least)
            and (self.at_most is None or value <= self.at_most)
            and (self.min_length is None or len(value) >= self.min_length)
            and (self.max_length is None or len(value) <= self.max_length)
            and (self.matches is None or re.search(self.matches, value) is not None)
        )


class Rename(BuiltIn):
    """Gives columns other names."""

    columns: dict[str, str]
    """New name by old; one that a row lacks is passed over."""

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        if len(set(self.columns.values())) < len(self.columns):
            raise ValueError(f"columns: two get the same name: {self.columns}")
        return self

    def __call__(self, row: Row) -> Row:
        """The row under its new names, each of which replaces what was called so before."""
        taken = {new: row.pop(old) for old, new in self.columns.items() if old in row}
        return {**row, **taken}
