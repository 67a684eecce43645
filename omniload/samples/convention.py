"""What the columns of a row mean: token ids, text, or the messages of a chat.

A row holds its sample in one column: ``input_ids`` (token ids, taken as they are), ``messages`` (a list of
``{"role", "content"}``) or ``text``, the first of these that is there; or in the column that the source names, whose
values then tell which of the three it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa

from omniload.errors import ColumnMissing

Kind: TypeAlias = Literal["input_ids", "messages", "text"]
KINDS: tuple[Kind, ...] = ("input_ids", "messages", "text")

TEMPLATE = "chatml-1"
"""Name and version of the built-in chat template; part of the stream's identity."""

Segment: TypeAlias = tuple[str, bool]
"""Text that is encoded by itself, and whether its tokens are trained on."""
Sample: TypeAlias = np.ndarray | list[Segment]
"""Token ids, or the text they are to be made from."""


class BadSample(ValueError):
    """The bytes of a row make no sample; the message says why."""


def find_column(columns: Sequence[str], wanted: str | None, where: str) -> str:
    """The column that holds the sample.

    Args:
        columns: names of the columns that exist.
        wanted: the one that the source names, if any.
        where: source and file, for the message.

    Raises:
        ColumnMissing: it is not there; names what is.
    """
    found = next((name for name in ([wanted] if wanted else KINDS) if name in columns), None)
    if found is None:
        missing = f"no column '{wanted}'" if wanted else f"none of the columns {', '.join(KINDS)}"
        raise ColumnMissing(
            f"{where}: {missing}; it has {', '.join(columns)}; set column: to the one to read"
        )
    return found


def kind_of_type(column: str, type_: pa.DataType, where: str) -> Kind | None:
    """The kind of sample a column of this Arrow type holds; None if the type says nothing.

    Raises:
        ColumnMissing: a type that cannot hold a sample, or not the one that the column's name promises.
    """
    kind: Kind | None = None
    if pa.types.is_dictionary(type_):
        type_ = type_.value_type
    if pa.types.is_null(type_):
        return column if column in KINDS else None
    if pa.types.is_string(type_) or pa.types.is_large_string(type_) or pa.types.is_string_view(type_):
        kind = "text"
    elif pa.types.is_list(type_) or pa.types.is_large_list(type_) or pa.types.is_fixed_size_list(type_):
        if pa.types.is_integer(type_.value_type):
            kind = "input_ids"
        elif pa.types.is_struct(type_.value_type):
            kind = "messages"
    if kind is None or (column in KINDS and column != kind):
        raise ColumnMissing(
            f"{where}: column '{column}' is of type {type_}, not text, a list of integers or a list of messages "
            "as its name says; set column: to the one to read"
        )
    return kind


def read_sample(row: dict[str, Any], wanted: str | None) -> Sample:
    """The sample a row holds.

    Args:
        row: one row.
        wanted: column that the source names, if any.

    Raises:
        BadSample: it holds none.
    """
    column = next((name for name in ([wanted] if wanted else KINDS) if name in row), None)
    if column is None:
        raise BadSample(f"no column '{wanted}'" if wanted else f"none of the columns {', '.join(KINDS)}")
    value = row[column]
    if value is None:
        raise BadSample(f"'{column}' is null")
    if isinstance(value, str | list | tuple | np.ndarray) and not len(value):
        raise BadSample("empty")
    kind = _kind_of_value(value)
    if kind is None or (column in KINDS and column != kind):
        raise BadSample(f"'{column}' is of type {type(value).__name__} and not what its name says")
    if kind == "text":
        return [(value, True)]
    return chat_segments(value) if kind == "messages" else _token_ids(value)


def chat_segments(messages: Sequence[Any]) -> list[Segment]:
    r"""Render a chat by the ChatML template, ``<|im_start|>role\ncontent<|im_end|>\n`` for each message.

    Trained on: the content of the assistant's messages and the ``<|im_end|>`` that ends them. Each run of text that
    is trained on, and each between them, is a segment encoded by itself, so that no token straddles the border.

    Raises:
        BadSample: a message without role or content, or none by the assistant.
    """
    segments: list[Segment] = []
    pending = ""
    for i, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(role, str) or not isinstance(content, str):
            raise BadSample(f"message {i} is not of the form {{'role': text, 'content': text}}")
        pending += f"<|im_start|>{role}\n"
        if role == "assistant":
            segments += [(pending, False), (f"{content}<|im_end|>", True)]
            pending = "\n"
        else:
            pending += f"{content}<|im_end|>\n"
    if not segments:
        raise BadSample("no message by the assistant to train on")
    return [*segments, (pending, False)]


def _kind_of_value(value: object) -> Kind | None:
    if isinstance(value, str):
        return "text"
    if isinstance(value, np.ndarray):
        return "input_ids"
    if isinstance(value, list | tuple):
        return "messages" if any(isinstance(item, dict) for item in value[:1]) else "input_ids"
    return None


def _token_ids(value: object) -> np.ndarray:
    try:
        ids = np.asarray(value)
    except (ValueError, OverflowError) as error:
        raise BadSample(f"token ids: {error}") from None
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise BadSample("token ids that are not a flat list of integers")
    return ids
