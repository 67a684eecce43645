"""One rank's side of the benchmarks of saving and loading: its part of the state, and the formats by name.

The functions are what `benchmarks.checkpointing.ranks.RankPool` calls in the ranks.
"""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from benchmarks.checkpointing.formats import Format, Ours, Raw, TorchDcp
from benchmarks.checkpointing.state import training_state
from benchmarks.peers.byte_checkpoint import ByteCheckpoint


class RankState:
    """What a rank holds between calls.

    Args:
        num_bytes: of the state over all ranks.
        shard: cut it over the ranks with FSDP2; else each has all of it.
    """

    def __init__(self, num_bytes: int, shard: bool) -> None:
        state = training_state(num_bytes, shard=shard)
        share = None if shard else (dist.get_rank(), dist.get_world_size())
        self.num_bytes = state.num_bytes
        self.own_file: dict[str, Format] = {
            "raw": Raw(state, hashed=False),
            "raw + xxh3": Raw(state, hashed=True),
            "share": Raw(state, hashed=False, share=share),
            "share + xxh3": Raw(state, hashed=True, share=share),
        }
        self.formats: dict[str, Format] = {
            **self.own_file,
            "ours": Ours(state),
            "dcp": TorchDcp(state),
            "bytecheckpoint": ByteCheckpoint(state),
        }

    def path(self, form: str, path: Path) -> Path:
        """Where a format puts what this rank saves: the raw ones know nothing of other ranks."""
        return path.with_name(f"{path.name}-{dist.get_rank()}") if form in self.own_file else path


def num_bytes(rank: RankState) -> int:
    """Bytes of this rank's part of the state."""
    return rank.num_bytes


def save(rank: RankState, form: str, path: Path) -> None:
    """Save and wait until it is durable."""
    rank.formats[form].save(rank.path(form, path))


def load(rank: RankState, form: str, path: Path) -> None:
    """Load what `save` saved."""
    rank.formats[form].load(rank.path(form, path))
