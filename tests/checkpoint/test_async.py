"""Saves in the background: beside training, in memory that does not grow."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import checkpoint
from checkpoint.boxes import Box
from checkpoint.engine.coordination import Coordinator
from checkpoint.engine.save import Saver
from checkpoint.handle import SaveHandle
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

    def save(coordinator: Coordinator) -> None:
        handle = Saver(coordinator).save(store, lambda: mine, OPTIONS, background=background)
        until = time.monotonic() + 20
        while not handle.done():  # result() would end the yielding
            assert time.monotonic() < until, "the save is not done after 20 s"
            time.sleep(0.01)
        handle.result(20)

    run_ranks(1, save)
    assert seen == {19 if background else niceness()}


@pytest.mark.parametrize("waits", ["result", "wait", "a third save"])
def test_who_waits_for_a_save_ends_its_yielding(waits: str, tmp_path: Path) -> None:
    """The first save goes on only when it knows of that; until then it holds its staging memory."""
    handles: list[SaveHandle] = []
    told = []
    begun = threading.Event()

    def hook(point: str) -> None:
        if point.startswith("before data") and not told:
            begun.wait(20)
            told.append(handles[0].awaited.wait(20))

    mine = captured({"t": torch.ones(3)}, {"t": [[Box((0,), (3,))]]}, 0)

    def save(coordinator: Coordinator) -> None:
        saver = Saver(coordinator)

        def begin() -> None:
            store = WatchedStore(tmp_path / str(len(handles)), hook)
            handles.append(saver.save(store, lambda: mine, OPTIONS, background=True))

        begin()
        begin()
        assert not handles[0].awaited.is_set()
        begun.set()
        if waits == "result":
            handles[0].result(40)
        elif waits == "wait":
            saver.wait(40)
        else:
            begin()
            assert told == [True]
        saver.wait(40)

    run_ranks(1, save)
    assert told == [True]


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


def test_saves_and_reads_do_not_follow_the_default_device(tmp_path: Path) -> None:
    """As where a model is built under ``torch.device("meta")``, or ``set_default_device("cuda")`` was called."""
    value = torch.arange(12.0).view(3, 4)
    state = {"extra": {"flat": value, "strided": value.t(), "short": value[:, :2]}}
    with torch.device("meta"):
        checkpoint.async_save(tmp_path / "a", state).result()
        checkpoint.save(tmp_path / "b", state)
        for name in ("a", "b"):
            stored = checkpoint.open_checkpoint(tmp_path / name)
            assert torch.equal(stored["extra/strided"][...], value.t())
        live = {"extra": {key: torch.zeros_like(one, device="cpu") for key, one in state["extra"].items()}}
        checkpoint.load(tmp_path / "a", live)
    assert torch.equal(live["extra"]["short"], value[:, :2])
