"""Load of a training state by DDP ranks into the layout of the save."""

from __future__ import annotations

from functools import partial

from benchmarks.checkpointing.same_layout import MEASURES, contenders
from benchmarks.definition import Benchmark

BENCHMARK = Benchmark(
    name="checkpoint_load_ddp",
    measures_what="Bytes per second of loading a model with AdamW's moments of which every rank has all, as under DDP.",
    how_to_read=(
        "Bytes are those that the ranks want, over the time of the slowest: with four ranks, four times what is stored."
        " The floors and torch DCP have every rank read all of it; checkpoint.load reads each byte once in the job,"
        " verifies it, and hands it on. The rest as in checkpoint_load_fsdp."
    ),
    measures=MEASURES,
    contenders=partial(contenders, shard=False),
)
