"""What a torch dataset gives, as rows: which columns a sample has, copies of them, and what tells them from others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xxhash

from omniload.sources.protocol import BadRow, Row

_ROW_BYTES = 200
"""What a row takes besides its values, about."""
_NUMBER_BYTES = 36
"""What a number in a list takes, about."""


def row_of(sample: Any) -> Row | BadRow:
    """A sample as a row: a dict of columns, or text, token ids or messages as the one column it is."""
    try:
        if isinstance(sample, Mapping):
            return {key: _plain(value) for key, value in sample.items()}
        value = _plain(sample)
    except (TypeError, RuntimeError) as error:  # of a tensor: bfloat16, sparse
        return BadRow(reason=f"a tensor that is no array: {' '.join(str(error).split())}")
    if isinstance(value, str):
        return {"text": value}
    if isinstance(value, list) or (isinstance(value, np.ndarray) and value.ndim):
        messages = len(value) > 0 and isinstance(value[0], Mapping)
        return {"messages" if messages else "input_ids": value}
    return BadRow(reason=f"a {type(sample).__name__} is neither a dict, text nor token ids")


def copy_of(value: Any) -> Any:
    """A copy whose dicts, lists and arrays may be changed; anything else in it is shared."""
    if isinstance(value, dict):
        return {key: copy_of(one) for key, one in value.items()}
    if isinstance(value, list):
        nested = bool(value) and isinstance(value[0], dict | list | np.ndarray)
        return [copy_of(one) for one in value] if nested else value[:]
    return value.copy() if isinstance(value, np.ndarray) else value


def digest_of(rows: Sequence[Row | BadRow]) -> tuple[int, int]:
    """64 bits that tell rows from others by their numbers, texts and bytes, and about how many bytes they take.

    Of objects of other kinds only the type counts.
    """
    digest = xxhash.xxh3_64()
    num_bytes = sum(_fold(row, digest) + _ROW_BYTES for row in rows)
    return digest.intdigest(), num_bytes


def _plain(value: Any) -> Any:
    """A tensor as the array it is."""
    return value.numpy(force=True) if hasattr(value, "numpy") and not isinstance(value, np.ndarray) else value


def _fold(value: Any, digest: xxhash.xxh3_64) -> int:
    """Take a value into a digest; its bytes."""
    if isinstance(value, Mapping):
        digest.update(b"mapping %d " % len(value))
        return sum(_fold(key, digest) + _fold(one, digest) for key, one in value.items())
    if isinstance(value, list | tuple):
        numbers = _numbers(value)
        if numbers is None:
            digest.update(b"list %d " % len(value))
            return sum(_fold(one, digest) for one in value)
        return max(_fold(numbers, digest), _NUMBER_BYTES * len(value))
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        return _fold(value.tolist(), digest)
    data = _bytes_of(value)
    digest.update(f"{type(value).__name__} {len(data)} ".encode())
    digest.update(data)
    return len(data)


def _numbers(values: Sequence[Any]) -> np.ndarray | None:
    """A list of numbers as an array, which is hashed at once; None for a list of other things."""
    if not values or not isinstance(values[0], int | float | np.number | np.bool_):
        return None
    try:
        array = np.array(values)
    except (ValueError, OverflowError):  # lists among them
        return None
    return array if array.dtype.kind in "biuf" else None


def _bytes_of(value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode(errors="surrogatepass")
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    if isinstance(value, np.ndarray | np.generic):
        return f"{value.dtype.str} {value.shape} ".encode() + value.tobytes()
    if isinstance(value, BadRow):
        return value.reason.encode(errors="surrogatepass")
    return repr(value).encode() if isinstance(value, int | float | None) else b""
