"""How the values of MDS columns are encoded, as in ``streaming.base.format.mds.encodings``.

Left out are pickles, which could run any code, and ``pil``, the pixels of an image in a form of Pillow's own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from functools import cache, partial
from typing import Any

import numpy as np
import pyarrow as pa

_VALUE_DTYPES = {
    8: "uint8",
    9: "int8",
    16: "uint16",
    17: "int16",
    18: "float16",
    32: "uint32",
    33: "int32",
    34: "float32",
    64: "uint64",
    65: "int64",
    66: "float64",
}
"""Type of an array by the code that stands before it, if the encoding does not say."""
_IMAGE = pa.struct([("bytes", pa.large_binary()), ("path", pa.string())])


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoding:
    """How the values of a column are stored."""

    type: pa.DataType
    """Of the values; null if they tell it themselves."""
    decode: Callable[[memoryview], Any]
    """Makes a value from its bytes; raises `ValueError`, `LookupError`, `ArithmeticError` or `RecursionError` of bad
    ones."""
    flat: Flat | None = None
    """How to get at the values all at once, if they are lists of integers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Flat:
    """One-dimensional arrays of one type."""

    dtype: np.dtype[np.generic]
    """Of the items."""
    has_shape: bool
    """Whether each begins with the number of its dimensions and their sizes."""
    num_items: int | None = None
    """Of each array, if the encoding says."""


def find_encoding(column: str, name: str) -> Encoding | None:
    """The encoding of this name; None if it cannot be read.

    A column of ``bytes`` that is called ``tokens`` or ``input_ids`` holds ``int64`` token ids, as LLM Foundry writes
    them; in a row they are bytes still, for a transform that knows better.
    """
    if name == "bytes" and column in ("tokens", "input_ids"):
        flat = Flat(dtype=np.dtype(np.int64), has_shape=False)
        return Encoding(type=pa.large_list(pa.int64()), decode=bytes, flat=flat)
    kind, _, arguments = name.partition(":")
    return _ndarray(arguments) if kind == "ndarray" else _ENCODINGS.get(name)


@cache
def _ndarray(arguments: str) -> Encoding | None:
    dtype_name, _, shape_text = arguments.partition(":")
    if dtype_name and dtype_name not in _VALUE_DTYPES.values():
        return None
    try:
        shape = tuple(int(size) for size in shape_text.split(",")) if shape_text else None
    except ValueError:
        return None
    if shape is not None and min(shape) < 1:
        return None
    dtype = np.dtype(dtype_name) if dtype_name else None
    decode = partial(_array, dtype, shape)
    if dtype is None or dtype.kind not in "iu" or (shape is not None and len(shape) > 1):
        return Encoding(type=pa.null(), decode=decode)
    flat = Flat(dtype=dtype, has_shape=shape is None, num_items=shape[0] if shape else None)
    return Encoding(type=pa.large_list(pa.from_numpy_dtype(dtype)), decode=decode, flat=flat)


def _array(
    dtype: np.dtype[np.generic] | None, shape: tuple[int, ...] | None, value: memoryview
) -> np.ndarray:
    """An array: a byte for the type and a shape, each if the encoding does not say, and the items.

    A shape is a byte, of which the lower two bits say how wide the sizes are and the others how many, and the sizes.
    """
    if dtype is None:
        code, value = value[0], value[1:]
        if code not in _VALUE_DTYPES:
            raise ValueError(f"{code} is no type of arrays")
        dtype = np.dtype(_VALUE_DTYPES[code])
    if shape is None:
        width, ndim = 1 << (value[0] & 3), value[0] >> 2
        shape = tuple(np.frombuffer(value[1 : 1 + ndim * width], dtype=f"<u{width}").tolist())
        value = value[1 + ndim * width :]
    return np.frombuffer(value, dtype=dtype).reshape(shape).copy()  # the caller may change it


def _text(value: memoryview) -> str:
    return str(value, "utf-8")


def _parsed(parse: Callable[[str], Any]) -> Callable[[memoryview], Any]:
    return lambda value: parse(_text(value))


def _scalar(dtype: str) -> Encoding:
    def decode(value: memoryview) -> int | float:
        [item] = np.frombuffer(value, dtype=dtype).tolist()
        return item  # type: ignore[no-any-return]

    return Encoding(type=pa.from_numpy_dtype(dtype), decode=decode)


def _image(value: memoryview) -> dict[str, Any]:
    return {"bytes": bytes(value), "path": None}


def _images(reserved_bytes: int) -> Encoding:
    def decode(value: memoryview) -> list[dict[str, Any]]:
        rest = value[reserved_bytes:]
        [count] = np.frombuffer(rest[:4], dtype="<u4").tolist()
        if len(rest) < 4 + 4 * count:
            raise ValueError(f"{len(value)} bytes do not hold {count} images")
        ends = (
            4 + 4 * count + np.cumsum(np.frombuffer(rest, dtype="<u4", count=count, offset=4), dtype=np.int64)
        )
        if count and ends[-1] != len(rest):
            raise ValueError(f"{count} images end at byte {ends[-1]} of {len(rest)}")
        starts = [4 + 4 * count, *ends.tolist()]
        return [_image(rest[start:end]) for start, end in zip(starts, ends.tolist(), strict=False)]

    return Encoding(type=pa.large_list(_IMAGE), decode=decode)


_ENCODINGS = {
    "bytes": Encoding(type=pa.large_binary(), decode=bytes),
    "str": Encoding(type=pa.large_string(), decode=_text),
    "int": _scalar("int64"),
    **{dtype: _scalar(dtype) for dtype in _VALUE_DTYPES.values()},
    "str_int": Encoding(type=pa.null(), decode=_parsed(int)),
    "str_float": Encoding(type=pa.float64(), decode=_parsed(float)),
    "str_decimal": Encoding(type=pa.null(), decode=_parsed(Decimal)),
    "json": Encoding(type=pa.null(), decode=_parsed(json.loads)),
    "jpeg": Encoding(type=_IMAGE, decode=_image),
    "png": Encoding(type=_IMAGE, decode=_image),
    "list[jpeg]": _images(reserved_bytes=4),
    "list[png]": _images(reserved_bytes=4),
    "jpeg_array": _images(reserved_bytes=0),
    "jpegarray": _images(reserved_bytes=0),
}
