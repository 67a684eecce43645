"""A process may end whatever its loader is doing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.omniload.mixtures import token_rows, write_parquet

SCRIPT = """
import atexit, sys, threading
def left():
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("omniload")]
    print(before, names)
atexit.register(left)  # registered first, so it runs last
from omniload import DataLoader
loader = DataLoader({mixture}, prefetch_steps=50)
next(iter(loader))
before = [thread.name for thread in threading.enumerate() if thread.name in ("omniload-plan", "omniload-build")]
"""


def test_a_loader_that_nobody_closed_has_ended_its_threads_before_the_interpreter_ends(
    tmp_path: Path,
) -> None:
    """Else they would come back from native code while it is torn down, which may abort the process."""
    write_parquet(tmp_path / "data.parquet", token_rows(0, 2000, 60))
    mixture = {
        "seq_len": 512,
        "packs": 16,
        "execution": "inline",
        "sources": {"a": {"path": str(tmp_path / "data.parquet"), "weight": 1, "on_exhausted": "repeat"}},
    }
    script = SCRIPT.replace("{mixture}", json.dumps(mixture))
    for _ in range(3):
        ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
        assert (ended.returncode, ended.stderr) == (0, "")
        assert ended.stdout == "['omniload-plan', 'omniload-build'] []\n"


HANGING = """
import threading
import torch.utils.data
from omniload import DataLoader
from omniload.errors import LoaderTimeout
class Hanging(torch.utils.data.Dataset):
    def __len__(self):
        return 10_000
    def __getitem__(self, index):
        if index >= 600:
            threading.Event().wait()
        return {"input_ids": [index] * 8}
mixture = {
    "seq_len": 8,
    "packs": 1,
    "shuffle": "none",
    "execution": "inline",
    "sources": {"a": {"dataset": Hanging(), "weight": 1}},
}
loader = DataLoader(mixture, timeout_s=TIMEOUT)
"""


def with_a_read_that_hangs(timeout_s: int, script: str) -> subprocess.CompletedProcess[str]:
    """What a process came to that runs a script with a ``loader`` whose reads hang after a while."""
    whole = HANGING.replace("TIMEOUT", str(timeout_s)) + script
    return subprocess.run([sys.executable, "-c", whole], capture_output=True, text=True, timeout=120)


def test_a_process_ends_after_a_read_that_hangs() -> None:
    script = """
try:
    for step in loader:
        pass
except LoaderTimeout:
    print("timed out")
"""
    ended = with_a_read_that_hangs(1, script)
    assert (ended.returncode, ended.stdout) == (0, "timed out\n")
    assert "the process ends while these threads still run: omniload-read" in ended.stderr


def test_a_loader_is_closed_at_once_whatever_time_a_read_may_still_take() -> None:
    """As by a keyboard interrupt inside of a ``with`` block."""
    script = """
import signal
def interrupt(*_):
    raise KeyboardInterrupt
signal.signal(signal.SIGALRM, interrupt)
signal.alarm(3)
try:
    with loader:
        for step in loader:
            pass
except KeyboardInterrupt:
    print("closed")
"""
    ended = with_a_read_that_hangs(3600, script)
    assert (ended.returncode, ended.stdout) == (0, "closed\n")
