"""What the columns of a row mean: token ids, text, a prompt with its completion, or the messages of a chat.

A row holds its sample in the first of these that is there, under the source's own names for them:

- ``input_ids``: token ids, taken as they are; with ``labels`` of equal length, those that are -100 are not trained on;
- ``messages``: a chat, with ``tools`` as offered in it; the assistant's turns are trained on;
- ``prompt`` and ``completion``: both text, or both messages; what is trained on lies in the completion;
- ``text``.

Or in the one column that the source names, whose values then tell which of ids, messages and text it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa

from omniload.errors import ColumnMissing
from omniload.mixture import ColumnMap
from omniload.samples.chat import ChatTemplate
from omniload.samples.messages import read_messages, read_tools
from omniload.samples.sample import BadSample, Sample, Text, TokenIds

Kind: TypeAlias = Literal["input_ids", "messages", "prompt", "text"]
_KINDS: tuple[Kind, ...] = ("input_ids", "messages", "prompt", "text")  # in the order they are looked for
_ALL = "the columns input_ids, messages, text, or prompt with completion"
_BESIDE: dict[Kind, tuple[str, ...]] = {
    "input_ids": ("labels",),
    "messages": ("tools",),
    "prompt": ("completion", "tools"),
    "text": (),
}
IGNORED_LABEL = -100
"""Label of a token that is not trained on."""


class Found(NamedTuple):
    """The column that holds the sample."""

    column: str
    """Its name in the data."""
    kind: Kind | None
    """What it holds; None if its values have to tell."""


class Convention:
    """What a source calls the columns.

    Args:
        column: the only one to look at for the sample, if the source names one.
        names: its names for those of the conventions; if it has some for samples, one of these holds the sample.
    """

    def __init__(self, column: str | None = None, names: ColumnMap | None = None) -> None:
        self.names = names or ColumnMap()
        renamed = self.names.renamed
        kinds = [kind for kind in _KINDS if not renamed or renamed & {kind, *_BESIDE[kind]}]
        candidates = [(Found(getattr(self.names, kind), kind), self._also_needed(kind)) for kind in kinds]
        if column is not None:
            one_column: tuple[Kind, ...] = ("input_ids", "messages", "text")
            candidates = [
                (Found(column, next((kind for kind in one_column if kind == column), None)), column)
            ]
        self._candidates = candidates
        sought = " or ".join(
            f"'{found.column}'" if also == found.column else f"'{found.column}' with '{also}'"
            for found, also in candidates
        )
        self.nothing_found = f"no column {sought}" if column or renamed else f"none of {_ALL}"
        """What to say if no column is there that could hold a sample."""

    def _also_needed(self, kind: Kind) -> str:
        return str(getattr(self.names, "completion" if kind == "prompt" else kind))

    def find(self, columns: Collection[str]) -> Found | None:
        """The column that holds the sample, among those that there are."""
        for found, also in self._candidates:
            if found.column in columns and also in columns:
                return found
        return None

    def of_schema(self, schema: pa.Schema, where: str) -> Found:
        """The column that holds the sample, told by its type too.

        Args:
            schema: of a file.
            where: source and file, for the message.

        Raises:
            ColumnMissing: it is not there, or of a type that cannot hold the sample.
        """
        found = self.find(schema.names)
        if found is None:
            raise ColumnMissing(
                f"{where}: {self.nothing_found}; it has {', '.join(schema.names)}; set column: to the one to read"
            )
        return Found(found.column, _kind_of_type(found, schema.field(found.column).type, where))

    def needed(self, found: Found, columns: Collection[str]) -> list[str]:
        """The columns that samples are made from: what holds them, and what of a file's ``columns`` goes with it."""
        also = {key: getattr(self.names, key) for key in _BESIDE[found.kind or "text"]}
        return [found.column, *(name for key, name in also.items() if key == "completion" or name in columns)]

    def labels_of(self, schema: pa.Schema) -> str | None:
        """The column of labels of ready-made tokens, if there is one: lists of integers, and not say classes."""
        name = self.names.labels
        return name if name in schema.names and _is_list_of_integers(schema.field(name).type) else None


def read_sample(row: Mapping[str, Any], convention: Convention, template: ChatTemplate) -> Sample:
    """The sample a row holds.

    Args:
        row: one row.
        convention: what its columns are called.
        template: renders chats.

    Raises:
        BadSample: it holds none.
    """
    found = convention.find(row)
    if found is None:
        raise BadSample(convention.nothing_found)
    column, kind = found
    names, value = convention.names, row[column]
    if kind == "prompt":
        return _completion(value, row[names.completion], row.get(names.tools), names, template)
    if value is None:
        raise BadSample(f"'{column}' is null")
    if _is_empty(value):
        raise BadSample("empty")
    actual = _kind_of_value(value)
    if actual is None or (kind is not None and actual != kind):
        raise BadSample(f"'{column}' is of type {type(value).__name__} and not what its name says")
    if actual == "text":
        return Text(value)
    if actual == "messages":
        return template.render(read_messages(value, names), read_tools(row.get(names.tools)))
    ids = _integers(value, "token ids")
    return TokenIds(ids, _mask(ids, row[names.labels]) if names.labels in row else None)


def _completion(
    prompt: object, completion: object, tools: object, names: ColumnMap, template: ChatTemplate
) -> Text:
    if prompt is None or completion is None:
        raise BadSample(f"'{names.prompt if prompt is None else names.completion}' is null")
    if isinstance(prompt, str) and isinstance(completion, str):
        if not completion:
            raise BadSample("empty completion")
        return Text(prompt + completion, ((len(prompt), len(prompt) + len(completion)),))
    if isinstance(prompt, str) or isinstance(completion, str):
        raise BadSample("prompt and completion must both be text, or both messages")
    before, after = read_messages(prompt, names), read_messages(completion, names)
    return template.render([*before, *after], read_tools(tools), first_trained=len(before))


def _kind_of_type(found: Found, type_: pa.DataType, where: str) -> Kind | None:
    """The kind of sample a column of this Arrow type holds; None if the type says nothing."""
    if pa.types.is_dictionary(type_):
        type_ = type_.value_type
    if pa.types.is_null(type_):
        return found.kind
    kind: Kind | None = None
    if pa.types.is_string(type_) or pa.types.is_large_string(type_) or pa.types.is_string_view(type_):
        kind = "text"
    elif _is_list_of_integers(type_):
        kind = "input_ids"
    elif _is_list(type_) and pa.types.is_struct(type_.value_type):
        kind = "messages"
    if found.kind == "prompt" and kind in ("text", "messages"):
        kind = "prompt"
    if kind is None or (found.kind is not None and found.kind != kind):
        raise ColumnMissing(
            f"{where}: column '{found.column}' is of type {type_}, not text, a list of integers or a list of messages "
            "as its name says; set column: to the one to read"
        )
    return kind


def _is_list(type_: pa.DataType) -> bool:
    return bool(
        pa.types.is_list(type_) or pa.types.is_large_list(type_) or pa.types.is_fixed_size_list(type_)
    )


def _is_list_of_integers(type_: pa.DataType) -> bool:
    return _is_list(type_) and bool(pa.types.is_integer(type_.value_type))


def _is_empty(value: object) -> bool:
    if isinstance(value, np.ndarray):
        return value.size == 0  # a number that is an array has no length
    return isinstance(value, str | list | tuple) and not value


def _kind_of_value(value: object) -> Kind | None:
    if isinstance(value, str):
        return "text"
    if isinstance(value, np.ndarray):
        return "input_ids" if value.ndim else None
    if isinstance(value, list | tuple):
        return "messages" if any(isinstance(item, dict) for item in value[:1]) else "input_ids"
    return None


def _mask(ids: np.ndarray, labels: object) -> np.ndarray | None:
    """``bool[n]``: which of the tokens the labels say are trained on; None if all."""
    if labels is None:
        raise BadSample("'labels' is null")
    if not isinstance(labels, list | tuple | np.ndarray) or (
        isinstance(labels, np.ndarray) and not labels.ndim
    ):
        return None  # not of the tokens, but say the row's class
    targets = _integers(labels, "labels")
    if len(targets) != len(ids):
        raise BadSample(f"{len(ids)} token ids and {len(targets)} labels")
    mask = np.asarray(targets != IGNORED_LABEL)
    if not np.array_equal(targets[mask], ids[mask]):
        raise BadSample(f"labels that are neither the token ids nor {IGNORED_LABEL}")
    return None if mask.all() else mask


def _integers(value: Any, what: str) -> np.ndarray:
    try:
        array = np.asarray(value) if len(value) else np.zeros(0, dtype=np.int64)
    except (ValueError, OverflowError) as error:
        raise BadSample(f"{what}: {error}") from None
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise BadSample(f"{what} that are not a flat list of integers")
    return array
