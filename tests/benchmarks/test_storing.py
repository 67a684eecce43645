"""The bare loops move every byte, and ranges to read never touch each other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from benchmarks.storing import raw
from benchmarks.storing.s3 import spread

MIB = 1 << 20


@pytest.mark.parametrize("num_threads", [0, 3])
def test_loops_move_every_byte(tmp_path: Path, num_threads: int):
    contents = [memoryview(np.random.default_rng(i).bytes(9 * MIB + i)) for i in range(4)]
    pool = ThreadPoolExecutor(num_threads) if num_threads else None
    assert raw.write_files(tmp_path, contents, pool) == sum(content.nbytes for content in contents)
    for i, content in enumerate(contents):
        into = memoryview(bytearray(content.nbytes))
        assert raw.read_into(tmp_path / f"{i}", into, pool) == content.nbytes
        assert into == content
    if pool:
        pool.shutdown()


def test_ranges_are_shuffled_and_lie_apart():
    ranges = spread("x", 64 * MIB, MIB, np.random.default_rng(0))
    assert sorted(ranges.starts) == list(range(0, 64 * MIB, 2 * MIB))
    assert list(ranges.starts) != sorted(ranges.starts)
    assert ranges.num_bytes == 32 * MIB
    assert [view.nbytes for view in ranges.into] == [MIB] * 32
