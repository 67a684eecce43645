"""Messages of a chat as a row stores them, made into what chat templates take: JSON types, OpenAI's names.

A key whose value is null counts as absent: a table has no other way to say that of two messages only one calls a
tool, and the same chat must give the same text from Parquet and from JSON lines.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from omniload.mixture import ColumnMap
from omniload.samples.jinja_sandbox import is_marked
from omniload.samples.sample import BadSample

_MAX_DEPTH = 64
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names in use, the one that templates read first


def read_messages(value: object, names: ColumnMap) -> list[dict[str, Any]]:
    """The messages of a chat.

    Args:
        value: as stored.
        names: what the source calls ``role``, ``content`` and the roles.

    Raises:
        BadSample: not a list of messages with a role and content, or a tool call in place of it.
    """
    if not isinstance(value, list | tuple):
        raise BadSample(f"a chat of type {type(value).__name__}, not a list of messages")
    return [_message(i, message, names) for i, message in enumerate(value)]


def read_tools(value: object) -> list[Any]:
    """Descriptions of tools, stored as a list or as its JSON text; none if null.

    Raises:
        BadSample: it is neither.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value) if value else []
        except (ValueError, RecursionError) as error:
            raise BadSample(f"tools: not JSON: {error}") from None
    tools = [] if value is None else _plain(value)
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadSample("tools that are not a list of JSON objects")
    return tools


def _message(index: int, message: object, names: ColumnMap) -> dict[str, Any]:
    plain = _plain(message) if isinstance(message, dict) else {}
    role, content = plain.pop(names.role, None), plain.pop(names.content, None)
    said = isinstance(content, str) or (
        isinstance(content, list) and all(isinstance(part, dict) for part in content)
    )
    if not isinstance(role, str) or not (said or (content is None and "tool_calls" in plain)):
        raise BadSample(
            f"message {index} is not of the form {{'{names.role}': text, '{names.content}': text or parts}}"
        )
    made = {**plain, "role": names.roles.get(role, role)}
    if said:
        made["content"] = content
    reasoning = next((plain[key] for key in _REASONING if key in plain), None)
    if reasoning is not None:
        made = {"thinking": reasoning, **made, "reasoning_content": reasoning}
    return made


def _plain(value: Any, depth: int = 0) -> Any:
    """The value in JSON types without nulls in objects; anything else, like an image's bytes, by its type's name."""
    if isinstance(value, str):
        if is_marked(value):
            raise BadSample("text with a character reserved for marks (U+FDD0, U+FDD1)")
        return value
    if depth > _MAX_DEPTH:
        raise BadSample(f"a chat nested more than {_MAX_DEPTH} levels deep")
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item, depth + 1) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_plain(item, depth + 1) for item in value]
    return value if value is None or isinstance(value, bool | int | float) else f"<{type(value).__name__}>"
