"""Samples from many sources become balanced, packed, per-rank microbatches.

>>> from omniload import DataLoader
>>> loader = DataLoader("mixture.yaml", dp_rank=0, dp_size=8)  # doctest: +SKIP
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omniload.client import MixtureLoader
    from omniload.mixture import Mixture
    from omniload.planner import Plan
    from omniload.runtime.chaos import Chaos
    from omniload.torch_loader.entry import DataLoader

__all__ = ["Chaos", "DataLoader", "Mixture", "MixtureLoader", "Plan"]

# Imported on first use: the client needs torch, which a command that only reads a mixture should not wait for.
_HOME = {
    "Chaos": "omniload.runtime.chaos",
    "DataLoader": "omniload.torch_loader.entry",
    "Mixture": "omniload.mixture",
    "MixtureLoader": "omniload.client",
    "Plan": "omniload.planner",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'omniload' has no attribute '{name}'")
