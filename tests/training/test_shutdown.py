"""How the trainer's process ends."""

from __future__ import annotations

import subprocess
import sys

import pytest


def end(script: str) -> subprocess.CompletedProcess[str]:
    script += "\nfrom training.shutdown import run_process\nrun_process(main)\n"
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)


def test_the_interpreter_is_not_torn_down() -> None:
    """Threads of gloo may still need it."""
    ended = end(
        """
import os
class Last:
    def __init__(self):
        self.write = os.write
    def __del__(self):
        self.write(1, b"torn down")
last = Last()
def main():
    return 0
"""
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


@pytest.mark.parametrize("code", [0, 2])
def test_the_exit_code_is_that_of_main_and_nothing_printed_is_lost(code: int) -> None:
    ended = end(f"def main():\n    print('said', end='')\n    return {code}")
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, "said", "")


def test_an_error_is_told_and_ends_the_process_with_code_1() -> None:
    ended = end("def main():\n    raise LookupError('gone')")
    assert ended.returncode == 1
    assert ended.stderr.startswith("Traceback")
    assert ended.stderr.endswith("LookupError: gone\n")


def test_handlers_run_after_the_threads_that_are_awaited() -> None:
    ended = end(
        """
import atexit, threading, time
def main():
    atexit.register(print, "handler")
    threading.Thread(target=lambda: (time.sleep(0.3), print("thread"))).start()
    return 0
"""
    )
    assert (ended.returncode, ended.stdout.split()) == (0, ["thread", "handler"])
