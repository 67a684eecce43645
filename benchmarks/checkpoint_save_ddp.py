"""Save of a training state that every rank has all of, as under DDP."""

from __future__ import annotations

from functools import partial

from benchmarks.checkpointing.saving import MEASURES, contenders
from benchmarks.definition import Benchmark

BENCHMARK = Benchmark(
    name="checkpoint_save_ddp",
    measures_what="Bytes per second of saving a model with AdamW's moments of which every rank has all, as under DDP.",
    how_to_read=(
        "Bytes are those of one rank, over the time of the slowest: all of them write each byte once, by shares. So do"
        " the floors, whose shares are fixed before. The rest as in checkpoint_save_fsdp."
    ),
    measures=MEASURES,
    contenders=partial(contenders, shard=False),
)
