"""A rank whose memory is measured: it loads a few steps, says so, and waits to be told that it may go."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

READ_STEPS = 6
_BATCH_TOKENS = 32_768


def _bare(job: dict[str, Any]) -> object:
    """What a trainer's process has anyway."""
    import ray
    import torch

    return ray, torch


def _torch(job: dict[str, Any]) -> object:
    """A torch DataLoader whose workers read every source, a row group at a time, as they are weighted."""
    import pyarrow.parquet as pq
    import torch
    from torch.utils.data import DataLoader, IterableDataset

    class Mixed(IterableDataset[torch.Tensor]):
        def _documents(self, path: str) -> Iterator[Any]:
            while True:
                file = pq.ParquetFile(path)
                for group in range(file.num_row_groups):
                    table = file.read_row_group(group, columns=["input_ids"])
                    for document in table["input_ids"].chunk(0):
                        yield document.values.to_numpy()

        def __iter__(self) -> Iterator[torch.Tensor]:
            sources = [self._documents(path) for path in job["paths"]]
            while True:
                parts, count = [], 0
                for source in sources:  # all of them, so that each has its row group
                    document = next(source)
                    if count < _BATCH_TOKENS:
                        parts.append(torch.from_numpy(document.copy()))
                        count += len(document)
                yield torch.cat(parts)[:_BATCH_TOKENS].to(torch.int64)

    loader = DataLoader(Mixed(), batch_size=None, num_workers=job["workers"])
    batches = iter(loader)
    for _ in range(READ_STEPS * job["workers"]):
        next(batches)
    return batches


def _ray(job: dict[str, Any]) -> object:
    """The loader of this project, its roles in actors."""
    import omniload

    sources = {
        f"s{i:03d}": {"path": path, "weight": 1, "on_exhausted": "repeat"}
        for i, path in enumerate(job["paths"])
    }
    loader = omniload.DataLoader(
        {"sources": sources, **job["mixture"]},
        dp_rank=job["rank"],
        dp_size=job["ranks"],
        execution="ray",
        ray={"job": job["name"], "loaders": job["workers"], "object_store_bytes": 512 << 20},
        buffer_bytes=8 << 20,
        timeout_s=280,
    )
    lanes = loader.steps()
    for _ in range(READ_STEPS):
        next(lanes)
    return loader, lanes


def main() -> None:
    """Load as the JSON on the command line says; "ready" on stdout, and end with stdin."""
    job = json.loads(sys.argv[1])
    held = {"bare": _bare, "torch": _torch, "ray": _ray}[job["kind"]](job)
    print("ready", flush=True)  # noqa: T201  # read by who measures
    sys.stdin.read()
    del held


if __name__ == "__main__":
    main()
