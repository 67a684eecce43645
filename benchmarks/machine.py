"""What a number was measured on."""

from __future__ import annotations

import os
import platform
import tempfile
from importlib import metadata
from pathlib import Path

_LIBRARIES = (
    *("numpy", "omniload", "pyarrow", "safetensors", "tokenizers", "torch", "xxhash"),
    *("array-record", "datasets", "grain", "litdata", "megatron-core", "mosaicml-streaming"),
    *("pillow", "torchdata", "webdataset"),
)
"""What contends or is underneath; not all are installed everywhere."""


def describe(directory: Path) -> dict[str, object]:
    """The machine as JSON-serialisable values.

    Args:
        directory: where the benchmarks put their files; its filesystem is named.

    Returns:
        ``cpu``, ``cores`` (that this process may use), ``memory_bytes``, ``load_average`` (runnable processes over
        the last minute, before the run: above 0.5 the machine is not quiet), ``system``, ``kernel``, ``python``,
        ``libraries`` (name to version) and ``filesystem``.
    """
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.machine()}",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "libraries": {name: version for name in _LIBRARIES if (version := _version(name))},
        "filesystem": _filesystem(directory),
    }


def memory_filesystem() -> Path:
    """A directory in memory where the system has one, so that a disk's moods stay out of the numbers."""
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _version(library: str) -> str | None:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


def _filesystem(directory: Path) -> str:
    """Type of the filesystem that holds ``directory``: that of the longest mount point above it."""
    mounts = Path("/proc/mounts")
    if not mounts.exists():
        return "unknown"
    path = directory.resolve()
    best, kind = -1, "unknown"
    for line in mounts.read_text().splitlines():
        _, point, found, *_ = line.split()
        if path.is_relative_to(point) and len(point) >= best:
            best, kind = len(point), found
    return kind
