"""How long an asynchronous save blocks training of which every rank has all of the state, as under DDP."""

from __future__ import annotations

from functools import partial

from benchmarks.checkpointing.blocking import MEASURES, contenders
from benchmarks.definition import Benchmark

BENCHMARK = Benchmark(
    name="checkpoint_async_ddp",
    measures_what="Time that asynchronous saves keep training waiting where every rank has all, as under DDP.",
    how_to_read=(
        "The floor copies what a rank holds, which is everything, on every rank; checkpoint writes replicas once and"
        " copies what a rank is to write, torch DCP copies everything. The rest as in checkpoint_async_fsdp."
    ),
    measures=MEASURES,
    contenders=partial(contenders, shard=False),
)
