"""Where the roles of a loader run, and how."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from pydantic import Field

from omniload.frozen import Frozen

if TYPE_CHECKING:
    from omniload.runtime.chaos import Chaos
    from omniload.sources.split import Split

Execution: TypeAlias = Literal["auto", "inline", "ray"]
"""``inline``: threads of each rank. ``ray``: actors of a Ray cluster, which all ranks share. ``auto``: inline in a job
of one process, Ray in others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What a loader is told of how it is to load, wherever its roles run; see `MixtureLoader`."""

    split: Split
    prefetch_steps: int
    buffer_bytes: int
    timeout_s: float
    derived: tuple[str, ...]
    chaos: Chaos | None


class RayOptions(Frozen):
    """How Ray hosts the roles; the same on every rank. None of it changes what is loaded."""

    address: str | None = None
    """Cluster to join; by default ``RAY_ADDRESS``, and without that a local one that rank 0 starts for the job."""
    job: str | None = None
    """Name that the ranks of a job share and no other job on the cluster has; by default from what torchrun says."""
    loaders: int | None = Field(default=None, ge=1)
    """Actors that the sources are divided among; by default half as many as the cluster has processors."""
    shadows: int = Field(default=0, ge=0)
    """Hot standbys for each of those: they take over at once where one is lost, and cost as much memory."""
    autoscale: bool = False
    """Measure the sources, and give those that need it more loaders, and fewer, as the mixture and the load change."""
    max_cpus: float | None = Field(default=None, gt=0)
    """With ``autoscale``: processors that all loaders may take together; by default those of the cluster."""
    max_bytes: int | None = Field(default=None, gt=0)
    """With ``autoscale``: memory likewise; by default half of the cluster's."""
    loader_cpus: float = Field(default=0.0, ge=0)
    """Processors reserved for each of those actors; with 0 they run where there is room."""
    resources: Mapping[str, float] = Field(default_factory=dict)
    """Custom resources reserved for each of them, which says on which nodes they may run."""
    log: str | None = None
    """Folder or URL of plan logs, in which the job has a folder of its name until it ends; by default its runtime
    folder, from where only this machine recovers."""
    prefetch_bytes: int = Field(default=256 << 20, ge=1)
    """Payload held ready by each rank; a step at least is."""
    object_store_bytes: int = Field(default=1 << 30, ge=80 << 20)
    """Shared memory of a cluster that rank 0 starts; what does not fit goes to disk."""
    slow_s: float = Field(default=10.0, gt=0)
    """A loader that takes longer for a read is passed over, where another can take its place."""


def chosen(execution: Execution) -> Execution:
    """What ``auto`` stands for in this process: by ``OMNILOAD_EXECUTION``, or what the launcher said of the job."""
    if execution != "auto":
        return execution
    match os.environ.get("OMNILOAD_EXECUTION", ""):
        case "inline" | "ray" as named:
            return named
        case "":
            return "ray" if int(os.environ.get("WORLD_SIZE") or 1) > 1 else "inline"
        case other:
            raise ValueError(f"OMNILOAD_EXECUTION: '{other}' is neither inline nor ray")
