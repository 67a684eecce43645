"""Payload files: safetensors with a reserved header, boxes by falling element size, compressed ones last, no holes.

Offsets in the tables count from the start of the file; those in the safetensors header count, as that format
wants it, from the end of the header.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from checkpoint.boxes import Box
from checkpoint.errors import FormatError, StateError
from checkpoint.format.codec import CODEC_NONE
from checkpoint.format.dtypes import DType

HEADER_ALIGN: Final = 4096
"""Payload data starts at a multiple of this, normally at the first one."""

MAX_ENTRIES: Final = 100_000
"""Most boxes in one payload file."""

MAX_HEADER_BYTES: Final = 100_000_000
"""Largest header that safetensors accepts."""

_GROUP: Final = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,99})")
_FILE: Final = re.compile(
    r"(?P<group>[A-Za-z0-9_][A-Za-z0-9_.-]{0,99})-(?P<rank>\d{5,9})-(?P<index>\d{3,9})\.safetensors"
)
_METADATA: Final = {"format": "pt"}  # lets other readers of safetensors open the file as torch tensors


def check_group(group: str) -> None:
    """Check that a top-level name of the state can be part of a file name.

    Raises:
        StateError: It cannot.
    """
    if not _GROUP.fullmatch(group):
        raise StateError(
            f"state key {group!r} cannot name files; "
            "use letters, digits, '_', '.' and '-', at most 100, not beginning with '.' or '-'"
        )


def file_name(group: str, rank: int, index: int) -> str:
    """Name of payload file ``index`` that ``rank`` writes for ``group``."""
    return f"{group}-{rank:05d}-{index:03d}.safetensors"


def is_file_name(name: str) -> bool:
    """Whether a name is one that :func:`file_name` makes; in particular it then has no directory part."""
    return _FILE.fullmatch(name) is not None


def entry_name(key: str, shape: Sequence[int], box: Box) -> str:
    """Name of a box in its payload file.

    The key itself when the box is the whole tensor, else ``key#o0,o1:l0,l1``. ``%``, ``#`` and a leading ``__`` of
    the key are percent-escaped.
    """
    name = key.replace("%", "%25").replace("#", "%23")
    if name.startswith("__"):
        name = "%5F%5F" + name[2:]
    if box.lengths == tuple(shape):
        return name
    return f"{name}#{','.join(map(str, box.offsets))}:{','.join(map(str, box.lengths))}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A box in a payload file.

    Attributes:
        name: See :func:`entry_name`.
        dtype: Element type.
        lengths: Extent of the box, elements.
        codec: How its bytes are stored.
    """

    name: str
    dtype: DType
    lengths: tuple[int, ...]
    codec: str

    @property
    def num_bytes(self) -> int:
        """Size of its elements, bytes."""
        return math.prod(self.lengths) * self.dtype.itemsize


def header_room(names: Iterable[tuple[str, int]]) -> int:
    """Bytes to reserve so that the header fits whatever the sizes of the boxes will be.

    Args:
        names: Name and number of dimensions of each entry.
    """
    # Per entry: the escaped name, up to 20 digits for each length and offset, and the fixed text around them.
    worst = 64 + sum(len(json.dumps(name)) + 21 * num_dims + 96 for name, num_dims in names)
    return -(-worst // HEADER_ALIGN) * HEADER_ALIGN


def encode_header(entries: Sequence[Entry], ends: Sequence[int], header_bytes: int) -> bytes:
    """The header of a payload file, padded with spaces to ``header_bytes``.

    Args:
        entries: The boxes, in the order of their bytes, which follow each other without holes.
        ends: Where the stored bytes of each end, counted from the end of the header.
        header_bytes: Reserved by :func:`header_room`.
    """
    document: dict[str, Any] = {"__metadata__": _METADATA}
    begin = 0
    for entry, end in zip(entries, ends, strict=True):
        native = entry.dtype.safetensors if entry.codec == CODEC_NONE else None
        document[entry.name] = {
            "dtype": native or "U8",
            "shape": list(entry.lengths) if native else [end - begin],
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(document, separators=(",", ":")).encode()
    assert len(text) + 8 <= header_bytes, "header_room is too small"
    return struct.pack("<Q", header_bytes - 8) + text.ljust(header_bytes - 8)


def decode_header(data: bytes, where: str) -> dict[str, dict[str, Any]]:
    """Entries of a payload file by name, as its header gives them.

    Raises:
        FormatError: Not the header of a safetensors file of exactly ``len(data)`` bytes.
    """
    if len(data) < 8 or struct.unpack("<Q", data[:8])[0] != len(data) - 8:
        raise FormatError(f"{where}: its safetensors header is not {len(data)} bytes long")
    try:
        document = json.loads(data[8:])
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where}: its safetensors header is not JSON ({error})") from None
    if not isinstance(document, dict) or not all(isinstance(entry, dict) for entry in document.values()):
        raise FormatError(f"{where}: its safetensors header is not an object of objects")
    document.pop("__metadata__", None)
    return document
