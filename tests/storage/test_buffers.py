"""Memory to read into."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from storage import Store
from storage.buffers import new_memory


def address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


@given(st.integers(0, 1 << 20))
def test_new_memory_is_writable_clear_and_as_large_as_asked_for(num_bytes: int) -> None:
    memory = new_memory(num_bytes)
    assert (memory.nbytes, memory.readonly, memory.format, memory.contiguous) == (num_bytes, False, "B", True)
    assert bytes(memory) == bytes(num_bytes)


def test_what_is_read_of_files_begins_with_a_page(tmp_path: Path) -> None:
    """The kernel copies it there much faster than to where ``malloc`` puts it."""
    (tmp_path / "file").write_bytes(bytes(range(256)) * 4096)
    for view in Store(str(tmp_path)).read_ranges([("file", 0, 1 << 20), ("file", 77, 77 + (64 << 10))]):
        assert address(view) % mmap.PAGESIZE == 0
        assert view[:3].tolist() in ([0, 1, 2], [77, 78, 79])
