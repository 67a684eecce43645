"""Training state to and from a parallelism-agnostic format.

>>> import checkpoint
>>> checkpoint.save("runs/x/step-100", {"model": model, "optimizer": optimizer, "extra": {"step": 100}})
>>> checkpoint.load("runs/x/step-100", {"model": model, "optimizer": optimizer, "extra": extra})

Names load on first use, so that importing the package does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from checkpoint.api import async_save, load, save
    from checkpoint.engine.load import LoadReport
    from checkpoint.frameworks.shards import FlatShard, flat_shards
    from checkpoint.handle import SaveHandle, SaveReport
    from checkpoint.lazy import LazyCheckpoint, LazyTensor, open_checkpoint
    from checkpoint.manager import CheckpointManager
    from checkpoint.retention import KeepBest

__all__ = [
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
]

_HOME = {
    "CheckpointManager": "checkpoint.manager",
    "FlatShard": "checkpoint.frameworks.shards",
    "KeepBest": "checkpoint.retention",
    "LazyCheckpoint": "checkpoint.lazy",
    "LazyTensor": "checkpoint.lazy",
    "LoadReport": "checkpoint.engine.load",
    "SaveHandle": "checkpoint.handle",
    "SaveReport": "checkpoint.handle",
    "async_save": "checkpoint.api",
    "flat_shards": "checkpoint.frameworks.shards",
    "load": "checkpoint.api",
    "open_checkpoint": "checkpoint.lazy",
    "save": "checkpoint.api",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'checkpoint' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
