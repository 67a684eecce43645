"""Save of a training state that is cut over ranks with FSDP2."""

from __future__ import annotations

from functools import partial

from benchmarks.checkpointing.saving import MEASURES, contenders
from benchmarks.definition import Benchmark

BENCHMARK = Benchmark(
    name="checkpoint_save_fsdp",
    measures_what="Bytes per second of saving a model with AdamW's moments, cut over ranks with FSDP2.",
    how_to_read=(
        "Bytes are those of all ranks, over the time of the slowest; the ranks share the machine's cores. A floor has"
        " every rank write its own file, without names, layout or agreement. All fsync what they save. Only checkpoint"
        " and the floors with xxh3 would notice a flipped bit. On a disk (--dir) writes vary by more than the"
        " contenders differ: look at the control first."
    ),
    measures=MEASURES,
    contenders=partial(contenders, shard=True),
)
