"""Non-tensor leaves as JSON with tags for what JSON cannot say.

========================================  =============================================
value                                     JSON
========================================  =============================================
integer beyond ±2⁵³                       ``{"$int": "-9007199254740993"}``
non-finite float                          ``{"$float": "7ff8000000000000"}`` (big-endian bits of the float64)
bytes                                     ``{"$bytes": "<base64>"}``
tuple                                     ``{"$tuple": [...]}``
dict with a key that is not a string,     ``{"$pairs": [[key, value], ...]}``
or with a key that starts with ``$``
========================================  =============================================

Decoding builds plain values and nothing else; nothing of a checkpoint is ever executed.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import struct
from collections.abc import Callable
from typing import Any, Final

from checkpoint.errors import FormatError, StateError

_MAX_EXACT: Final = 1 << 53
_MAX_DEPTH: Final = 200
_MAX_INT_DIGITS: Final = 4300  # the limit Python itself sets for parsing decimal integers


def encode_objects(tree: object, where: str) -> bytes:
    """Encode a tree of plain values; equal trees give equal bytes, whatever the order of their keys.

    Args:
        tree: dict, list, tuple, str, int, float, bool, None and bytes, nested.
        where: Name of the tree in messages.

    Raises:
        StateError: Some leaf is of another type, named by its path.
    """
    document = _encode(tree, where, 0)
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _encode(value: Any, path: str, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise StateError(
            f"{path}: nested deeper than {_MAX_DEPTH} levels; flatten it or leave it out of the state"
        )
    if value is None or isinstance(value, bool) or type(value) is str:
        return value
    if type(value) is int:
        return value if -_MAX_EXACT <= value <= _MAX_EXACT else {"$int": _decimal(value, path)}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if type(value) is tuple:
        return {"$tuple": [_encode(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)]}
    if isinstance(value, list):
        return [_encode(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)]
    if isinstance(value, dict):
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: _encode(item, f"{path}.{key}", depth + 1) for key, item in value.items()}
        pairs = [
            [_encode(key, f"{path} (key {key!r})", depth + 1), _encode(item, f"{path}.{key}", depth + 1)]
            for key, item in value.items()
        ]
        return {"$pairs": pairs}
    raise StateError(
        f"{path}: cannot store a {type(value).__module__}.{type(value).__qualname__}; "
        f"make it a tensor, a number, a string, bytes, a list or a dict, or leave it out of the state"
    )


def _decimal(value: int, path: str) -> str:
    try:
        return str(value)
    except ValueError:
        raise StateError(
            f"{path}: an integer of more than {_MAX_INT_DIGITS} digits; store it as bytes"
        ) from None


def decode_objects(data: bytes, where: str) -> Any:
    """Decode what :func:`encode_objects` made.

    Raises:
        FormatError: Not JSON, a malformed tag, a repeated key, or nested too deep.
    """
    try:
        document = json.loads(data, object_pairs_hook=_no_repeats)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where}: not valid JSON ({_short(error)})") from None
    try:
        return _decode(document, 0)
    except (ValueError, TypeError, binascii.Error, struct.error, RecursionError) as error:
        raise FormatError(f"{where}: malformed value ({_short(error)})") from None


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice in one object")
    return found


def _decode(value: Any, depth: int) -> Any:
    if depth > 2 * _MAX_DEPTH + 8:  # a tag adds a level
        raise ValueError("nested too deep")
    if isinstance(value, list):
        return [_decode(item, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next((key for key in value if key.startswith("$")), None)
    if tag is None:
        return {key: _decode(item, depth + 1) for key, item in value.items()}
    if len(value) != 1 or tag not in _TAGS:
        raise ValueError(f"unknown tag {tag!r}")
    return _TAGS[tag](value[tag], depth + 1)


def _decode_int(text: Any, _: int) -> int:
    if not isinstance(text, str):
        raise TypeError("$int is not a string")
    return int(text)


def _decode_float(text: Any, _: int) -> float:
    (value,) = struct.unpack(">d", bytes.fromhex(text))
    return float(value)


def _decode_bytes(text: Any, _: int) -> bytes:
    return base64.b64decode(text, validate=True)


def _decode_tuple(items: Any, depth: int) -> tuple[Any, ...]:
    if not isinstance(items, list):
        raise TypeError("$tuple is not a list")
    return tuple(_decode(item, depth) for item in items)


def _decode_pairs(items: Any, depth: int) -> dict[Any, Any]:
    found = {}
    for key, item in items:
        found[_decode(key, depth)] = _decode(item, depth)
    if len(found) != len(items):
        raise ValueError("a key occurs twice in $pairs")
    return found


_TAGS: Final[dict[str, Callable[[Any, int], Any]]] = {
    "$bytes": _decode_bytes,
    "$float": _decode_float,
    "$int": _decode_int,
    "$pairs": _decode_pairs,
    "$tuple": _decode_tuple,
}


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."


def first_difference(a: Any, b: Any, path: str) -> str | None:
    """Path of the first place where two decoded trees differ, or None if they are equal.

    Values of different type differ (``1`` and ``1.0``); floats are compared by their bits.
    """
    if type(a) is not type(b):
        return path
    if isinstance(a, dict):
        for key in [*a, *(key for key in b if key not in a)]:
            if key not in a or key not in b:
                return f"{path}.{key}"
            found = first_difference(a[key], b[key], f"{path}.{key}")
            if found is not None:
                return found
        return None
    if isinstance(a, list | tuple):
        for index, (left, right) in enumerate(zip(a, b, strict=False)):
            found = first_difference(left, right, f"{path}[{index}]")
            if found is not None:
                return found
        return None if len(a) == len(b) else f"{path}[{min(len(a), len(b))}]"
    if isinstance(a, float):
        return None if struct.pack(">d", a) == struct.pack(">d", b) else path
    return None if a == b else path
