"""The lock between processes: one at a time, never for ever."""

import subprocess
import sys
from pathlib import Path

from storage.file_lock import locked


def test_one_at_a_time(tmp_path: Path) -> None:
    with locked(tmp_path / "lock", 0) as first:
        assert first is not None
        with locked(tmp_path / "lock", 0.05) as second:
            assert second is None
        with locked(tmp_path / "other", 0) as other:
            assert other is not None
    with locked(tmp_path / "lock", 0) as again:
        assert again is not None


def test_a_dead_holder_frees_it(tmp_path: Path) -> None:
    script = f"""
from pathlib import Path
from storage.file_lock import locked
with locked(Path({str(tmp_path)!r}) / "lock", 0) as fd:
    assert fd is not None
    print("held", flush=True)
    input()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        assert process.stdout.readline() == "held\n"
        with locked(tmp_path / "lock", 0.05) as fd:
            assert fd is None
        process.kill()
        process.wait(30)
    with locked(tmp_path / "lock", 0) as fd:
        assert fd is not None


def test_a_child_that_shares_the_descriptor_does_not_keep_it(tmp_path: Path) -> None:
    with locked(tmp_path / "lock", 0) as fd:
        assert fd is not None
        child = subprocess.Popen(["sleep", "60"], pass_fds=[fd])
    try:
        with locked(tmp_path / "lock", 0) as again:
            assert again is not None
    finally:
        child.kill()
        child.wait(30)


def test_where_no_lock_can_be_made_there_is_none(tmp_path: Path) -> None:
    with locked(tmp_path / "missing" / "lock", 0) as fd:
        assert fd is None
