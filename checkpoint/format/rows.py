"""Tensors and files of a checkpoint: of these there are few enough to be objects."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorRow:
    """A stored global tensor.

    Attributes:
        group: Top-level name in the state.
        key: Name inside the group.
        dtype: Name of the element type.
        shape: Global shape.
        num_bytes: Size of all its elements, bytes.
    """

    group: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRow:
    """A payload file.

    Attributes:
        path: Name inside the attempt's directory.
        num_bytes: Size of the file, header included.
        header_bytes: Where the data starts.
        header_xxh3: xxh3-64 of the header.
    """

    path: str
    num_bytes: int
    header_bytes: int
    header_xxh3: int
