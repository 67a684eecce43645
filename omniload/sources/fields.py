"""What the files of a webdataset sample hold, by their ending; those of the ``webdataset`` tool that run no code."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import numpy as np

_IMAGE_ENDINGS = frozenset(
    ("avif", "bmp", "gif", "heic", "jpeg", "jpg", "pbm", "pgm", "png", "ppm", "tif", "tiff", "webp")
)
_LONGEST_REASON = 200
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def decode_field(name: str, path: str, data: memoryview) -> Any:
    """The value of a field.

    Args:
        name: of the field, in lower case; what follows its last dot says what it is.
        path: of the file in the archive.
        data: its content.

    Returns:
        ``str`` of txt, text and transcript; ``int`` of cls, cls2, index, inx and id; what the JSON of json and jsn
        says; the array of an npy; ``{"bytes", "path"}`` of an image; ``bytes`` of anything else.

    Raises:
        ValueError: the content is not of that kind.
    """
    ending = name.rpartition(".")[2]
    if ending in _IMAGE_ENDINGS:
        return {"bytes": bytes(data), "path": path}
    decode = _DECODERS.get(ending)
    if decode is None:
        return bytes(data)
    try:
        return decode(data)
    except (ValueError, OverflowError, RecursionError) as error:
        reason = " ".join(str(error).split())[:_LONGEST_REASON]
        raise ValueError(f"{path!r} cannot be read as {ending} ({reason})") from error


def _array(data: memoryview) -> np.ndarray:
    """An ``.npy`` file. Not `numpy.load`, which allocates what the header says before it looks for as many bytes."""
    stream = io.BytesIO(data)
    version = np.lib.format.read_magic(stream)
    if version not in _HEADERS:
        raise ValueError(f"version {version} of the format")
    try:
        shape, fortran_order, dtype = _HEADERS[version](stream)
    except Exception as error:  # a tokenizer and a parser of Python see the header, with errors of their own
        raise ValueError(f"header: {error}") from error
    if dtype.hasobject:
        raise ValueError("Python objects, which would have to be unpickled")
    values = np.frombuffer(data[stream.tell() :], dtype=dtype).copy()
    return values.reshape(shape[::-1]).T if fortran_order else values.reshape(shape)


def _text(data: memoryview) -> str:
    return str(data, "utf-8")


def _integer(data: memoryview) -> int:
    return int(bytes(data))


def _json(data: memoryview) -> Any:
    return json.loads(_text(data))


_DECODERS: dict[str, Callable[[memoryview], Any]] = {
    **dict.fromkeys(("txt", "text", "transcript"), _text),
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id"), _integer),
    **dict.fromkeys(("json", "jsn"), _json),
    "npy": _array,
}
