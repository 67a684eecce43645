"""Plan a save in a process of its own, and tell the most memory that it took."""

from __future__ import annotations

import sys
from pathlib import Path

from checkpoint.engine.messages import unpack
from checkpoint.planner import make_plan


def peak_bytes() -> int:
    """The most resident memory that this process has had."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def main(path: str) -> None:
    """Write the peak before planning, and that after it, to stdout."""
    before = peak_bytes()
    plan = make_plan(unpack(Path(path).read_bytes()))
    assert all(plan.shares())
    sys.stdout.write(f"{before} {peak_bytes()}\n")


if __name__ == "__main__":
    main(sys.argv[1])
