"""Naming tensors by patterns, the same way in every argument that does."""

from __future__ import annotations

from fnmatch import fnmatchcase


def fits(pattern: str, group: str, key: str) -> bool:
    """Whether a pattern names a tensor.

    A pattern without ``/`` names groups (``"model"``), one with ``/`` tensors whose ``group/key`` it matches as a shell
    pattern whose ``*`` crosses every separator (``"optimizer/*exp_avg*"``).
    """
    return fnmatchcase(f"{group}/{key}" if "/" in pattern else group, pattern)
