"""What pydantic found wrong with a mixture, as one line that says what to do about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from omniload.suggest import suggest


def first_problem(error: ValidationError, model: type[BaseModel], also: tuple[str, ...] = ()) -> str:
    """The first problem: key, what is wrong, remedy.

    Args:
        error: what pydantic raised.
        model: the model that was to be validated.
        also: top-level keys that a file may have and the model has no more.
    """
    # A misspelt key is also a missing one: the misspelling is what the user can act on.
    problem = min(error.errors(include_url=False), key=lambda one: one["type"] != "extra_forbidden")
    location = tuple(part for part in problem["loc"] if part not in ("function-before", "str", "int"))
    key = ".".join(str(part) for part in location)
    if problem["type"] == "extra_forbidden":
        known = [*_fields_beside(model, location), *(also if len(location) == 1 else ())]
        return f"unknown key '{key}'{suggest(str(location[-1]), known)}"
    if problem["type"] == "missing":
        return f"'{key}' is missing; add it"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error":
        return f"{key}: {message}" if key else message
    return f"{key}: {message[0].lower()}{message[1:]}, got {problem['input']!r}"


def _fields_beside(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """Keys that are allowed beside the last element of ``location``."""
    is_member = False  # whether the next part names a member of a mapping or list, and no field
    for part in location[:-1]:
        if is_member:
            is_member = False
        elif part in model.model_fields:
            annotation = model.model_fields[str(part)].annotation
            is_member = get_origin(annotation) in (dict, list, tuple, Mapping)
            model = _model_in(annotation) or model
    return list(model.model_fields)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for one in get_args(annotation) if (model := _model_in(one)) is not None), None)
