"""Reads a checkpoint knowing nothing of this project: only the format, with pyarrow, json and numpy.

Kept below a hundred lines as a proof that the format is what its specification says.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

_NUMPY = {
    "bool": "?",
    "uint8": "u1",
    "int8": "i1",
    "uint16": "u2",
    "int16": "i2",
    "uint32": "u4",
    "int32": "i4",
    "uint64": "u8",
    "int64": "i8",
    "float16": "f2",
    "float32": "f4",
    "float64": "f8",
    "complex64": "c8",
    "complex128": "c16",
}
_OPAQUE = {"bfloat16": 2, "complex32": 4}  # numpy lacks them (and all of the 8-bit floats): raw bytes


def read_tensors(directory: Path) -> dict[tuple[str, str], np.ndarray[Any, Any]]:
    """All tensors by (group, key), little-endian; what numpy has no type for comes as raw bytes of that size."""
    manifest = json.loads((directory / "manifest.json").read_text())
    assert manifest["format"] == "omniload.checkpoint"
    assert manifest["version"] == 1
    data = directory / "data" / manifest["attempt"]
    tensors, shards, stored, files = (
        pq.read_table(data / f"{name}.parquet").to_pylist()
        for name in ("tensors", "shards", "stored", "files")
    )
    found = {}
    for tensor in tensors:
        name = tensor["dtype"]
        dtype = np.dtype(f"<{_NUMPY[name]}" if name in _NUMPY else f"V{_OPAQUE.get(name, 1)}")
        found[tensor["tensor_id"]] = np.zeros(tensor["shape"], dtype)
    for shard, where in zip(shards, stored, strict=True):
        target = found[shard["tensor_id"]]
        with (data / files[where["file_id"]]["path"]).open("rb") as file:
            file.seek(where["byte_offset"])
            raw = file.read(where["stored_bytes"])
        if where["codec"] != "none":
            num_bytes = math.prod(shard["lengths"]) * target.itemsize
            raw = _decompressed(where["codec"], raw, where["piece_bytes"], num_bytes, target.itemsize)
        box = tuple(slice(at, at + n) for at, n in zip(shard["offsets"], shard["lengths"], strict=True))
        target[box] = np.frombuffer(raw, target.dtype).reshape(shard["lengths"])
    return {(tensor["group"], tensor["key"]): found[tensor["tensor_id"]] for tensor in tensors}


def _decompressed(codec: str, stored: bytes, sizes: list[int], num_bytes: int, itemsize: int) -> bytes:
    """A box from its compressed pieces, each of the byte planes of 1 MiB of elements."""
    assert codec == "zstd"
    pieces, begin, left = [], 0, num_bytes
    for size in sizes:
        content = pa.decompress(stored[begin : begin + size], min(left, 1 << 20), codec="zstd", asbytes=True)
        pieces.append(np.frombuffer(content, np.uint8).reshape(itemsize, -1).T.tobytes())
        begin, left = begin + size, left - len(content)
    assert (begin, left) == (len(stored), 0)
    return b"".join(pieces)
