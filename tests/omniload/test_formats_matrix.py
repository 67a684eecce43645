"""Every format, local and on S3: one stream, fresh, resumed and shared by three ranks, with every row once an epoch."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import storage
from omniload import DataLoader
from tests.omniload import test_sources_conformance as conformance
from tests.omniload.mixtures import on_both_runtimes
from tests.omniload.test_sources_conformance import SourceConformance
from tests.storage.seaweed import S3Server

FILES = {"a": 70, "b/c": 41, "b/d": 0, "z": 55}
"""Rows of each file."""
LANES = 6

FORMATS: dict[str, type[SourceConformance]] = {
    name.removeprefix("Test"): one
    for name, one in vars(conformance).items()
    if name.startswith("Test") and name not in ("TestInMemory",)
}

Id = tuple[int, str, int]
"""Epoch, file and row."""


def text_of(path: str, i: int) -> str:
    return f"{path} row {i} " * (1 + i % 3)


@pytest.fixture(params=["local", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, Any]]:
    if request.param == "local":
        return str(tmp_path), {}
    server: S3Server = request.getfixturevalue("s3")
    return f"s3://{server.bucket}/{tmp_path.name}", dict(server.storage_options)


def mixture_of(name: str, root: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    url, options = root
    kind = FORMATS[name]
    writer = kind()
    for path, size in FILES.items():
        rows = [{"text": text_of(path, i), "number": i} for i in range(size)]
        writer.put(storage.Store(url, options), path, rows)
        if name == "DescribedImages":
            storage.Store(url, options).write(f"{path}/images/0.png", path.encode())
    return {
        "seq_len": 128,
        "packs": LANES,
        "lanes": LANES,
        "window_blocks": 2,
        "sources": {
            "s": {
                "path": [f"{url}/**/*{kind.ending}", f"{url}/*{kind.ending}"],
                "weight": 1,
                "repeat": 2,
                "storage_options": options,
                "transforms": [] if name == "Megatron" else ["tests.omniload.rows:to_bytes"],
            }
        },
    }


def ids_of(loader: DataLoader, lanes: list[dict[str, Any]]) -> list[tuple[int, int, Id]]:
    """Step, lane and row of every sample."""
    return [
        (lane["step"], lane["lane"], (row["epoch"], row["file"], row["row"]))
        for lane in lanes
        for row in loader.samples(lane).to_pylist()
    ]


@pytest.mark.parametrize("name", FORMATS)
def test_ids_are_the_same_fresh_resumed_and_on_three_ranks(
    name: str, root: tuple[str, dict[str, Any]]
) -> None:
    mixture = mixture_of(name, root)
    fresh, states = [], {}
    with DataLoader(mixture) as loader:
        for lanes in loader.steps():
            fresh.append(ids_of(loader, lanes))
            states[lanes[0]["step"]] = json.loads(json.dumps(loader.state_dict()))
        ledger = loader.ledger().sources["s"]
    assert len(fresh) > 4
    seen = Counter(id_ for step in fresh for _, _, id_ in step)
    assert max(seen.values()) == 1
    rows = sum(FILES.values())
    assert ledger.rows == 2 * rows
    assert ledger.failures == 0
    assert rows < len(seen) <= 2 * rows
    assert len({id_ for id_ in seen if id_[0] == 0}) == rows

    cut = len(fresh) // 2
    with DataLoader(mixture) as loader:
        loader.load_state_dict(states[cut - 1])
        resumed = [ids_of(loader, lanes) for lanes in loader.steps()]
    assert resumed == fresh[cut:]

    shared: list[list[tuple[int, int, Id]]] = [[] for _ in fresh[cut:]]
    for rank in range(3):
        with DataLoader(mixture, dp_rank=rank, dp_size=3) as loader:
            loader.load_state_dict(states[cut - 1])
            for step, lanes in enumerate(loader.steps()):
                shared[step] += ids_of(loader, lanes)
    assert [sorted(step, key=lambda one: one[:2]) for step in shared] == fresh[cut:]


@on_both_runtimes
def test_a_mixture_of_all_formats_is_the_same_wherever_it_is_read(tmp_path: Path) -> None:
    mixture = mixture_of("Parquet", (str(tmp_path / "Parquet"), {}))
    mixture["sources"] = {
        name: mixture_of(name, (str(tmp_path / name), {}))["sources"]["s"] | {"on_exhausted": "repeat"}
        for name in FORMATS
    }
    runs = []
    for keys in ({"execution": "inline"}, {}):
        with DataLoader(mixture, steps=12, **keys) as loader:
            lanes = list(loader)
            runs.append(
                (ids_of(loader, lanes), [lane["input_ids"].tolist() for lane in lanes], loader.ledger())
            )
    assert runs[1] == runs[0]
    assert all(account.rows for account in runs[0][2].sources.values()), "a format was not read"
