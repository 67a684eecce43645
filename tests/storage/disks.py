"""Small file systems that are really there."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

__all__ = ["tmpfs"]


@contextmanager
def tmpfs(mount: Path, options: str) -> Iterator[Path]:
    """Mount a file system in memory during a block; without the right to mount the test is skipped.

    Args:
        mount: Where; made.
        options: Such as ``size=8m``.
    """
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(mount)]
    if subprocess.run(command, capture_output=True, check=False, timeout=30).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    try:
        yield mount
    finally:
        subprocess.run(["umount", str(mount)], check=True, timeout=30)
