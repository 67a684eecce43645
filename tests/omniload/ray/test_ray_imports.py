"""What the process of a rank imports: each has a copy of it, so what only actors need is memory times ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.elsewhere import printed

_READING = ("jinja2", "omniload.loader", "omniload.sources.parquet", "pyarrow.parquet", "tokenizers")
"""What it takes to read a source."""
_SCRIPT = f"""
import json, sys
import omniload

source, execution = sys.argv[1:]
mixture = {{"seq_len": 64, "packs": 4, "sources": {{"a": {{"path": source, "weight": 1}}}}}}
loader = omniload.DataLoader(mixture, execution=execution, ray={{"job": "imports"}}, timeout_s=60)
[lanes] = [lanes for lanes, _ in zip(loader.steps(), range(1))]
assert sum(lane["input_ids"].numel() for lane in lanes) == 256, "a step"
assert loader.state_dict(), "a state, with what the sources are"
modules = [name for name in {_READING} if name in sys.modules]
loader.close()
print(json.dumps(modules))
"""


@pytest.mark.slow
def test_a_rank_that_loads_through_actors_imports_nothing_that_reads(tmp_path: Path) -> None:
    """Not by handles of actors or by what they answer either; and a rank that reads by itself imports all of it."""
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"input_ids": [list(range(64))] * 64}), path)
    imported = {
        execution: json.loads(printed(_SCRIPT, str(path), execution, OMNILOAD_RUNTIME_DIR=str(tmp_path)))
        for execution in ("inline", "ray")
    }
    assert imported == {"inline": list(_READING), "ray": []}
