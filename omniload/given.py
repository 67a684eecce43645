"""A dataset object of this process, where a mixture otherwise names the function that makes one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias

from pydantic import BeforeValidator, InstanceOf, PlainSerializer
from pydantic.json_schema import SkipJsonSchema


class Given:
    """Holds the dataset, so that what validates, copies or prints a mixture does not look into it.

    Args:
        dataset: the object.
    """

    __slots__ = ("dataset",)

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __repr__(self) -> str:
        kind = type(self.dataset)
        return f"<{kind.__module__}.{kind.__qualname__}>"


def _given(value: object) -> object:
    if value is None or isinstance(value, str | Given):
        return value
    if isinstance(value, int | float | list | tuple | Mapping):  # what a YAML file may hold
        raise ValueError(
            f"a {type(value).__name__} is no dataset; give package.module:function, or in Python a torch dataset"
        )
    return Given(value)


DatasetKey: TypeAlias = Annotated[
    str | SkipJsonSchema[InstanceOf[Given]] | None,
    BeforeValidator(_given),
    PlainSerializer(lambda value: repr(value) if isinstance(value, Given) else value, when_used="json"),
]
"""The key ``dataset`` of a source: a name, in files the only choice, or any dataset object, which becomes `Given`."""
