"""What several of the demo's tests share."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small standard library: a package, a few modules, one of them large, and files to leave out."""
    source, target = Path(sysconfig.get_path("stdlib")), tmp_path_factory.mktemp("library")
    shutil.copytree(source / "json", target / "json", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("textwrap.py", "optparse.py", "heapq.py", "bisect.py", "fractions.py"):
        shutil.copy(source / name, target / name)
    (target / "test").mkdir()
    (target / "test" / "test_left_out.py").write_text('"""Tests are no training text."""\n' * 40)
    (target / "latin.py").write_bytes(b"# caf\xe9\n" * 100)
    (target / "broken.py").write_text("def broken(:\n" * 100)
    return target
