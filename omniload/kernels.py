"""The compiled loops, where a C compiler was there at installation. Without them Python does the same, slower."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType


def _load() -> ModuleType | None:
    # They check what they are given by assertions, and read what is stored as it is.
    if sys.flags.optimize or sys.byteorder != "little":
        return None
    try:
        return importlib.import_module("omniload._kernels")
    except ImportError:
        return None


KERNELS: ModuleType | None = _load()
"""`omniload._kernels`, or None."""
