"""One state in many layouts, and what a rank reads when it loads from one into another.

The functions are what `benchmarks.checkpointing.ranks.RankPool` calls in the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

import checkpoint

NUM_RANKS: Final = 4

_NUM_TENSORS: Final = 8
_COLUMNS: Final = 4096

# Shape of the mesh and placements; no placements: a plain tensor on every rank, as under DDP.
_LAYOUTS: Final[Mapping[str, tuple[tuple[int, ...], tuple[Placement, ...]]]] = {
    "FSDP 2": ((2,), (Shard(0),)),
    "FSDP 4": ((4,), (Shard(0),)),
    "DDP 2": ((2,), ()),
    "DDP 4": ((4,), ()),
    "TP 4": ((4,), (Shard(1),)),
    "FSDP 2 x TP 2": ((2, 2), (Shard(0), Shard(1))),
}

CHANGES: Final = (
    ("FSDP 2", "FSDP 4"),
    ("FSDP 4", "FSDP 2"),
    ("DDP 2", "FSDP 4"),
    ("FSDP 4", "DDP 4"),
    ("FSDP 4", "TP 4"),
    ("FSDP 4", "FSDP 2 x TP 2"),
    ("DDP 4", "DDP 4"),
)
"""From which layout into which."""


class Layouts:
    """What a rank holds of the state in each layout.

    Args:
        rows: Of each matrix; not a multiple of the number of ranks, so that shards are uneven.
    """

    def __init__(self, rows: int) -> None:
        self.num_bytes = _NUM_TENSORS * rows * _COLUMNS * 4
        self.groups: dict[str, dist.ProcessGroup] = {}
        self.states: dict[str, dict[str, Tensor]] = {}
        for name, (shape, placements) in _LAYOUTS.items():
            num_ranks = torch.Size(shape).numel()
            # Every rank makes every group, whether or not it is in it.
            mesh = DeviceMesh("cpu", torch.arange(num_ranks).view(shape))
            group = dist.new_group(list(range(num_ranks)))
            if dist.get_rank() < num_ranks:
                self.groups[name] = group
                self.states[name] = {
                    f"layer{index}": _matrix(rows, index, mesh, placements) for index in range(_NUM_TENSORS)
                }


def _matrix(rows: int, index: int, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Tensor:
    full = torch.arange(rows * _COLUMNS, dtype=torch.float32).view(rows, _COLUMNS) + index
    if not placements:
        return full
    local = full
    for axis, placement in enumerate(placements):
        assert isinstance(placement, Shard)
        chunks = torch.chunk(local, mesh.size(axis), placement.dim)
        local = chunks[mesh.get_local_rank(axis)]
    return DTensor.from_local(local.clone(), mesh, placements, shape=full.shape, stride=full.stride())


def num_bytes(rank: Layouts) -> int:
    """Bytes of the whole state."""
    return rank.num_bytes


def save(rank: Layouts, form: str, layout: str, path: Path) -> None:
    """Save the state as it lies in a layout, with ``checkpoint`` or ``dcp``."""
    if layout not in rank.states:
        return
    if form == "dcp":
        save_dcp(
            dict(rank.states[layout]),
            storage_writer=FileSystemWriter(path),
            process_group=rank.groups[layout],
        )
    else:
        checkpoint.save(path, {"model": rank.states[layout]}, process_group=rank.groups[layout])


def load(rank: Layouts, form: str, layout: str, path: Path) -> int:
    """Load into a layout; bytes that this process has read from files for it."""
    if layout not in rank.states:
        return 0
    before = _bytes_read()
    if form == "dcp":
        load_dcp(
            dict(rank.states[layout]),
            storage_reader=FileSystemReader(path),
            process_group=rank.groups[layout],
        )
    else:
        checkpoint.load(path, {"model": rank.states[layout]}, process_group=rank.groups[layout])
    return _bytes_read() - before


def _bytes_read() -> int:
    """Bytes that system calls have read from files, cached or not; what comes from sockets is not among them."""
    counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counters["rchar"])
