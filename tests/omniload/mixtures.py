"""A small mixture on disk that has everything that makes resume hard."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

on_both_runtimes = pytest.mark.usefixtures("execution")
"""A test that runs once with the roles in threads of its process, and once with them as actors."""


def on_both_runtimes_with(name: str, values: Iterable[Any], *, on_ray: Iterable[Any]) -> pytest.MarkDecorator:
    """As `on_both_runtimes`, for each of the values of an argument; on Ray, where every job takes seconds, for some.

    The test takes ``execution`` too.
    """
    runs = [("inline", value) for value in values]
    slow = [pytest.param("ray", value, marks=pytest.mark.slow) for value in on_ray]
    return pytest.mark.parametrize(("execution", name), [*runs, *slow], indirect=["execution"])


SEQ_LEN = 64
LANES = 12


def write_parquet(path: Path, rows: list[list[int]], row_group: int = 8) -> None:
    """Pre-tokenised rows as ``input_ids``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"input_ids": pa.array(rows, pa.list_(pa.int32()))})
    pq.write_table(table, path, row_group_size=row_group)


def token_rows(seed: int, num_rows: int, mean: int) -> list[list[int]]:
    """Random rows of about ``mean`` tokens."""
    generator = np.random.default_rng(seed)
    lengths = np.maximum(1, generator.exponential(mean, num_rows).astype(int))
    return [generator.integers(1, 1000, length).tolist() for length in lengths]


def hard_mixture(folder: Path, **keys: Any) -> dict[str, Any]:
    """A filter, a one-to-three transform, documents longer than a pack, and a source that is soon exhausted.

    Args:
        folder: where the data is written.
        keys: top-level keys of the mixture that replace the defaults.
    """
    for i in range(3):
        write_parquet(folder / f"filtered/{i}.parquet", token_rows(i, 40 + i, 20))
        write_parquet(folder / f"long/{i}.parquet", token_rows(10 + i, 15, 200), row_group=4)
    write_parquet(folder / "short.parquet", token_rows(20, 30, 20))
    with (folder / "tripled.jsonl").open("w") as file:
        for row in token_rows(30, 100, 15):
            file.write(json.dumps({"input_ids": row}) + "\n")
    return {
        "seed": 7,
        "seq_len": SEQ_LEN,
        "packs": LANES,
        "lanes": LANES,
        "window_blocks": 2,
        "sources": {
            "filtered": {
                "path": str(folder / "filtered/*.parquet"),
                "weight": 0.3,
                "transforms": ["tests.omniload.rows:drop_a_third"],
                "on_exhausted": "repeat",
            },
            "long": {"path": str(folder / "long/*.parquet"), "weight": 0.4, "on_exhausted": "repeat"},
            "short": {"path": str(folder / "short.parquet"), "weight": 0.1, "on_exhausted": "drop_source"},
            "tripled": {
                "path": str(folder / "tripled.jsonl"),
                "weight": 0.2,
                "transforms": ["tests.omniload.rows:in_three"],
                "on_exhausted": "repeat",
            },
        },
        **keys,
    }
