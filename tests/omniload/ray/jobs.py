"""Loaders on a cluster, and the processes behind them."""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import ray
import torch

from omniload import DataLoader, MixtureLoader
from omniload.runtime.ray.cluster import system_config

TIMEOUT_S = 60.0


def start_ray() -> None:
    """A cluster of one node, which ends with this process."""
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=200 << 20,
        log_to_driver=False,
        logging_level=logging.ERROR,
        configure_logging=False,
        _system_config=system_config(),
    )


class Jobs:
    """Makes loaders of jobs that have a name of their own.

    Args:
        name: of the test.
        folder: for data.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder

    def loader(
        self, mixture: Any, *, job: str = "", ray: dict[str, Any] | None = None, **keys: Any
    ) -> MixtureLoader:
        """A loader whose roles are actors."""
        options = {"job": self.name + job, "loaders": 1, **(ray or {})}
        keys = {"timeout_s": TIMEOUT_S, **keys}
        loader = DataLoader(mixture, execution="ray", ray=options, **keys)
        assert isinstance(loader, MixtureLoader)
        return loader

    def actors(self, job: str = "") -> list[str]:
        """Names of the actors of a job that are there."""
        namespace = f"omniload-{self.name}{job}"
        return sorted(
            one["name"]
            for one in ray.util.list_named_actors(all_namespaces=True)
            if one["namespace"] == namespace
        )

    def kill(self, role: str, job: str = "") -> int:
        """Kill the process of the first actor whose name begins so; which it was."""
        [name, *_] = [name for name in self.actors(job) if name.startswith(role)]
        handle = ray.get_actor(name, namespace=f"omniload-{self.name}{job}")
        [stats, _] = ray.get(handle.stats.remote(), timeout=30)
        os.kill(stats.pid, signal.SIGKILL)
        return int(stats.pid)


def lanes_of(loader: MixtureLoader) -> dict[tuple[int, int], str]:
    """Digest of every lane of what is left of a stream, by step and lane."""
    with loader:
        return {(lane["step"], lane["lane"]): digest(lane) for lane in loader}


def digest(lane: dict[str, Any]) -> str:
    """Digest of everything in a lane: equal lanes, byte for byte, and only those, have equal ones."""
    found = hashlib.sha256()
    for key in sorted(lane):
        value = lane[key]
        if isinstance(value, torch.Tensor):
            found.update(f"{key} {value.dtype} {tuple(value.shape)}".encode())
            found.update(value.contiguous().numpy().tobytes())
        else:
            found.update(f"{key} {value!r}".encode())
    return found.hexdigest()


def until(true: Any, what: str, timeout_s: float = TIMEOUT_S) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.05)
