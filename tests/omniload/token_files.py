"""Small writers of Megatron and MDS datasets, for tests that need other bytes than the real tools write."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import storage

_CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}


def megatron_index(
    lengths: Sequence[int],
    *,
    dtype: str = "uint16",
    bounds: Sequence[int] | None = None,
    pointers: Sequence[int] | None = None,
    modes: Sequence[int] | None = None,
) -> bytes:
    """The ``.idx`` of sequences of these lengths, by default of one document each and side by side."""
    sizes = np.asarray(lengths, dtype=np.int64) * np.dtype(dtype).itemsize
    bounds = range(len(lengths) + 1) if bounds is None else bounds
    parts = [
        struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, _CODES[dtype], len(lengths), len(bounds)),
        np.asarray(lengths, dtype="<i4").tobytes(),
        np.asarray(np.cumsum(sizes) - sizes if pointers is None else pointers, dtype="<i8").tobytes(),
        np.asarray(bounds, dtype="<i8").tobytes(),
        b"" if modes is None else np.asarray(modes, dtype=np.int8).tobytes(),
    ]
    return b"".join(parts)


def put_megatron(
    store: storage.Store, path: str, documents: Sequence[Sequence[int]], dtype: str = "uint16"
) -> None:
    """Write ``path.idx`` and ``path.bin``."""
    store.write(f"{path}.idx", megatron_index([len(document) for document in documents], dtype=dtype))
    tokens = np.concatenate([np.asarray(document, dtype=dtype) for document in ((), *documents)])
    store.write(f"{path}.bin", tokens.tobytes())


def mds_shard(samples: Sequence[Sequence[bytes]], sizes: Sequence[int | None]) -> bytes:
    """A shard of encoded samples, whose columns have these sizes."""
    encoded = []
    for sample in samples:
        head = [len(value) for value, size in zip(sample, sizes, strict=True) if size is None]
        encoded.append(np.array(head, dtype="<u4").tobytes() + b"".join(sample))
    config = b"{}"  # which readers pass over
    ends = np.cumsum([8 + 4 * len(encoded) + len(config), *map(len, encoded)])
    return struct.pack("<I", len(encoded)) + ends.astype("<u4").tobytes() + config + b"".join(encoded)


def mds_index(shards: Sequence[Mapping[str, Any]]) -> bytes:
    """An ``index.json``."""
    return json.dumps({"version": 2, "shards": list(shards)}).encode()


def mds_entry(
    basename: str,
    columns: Mapping[str, tuple[str, int | None]],
    num_samples: int,
    num_bytes: int,
    **keys: object,
) -> dict[str, Any]:
    """What an index says of a shard; columns are by name, with encoding and size."""
    return {
        "column_names": list(columns),
        "column_encodings": [encoding for encoding, _ in columns.values()],
        "column_sizes": [size for _, size in columns.values()],
        "compression": None,
        "format": "mds",
        "hashes": [],
        "raw_data": {"basename": basename, "bytes": num_bytes, "hashes": {}},
        "samples": num_samples,
        "size_limit": 1 << 26,
        "version": 2,
        "zip_data": None,
        **keys,
    }


def put_mds(
    store: storage.Store,
    path: str,
    columns: Mapping[str, tuple[str, int | None]],
    samples: Sequence[Sequence[bytes]],
    shard_samples: int = 10,
) -> None:
    """Write a dataset in a folder."""
    entries = []
    for number, start in enumerate(range(0, len(samples), shard_samples)):
        part = samples[start : start + shard_samples]
        data = mds_shard(part, [size for _, size in columns.values()])
        name = f"shard.{number:05}.mds"
        store.write(f"{path}/{name}", data)
        entries.append(mds_entry(name, columns, len(part), len(data)))
    store.write(f"{path}/index.json", mds_index(entries))
