"""Memory shared between processes: whoever cannot get at it, for whatever reason, is told so and goes on without."""

from __future__ import annotations

import gc
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from checkpoint.engine.segment import NOWHERE, Segment, this_machine

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="anonymous files are of Linux")

_MAKE = """
import sys, time
from checkpoint.engine.segment import Segment, this_machine
made = Segment.make(10_000)
made.memory[:] = 7
sys.stdout.buffer.write(made.address(this_machine()))
sys.stdout.flush()
time.sleep(120)
"""


@contextmanager
def made_elsewhere() -> Iterator[tuple[subprocess.Popen[bytes], bytes]]:
    """A process that holds a segment, and the address of that."""
    here = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", _MAKE], stdout=subprocess.PIPE, cwd=here) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.read(len(NOWHERE))
            assert len(address) == len(NOWHERE)
            yield process, address
        finally:
            process.kill()


def replaced(address: bytes, index: int, value: object) -> bytes:
    """An address with another machine (0), process (1), file (2), size (3) or token (4)."""
    layout = struct.Struct("<32sqqq16s")
    fields = list(layout.unpack(address))
    fields[index] = value
    return layout.pack(*fields)


def test_it_outlives_its_maker_and_then_leaves_nothing() -> None:
    """Killed, the maker can clean up nothing; the memory goes with the last process that sees it."""
    gc.collect()  # of earlier tests, what errors hold on to
    names = set(Path("/dev/shm").iterdir())
    with made_elsewhere() as (process, address):
        segment = Segment.attach(address, this_machine())
        assert segment is not None
        assert segment.memory.tolist() == [7] * 10_000
        process.kill()
        process.wait(60)
    segment.memory[5] = 8
    assert segment.memory[4:7].tolist() == [7, 8, 7]
    assert "omniload-checkpoint" in Path("/proc/self/maps").read_text()
    assert Segment.attach(address, this_machine()) is None, "nobody else gets at it any more"
    del segment
    assert "omniload-checkpoint" not in Path("/proc/self/maps").read_text()
    assert not {path for path in set(Path("/dev/shm").iterdir()) - names if "omniload" in path.name}


def test_what_is_not_the_segment_is_refused_unopened() -> None:
    segment = Segment.make(100)
    assert segment is not None
    machine = this_machine()
    address = segment.address(machine)
    attached = Segment.attach(address, machine)
    assert attached is not None
    attached.memory[:] = np.arange(100)
    assert np.array_equal(segment.memory, attached.memory)

    assert Segment.attach(NOWHERE, machine) is None
    assert Segment.attach(replaced(address, 0, b"another"), machine) is None
    assert Segment.attach(replaced(address, 2, 10_000), machine) is None
    # As another process of that number would have it, which has other files open, or a segment of another load.
    with tempfile.TemporaryFile() as file:
        assert Segment.attach(replaced(address, 2, file.fileno()), machine) is None
    read, write = os.pipe()
    assert Segment.attach(replaced(address, 2, read), machine) is None
    os.close(read)
    os.close(write)
    assert Segment.attach(replaced(address, 3, 1 << 20), machine) is None
    assert Segment.attach(replaced(address, 4, bytes(16)), machine) is None
    segment.close()
    assert Segment.attach(address, machine) is None


def test_a_process_that_may_not_have_one_goes_without(monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    files = set(Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        assert Segment.make(1 << 20) is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert set(Path("/proc/self/fd").iterdir()) == files
    monkeypatch.delattr(os, "memfd_create")
    assert Segment.make(100) is None
