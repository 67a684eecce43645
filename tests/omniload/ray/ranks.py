"""Ranks of a job as processes, and what is left of them."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.omniload.mixtures import hard_mixture

ENDS_S = 30.0
"""How long what is left of a job may last."""
WAIT_S = 180.0


class Rank:
    """A process of a job, and what it says.

    Args:
        folder: for data, and for what the job writes down.
        steps: of the mixture.
        rank: which it is.
        size: of so many.
        port: by which the ranks know each other.
        does: what is not as in any training script; see `rank_script`.
        env: set for it.
        keys: of its loaders.
    """

    def __init__(
        self,
        folder: Path,
        steps: int,
        rank: int = 0,
        size: int = 1,
        port: int = 0,
        does: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        **keys: Any,
    ) -> None:
        mixture = hard_mixture(folder / "data", steps=steps)
        orders = {
            **(does or {}),
            "mixture": mixture,
            "step_s": 0.1,
            "keys": {"timeout_s": 60.0, "ray": {"loaders": 1}, **keys},
        }
        launched = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
        launched |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        # As from a shell: nothing of the cluster that the tests share, but what it takes to join it.
        own = keys.get("ray", {}).get("address") is None
        given = {key: value for key, value in os.environ.items() if not (own and key.startswith("RAY_"))}
        given |= {key: str(value) for key, value in launched.items()} if size > 1 else {}
        given |= {"OMNILOAD_RUNTIME_DIR": str(folder / "runtime"), **(env or {})}
        self.errors = folder / f"{rank}.err"
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.omniload.ray.rank_script", json.dumps(orders)],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=given,
            )
        self.said: list[dict[str, Any]] = []
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def end(self) -> None:
        """Kill it, if it is there."""
        self.process.kill()
        self.process.wait()
        self._reader.join(WAIT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def says(self, key: str) -> Any:
        """The next that it says of something."""
        while (line := self._lines.get(timeout=WAIT_S)) is not None:
            if line.startswith("{"):
                self.said.append(json.loads(line))
                if key in self.said[-1]:
                    return self.said[-1][key]
        pytest.fail(f"it ended without saying {key}: {self.errors.read_text()[-2000:]}")

    def ends(self, within_s: float = ENDS_S) -> int:
        """Its exit status."""
        return self.process.wait(within_s)


def left_of(session: str, shared: set[str]) -> list[str]:
    """What there is of a session of Ray: processes, sockets listened on, segments of shared memory."""
    name = Path(session).name
    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        try:
            said = " ".join(process.info["cmdline"] or [])
            held = [one.path for one in process.open_files() if name in one.path]
            if (name in said or held) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"process {process.pid} {said[:80]} {held[:1]}")
        except psutil.Error:
            continue
    sockets = Path("/proc/net/unix").read_text().splitlines()
    found += [line for line in sockets if name in line]
    found += [str(path) for path in segments() - shared]
    return found


def segments() -> set[str]:
    """Ray's segments of shared memory that have a name; one without goes with the last process that maps it."""
    return {str(path) for path in Path("/dev/shm").glob("plasma*")}
