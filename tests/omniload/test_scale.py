"""What must not grow: start-up with the number of files, the state with the data, memory with the epochs."""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import storage
from omniload import DataLoader
from tests.omniload.mixtures import on_both_runtimes
from tests.omniload.token_files import put_megatron


def table(seed: int, num_rows: int, tokens: int) -> pa.Table:
    """Rows of ``tokens`` tokens each."""
    values = np.random.default_rng(seed).integers(0, 2**15, num_rows * tokens, dtype=np.uint16)
    offsets = np.arange(0, len(values) + 1, tokens, dtype=np.int32)
    return pa.table({"input_ids": pa.ListArray.from_arrays(offsets, values)})


def put_parquet(store: storage.Store, path: str, seed: int) -> None:
    sink = pa.BufferOutputStream()
    pq.write_table(table(seed, 40, 100), sink, row_group_size=10)
    store.write(path, [sink.getvalue()])


def reads_before_the_first_batch(mixture: dict[str, Any]) -> int:
    """Files opened and reads made, those for the fingerprint left out: nothing waits for them."""
    storage.start_recording()
    try:
        with DataLoader(mixture) as loader:
            next(iter(loader))
        return sum(
            span.name in ("storage.open", "storage.read_ranges") and span.thread != "omniload-identify"
            for span in storage.drain()
        )
    finally:
        storage.stop_recording()


def test_a_thousand_files_take_no_more_reads_before_the_first_batch_than_ten() -> None:
    store = storage.Store("memory://scale")
    counts, sizes = {}, {}
    try:
        for num_files in (10, 1000):
            for i in range(num_files):
                put_parquet(store, f"{num_files}/{i:04}.parquet", i)
            mixture = {
                "seq_len": 512,
                "packs": 4,
                "sources": {"s": {"path": f"memory://scale/{num_files}/*.parquet", "weight": 1}},
            }
            counts[num_files] = reads_before_the_first_batch(mixture)
            with DataLoader(mixture) as loader:
                next(iter(loader))
                sizes[num_files] = len(json.dumps(loader.state_dict()))
    finally:
        storage.Store("memory://").delete_tree("scale")
    assert 0 < counts[1000] <= 1.5 * counts[10] + 4
    assert sizes[1000] <= sizes[10] + 8


@on_both_runtimes
def test_the_state_of_a_thousand_sources_takes_as_much_for_each_as_that_of_ten(tmp_path: Path) -> None:
    pq.write_table(table(0, 40, 100), tmp_path / "x.parquet", row_group_size=10)
    per_source = {}
    for num_sources in (10, 1000):
        sources = {
            f"s{i:04}": {"path": str(tmp_path / "x.parquet"), "weight": 1, "on_exhausted": "repeat"}
            for i in range(num_sources)
        }
        with DataLoader({"seq_len": 512, "packs": 4, "sources": sources}) as loader:
            next(iter(loader))
            per_source[num_sources] = len(json.dumps(loader.state_dict())) / num_sources
    assert per_source[1000] < 1.2 * per_source[10]


def resident_bytes() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.parametrize("format_name", ["parquet", "megatron", "jsonl"])
def test_memory_stays_flat_over_epochs(tmp_path: Path, format_name: str) -> None:
    """Three more epochs bring at least 36 MB of tokens and must leave next to nothing of them."""
    for i in range(4):
        data = table(i, 1500, 1000)
        if format_name == "parquet":
            pq.write_table(data, tmp_path / f"{i}.parquet", row_group_size=500)
        elif format_name == "megatron":
            rows = data["input_ids"].combine_chunks().flatten().to_numpy().reshape(-1, 1000)
            put_megatron(storage.Store(tmp_path), f"{i}", rows)  # type: ignore[arg-type]
        else:
            with (tmp_path / f"{i}.jsonl").open("w") as file:
                file.writelines(json.dumps(row) + "\n" for row in data.to_pylist())
    mixture = {
        "seq_len": 4096,
        "packs": 16,
        "sources": {"s": {"path": str(tmp_path), "weight": 1, "repeat": 5}},
    }
    seen: dict[int, list[int]] = {}
    with DataLoader(mixture, buffer_bytes=8 << 20) as loader:
        for lane in loader:
            if lane["step"] % 20 == 0:
                epoch = int(loader.plan(lane["step"]).pieces["epoch"].max())
                seen.setdefault(epoch, []).append(resident_bytes())
    assert set(seen) == {0, 1, 2, 3, 4}
    assert np.median(seen[4]) - np.median(seen[1]) < 10_000_000
