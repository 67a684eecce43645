"""The public surface."""

from __future__ import annotations

import subprocess
import sys

import checkpoint


def test_all_is_sorted_and_complete() -> None:
    assert checkpoint.__all__ == sorted(checkpoint.__all__)
    assert set(checkpoint.__all__) == {
        "CheckpointManager",
        "FlatShard",
        "KeepBest",
        "LazyCheckpoint",
        "LazyTensor",
        "LoadReport",
        "SaveHandle",
        "SaveReport",
        "async_save",
        "flat_shards",
        "load",
        "open_checkpoint",
        "save",
    }
    for name in checkpoint.__all__:
        assert getattr(checkpoint, name).__name__ == name


def test_importing_the_package_imports_no_torch() -> None:
    code = "import checkpoint, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_listing_needs_no_torch() -> None:
    code = "import checkpoint.cli, checkpoint.verify, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
