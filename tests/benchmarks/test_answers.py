"""What ranks that are separate programs say to the benchmark that started them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.running.ranks import answer

TALKS = "import sys; print('one\\ntwo', flush=True); sys.stdin.read()"


def test_lines_said_at_once_are_heard_in_turn_and_silence_and_the_end_are_told():
    with subprocess.Popen(
        [sys.executable, "-c", TALKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    ) as process:
        assert [answer(process), answer(process)] == ["one", "two"]
        with pytest.raises(TimeoutError, match=r"a rank said nothing for 0\.1 s"):
            answer(process, timeout_s=0.1)
        assert process.stdin is not None
        process.stdin.close()
        with pytest.raises(RuntimeError, match="a rank ended with exit code 0"):
            answer(process)
