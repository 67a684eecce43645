"""Memory of groups of processes."""

from __future__ import annotations

from pathlib import Path

import psutil


def pss_bytes(roots: list[int]) -> int:
    """Proportional set size of processes and all below them: what they share, shared memory too, counts once."""
    processes: dict[int, psutil.Process] = {}
    for pid in roots:
        root = psutil.Process(pid)
        processes |= {one.pid: one for one in [root, *root.children(recursive=True)]}
    return sum(_pss(pid) for pid in processes)


def _pss(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (OSError, ProcessLookupError):  # it ended meanwhile
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
