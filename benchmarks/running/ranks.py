"""The ranks of a job, as processes of this machine."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

TIMEOUT_S = 600.0
"""How long a rank may take for a line."""


@contextmanager
def ranks(module: str, jobs: Sequence[dict[str, Any]]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """A process for each job, told of the others as torchrun does; they end when their stdin does.

    Args:
        module: run with a job as JSON on its command line.
        jobs: of the ranks, in order.
    """
    with ExitStack() as stack:
        yield [stack.enter_context(_rank(module, job, rank, len(jobs))) for rank, job in enumerate(jobs)]


def answer(process: subprocess.Popen[bytes], timeout_s: float = TIMEOUT_S) -> str:
    """The next line that a rank says.

    Raises:
        RuntimeError: it ended instead.
        TimeoutError: it said nothing in time.
    """
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], timeout_s)[0]:
        raise TimeoutError(f"a rank said nothing for {timeout_s:g} s: {process.args!r}")
    line: bytes = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a rank ended with exit code {process.wait(60)}: {process.args!r}")
    return line.decode().strip()


@contextmanager
def _rank(module: str, job: dict[str, Any], rank: int, size: int) -> Iterator[subprocess.Popen[bytes]]:
    launched = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "OMP_NUM_THREADS": 1}
    process = subprocess.Popen(
        [sys.executable, "-m", module, json.dumps(job)],
        env=os.environ | {key: str(value) for key, value in launched.items()},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,  # a line that was read ahead would not be waited for
    )
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
