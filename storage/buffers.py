"""Views of memory as flat bytes, without copies; and memory to read into."""

import ctypes
import mmap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, TypeAlias

from storage.errors import BadRequest

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "ALIGNED_BYTES",
    "Data",
    "as_bytes",
    "as_views",
    "new_memory",
    "num_bytes_of",
    "readable_view",
    "split",
    "writable_view",
]

Data: TypeAlias = "Buffer | Sequence[Buffer]"
"""The content of an object: one C-contiguous buffer, or several that follow each other."""

ALIGNED_BYTES: Final = 32 << 10
"""Smaller memory may begin anywhere."""


def new_memory(num_bytes: int) -> memoryview:
    """Writable zeroed memory to read into, that begins with a page unless it is small.

    Large memory as ``malloc`` gives it begins 16 bytes behind a page, and files are mostly read from the beginning of
    one. AMD's processors with fast short copies (``fsrm``) take four times as long for a ``rep movsb``, by which the
    kernel copies, to a place up to 31 bytes behind its source, both counted from their pages.
    """
    if num_bytes < ALIGNED_BYTES:
        return memoryview(bytearray(num_bytes))
    memory = bytearray(num_bytes + mmap.PAGESIZE)
    begin = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % mmap.PAGESIZE
    return memoryview(memory)[begin : begin + num_bytes]


def readable_view(buffer: "Buffer") -> memoryview:
    """A flat view of any C-contiguous buffer as unsigned bytes.

    Raises:
        BadRequest: The object has no such buffer.
    """
    try:
        view = memoryview(buffer)
        # A view with a zero in its shape cannot be cast, and there is nothing to see in it.
        return view.cast("B") if view.nbytes else memoryview(b"")
    except TypeError as error:
        raise BadRequest(
            f"{type(buffer).__name__} is not a C-contiguous buffer of plain numbers: {error}"
        ) from error


def writable_view(buffer: "Buffer", num_bytes: int) -> memoryview:
    """A flat writable view that has exactly ``num_bytes`` bytes.

    Raises:
        BadRequest: The buffer is read-only, not contiguous or of another size.
    """
    view = readable_view(buffer)
    if view.nbytes != num_bytes:
        raise BadRequest(f"buffer of {view.nbytes} bytes for a range of {num_bytes}: make them equal")
    if view.readonly and num_bytes:
        raise BadRequest(f"buffer of {num_bytes} bytes is read-only: pass a bytearray or a writable array")
    return view


def as_views(data: Data) -> list[memoryview]:
    """The flat, non-empty byte views that ``data`` consists of, in order."""
    buffers = data if isinstance(data, list | tuple) else [data]
    return [view for view in map(readable_view, buffers) if view.nbytes]


def num_bytes_of(views: Sequence[memoryview]) -> int:
    """Total size of flat byte views."""
    return sum(view.nbytes for view in views)


def as_bytes(views: Sequence[memoryview]) -> bytes:
    """One bytes object with everything in it (copies, unless it is a whole bytes object already)."""
    if len(views) == 1 and isinstance(views[0].obj, bytes) and len(views[0].obj) == views[0].nbytes:
        return views[0].obj
    return b"".join(views)


def split(views: Sequence[memoryview], piece_bytes: int) -> list[list[memoryview]]:
    """Cut a sequence of views into pieces of exactly ``piece_bytes`` bytes (the last one may be shorter).

    No bytes are copied: each piece is a list of views.
    """
    pieces: list[list[memoryview]] = []
    room = 0
    for view in views:
        begin = 0
        while begin < view.nbytes:
            if not room:
                pieces.append([])
                room = piece_bytes
            taken = view[begin : begin + room]
            pieces[-1].append(taken)
            begin += taken.nbytes
            room -= taken.nbytes
    return pieces
