"""What happens to saves when the process ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_no_thread_outlives_the_exit_handlers(tmp_path: Path) -> None:
    """One that let go of its connection to the c10d store during the interpreter's end would abort the process."""
    script = f"""
import atexit, threading
def left():
    names = [thread.name for thread in threading.enumerate()]
    print("threads", names.count("checkpoint-save"))
atexit.register(left)  # registered first, so it runs last
import torch, checkpoint
checkpoint.async_save({str(tmp_path / "a")!r}, {{"extra": {{"x": torch.ones(3)}}}})
print("threads", [thread.name for thread in threading.enumerate()].count("checkpoint-save"))
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
    )
    assert ended.stdout.split("\n")[:2] == ["threads 1", "threads 0"]
    assert (tmp_path / "a/manifest.json").exists()


def test_a_forked_child_neither_waits_for_the_saves_of_its_parent_nor_lacks_threads_for_its_own(
    tmp_path: Path,
) -> None:
    """As a worker of a torch DataLoader that starts while a save is in flight."""
    script = f"""
import multiprocessing, threading
import torch, checkpoint
from checkpoint.engine import save
state = {{"extra": {{"x": torch.ones(3)}}}}
written, write_files = threading.Event(), save.write_files
def slow(*args, **kwargs):
    assert written.wait(60)
    return write_files(*args, **kwargs)
save.write_files = slow
handle = checkpoint.async_save({str(tmp_path / "a")!r}, state)
def child():
    save.write_files = write_files
    checkpoint.async_save({str(tmp_path / "b")!r}, state).result(30)
process = multiprocessing.get_context("fork").Process(target=child)
process.start()
process.join(30)
print(process.exitcode)
written.set()
handle.result()
process.kill()
"""
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert (ended.stdout, ended.stderr) == ("0\n", "")
    assert (tmp_path / "a/manifest.json").exists()
    assert (tmp_path / "b/manifest.json").exists()
