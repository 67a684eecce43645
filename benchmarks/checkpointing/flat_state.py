"""One rank's side of the benchmark of flat shards: a model under FSDP1, and what its saves keep training waiting for.

The functions are what `benchmarks.checkpointing.ranks.RankPool` calls in the ranks, beside those of `async_state`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel

from benchmarks.checkpointing.async_state import AsyncState


class FlatState(AsyncState):
    """What a rank holds between calls.

    Args:
        num_bytes: of the state over all ranks.
    """

    def __init__(self, num_bytes: int) -> None:
        super().__init__(num_bytes, shard=False, flat=True)
        handles = [module._handle for module in FullyShardedDataParallel.fsdp_modules(self._state.model)]
        sizes = [handle.flat_param._sharded_size.numel() for handle in handles if handle is not None]
        # Weights and both moments, which are cut like them.
        self.shards = [torch.ones(size) for size in sizes for _ in range(3)]
        self.shard = torch.cat(self.shards)
        self.gathered = torch.empty(len(self.shard) * dist.get_world_size())


def gather(rank: FlatState) -> None:
    """Gather each flat parameter and its moments, as FSDP1 does to give a state dict; nothing is done with them."""
    for shard in rank.shards:
        whole = torch.empty(len(shard) * dist.get_world_size())
        dist.all_gather(list(whole.chunk(dist.get_world_size())), shard)


def gather_at_once(rank: FlatState) -> None:
    """Gather as many bytes in one call, into memory that is kept: the least that gathering costs."""
    dist.all_gather(list(rank.gathered.chunk(dist.get_world_size())), rank.shard)
