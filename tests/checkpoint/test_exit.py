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
