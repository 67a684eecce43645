"""Contenders that need libraries this project does not: `make bench-peers` gives them an environment of their own."""

from __future__ import annotations

from importlib.util import find_spec

_LIBRARIES = (
    *("array_record", "datasets", "grain", "litdata", "megatron", "PIL"),
    *("streaming", "torchdata", "webdataset"),
)


def installed() -> bool:
    """Whether all of them are there."""
    return not _missing()


def require() -> None:
    """See that all of them are there.

    Raises:
        ValueError: some are not; names them.
    """
    if missing := _missing():
        raise ValueError(f"needs {', '.join(missing)}; run make bench-peers")


def _missing() -> list[str]:
    return [name for name in _LIBRARIES if find_spec(name) is None]
