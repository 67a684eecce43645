"""The benchmarks by name."""

from __future__ import annotations

import difflib
import importlib

from benchmarks.definition import Benchmark

NAMES = (
    "checkpoint_fsdp",
    "checkpoint_save_load",
    "loader_packed",
    "loader_text",
    "storage_cache",
    "storage_local",
    "storage_s3",
)
"""Modules of this package that hold a ``BENCHMARK``."""


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
