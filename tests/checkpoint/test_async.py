"""Saves in the background: beside training, in memory that does not grow."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from checkpoint.boxes import Box
from checkpoint.engine.save import Saver
from tests.checkpoint.simulation import OPTIONS, captured, run_ranks
from tests.checkpoint.watched_store import WatchedStore


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a priority is that of the whole process")
@pytest.mark.parametrize("background", [True, False])
def test_only_saves_in_the_background_yield_the_cores(background: bool, tmp_path: Path) -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    seen = set()

    def hook(point: str) -> None:
        if "data" in point:
            seen.add(niceness())

    mine = captured({"t": torch.ones(3)}, {"t": [[Box((0,), (3,))]]}, 0)
    store = WatchedStore(str(tmp_path), hook)
    run_ranks(1, lambda one: Saver(one).save(store, lambda: mine, OPTIONS, background=background).result(20))
    assert seen == {19 if background else niceness()}


def test_memory_is_flat_over_fifty_saves(tmp_path: Path) -> None:
    """Of a state of 16 MiB, two in flight at a time: after the tenth the process grows by less than half of that."""
    script = f"""
import os, torch, checkpoint
state = {{"model": {{f"w{{i}}": torch.randn(1 << 18) for i in range(16)}}}}
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
handles = []
for step in range(50):
    handles.append(checkpoint.async_save({str(tmp_path)!r} + f"/{{step % 3}}", state, step=step, overwrite=True))
    if step == 10:
        early = resident()
for handle in handles:
    handle.result()
print(early, resident(), max(handle.result().step for handle in handles))
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
    )
    early, late, last = map(int, ended.stdout.split())
    assert last == 49
    assert late - early < 8 << 20
