"""The benchmarks by name."""

from __future__ import annotations

import difflib
import importlib

from benchmarks import peers
from benchmarks.definition import Benchmark

NAMES = (
    "checkpoint_async_ddp",
    "checkpoint_async_fsdp",
    "checkpoint_codec",
    "checkpoint_flat",
    "checkpoint_load",
    "checkpoint_load_ddp",
    "checkpoint_load_fsdp",
    "checkpoint_planning",
    "checkpoint_save_ddp",
    "checkpoint_save_fsdp",
    "checkpoint_save_load",
    "checkpoint_slowdown",
    "loader_formats",
    "loader_images",
    "loader_packed",
    "loader_scaling",
    "loader_text",
    "planner_balance",
    "planner_scale",
    "runtime_chaos",
    "runtime_fanout",
    "runtime_memory",
    "runtime_stall",
    "runtime_transport",
    "storage_cache",
    "storage_local",
    "storage_s3",
)
"""Modules of this package that hold a ``BENCHMARK``."""

WITH_PEERS = ("loader_formats", "loader_images")
"""Those of them that need the environment of the peers."""


def names(which: str) -> tuple[str, ...]:
    """The benchmarks that ``which`` stands for: itself, or with ``all`` those that can run in this environment.

    Raises:
        ValueError: it needs the environment of the peers.
    """
    if which == "all":
        return tuple(name for name in NAMES if name not in WITH_PEERS or peers.installed())
    if which in WITH_PEERS:
        peers.require()
    return (which,)


def find(name: str) -> Benchmark:
    """The benchmark of that name.

    Raises:
        ValueError: there is none; names the nearest.
    """
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(NAMES)}"
        raise ValueError(f"no benchmark '{name}'; {hint}")
    benchmark = importlib.import_module(f"benchmarks.{name}").BENCHMARK
    assert isinstance(benchmark, Benchmark)
    assert benchmark.name == name, "a benchmark's module is named after it"
    return benchmark
