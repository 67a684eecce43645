"""Load of a training state by FSDP2 ranks into the layout of the save."""

from __future__ import annotations

from functools import partial

from benchmarks.checkpointing.same_layout import MEASURES, contenders
from benchmarks.definition import Benchmark

BENCHMARK = Benchmark(
    name="checkpoint_load_fsdp",
    measures_what="Bytes per second of loading a model with AdamW's moments that is cut over FSDP2 ranks.",
    how_to_read=(
        "Bytes are those of all ranks, over the time of the slowest; the ranks share the machine's cores. The floors"
        " have every rank read its own file, without names, layout or agreement, and pread does not look at what it"
        " reads. checkpoint.load verifies everything. Files on a disk are read from there: they are dropped from memory"
        " before every run."
    ),
    measures=MEASURES,
    contenders=partial(contenders, shard=True),
)
