"""The global plan of a save as torch DCP makes it, from the same boxes."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from checkpoint.planner.description import join, torch_dtype


def plans_of(messages: Sequence[bytes]) -> list[bytes]:
    """The local plans that the ranks would send, pickled as DCP sends them."""
    described = join(messages)
    plans = []
    for rank in range(len(messages)):
        items = []
        for row in range(int(described.first[rank]), int(described.first[rank + 1])):
            tensor = described.tensors[int(described.tensor_id[row])]
            num_dims = len(tensor.shape)
            offsets = torch.Size(described.offsets[:num_dims, row].tolist())
            sizes = torch.Size(described.lengths[:num_dims, row].tolist())
            write = TensorWriteData(
                chunk=ChunkStorageMetadata(offsets=offsets, sizes=sizes),
                properties=TensorProperties(dtype=torch_dtype(tensor.dtype)),
                size=torch.Size(tensor.shape),
            )
            index = MetadataIndex(f"{tensor.group}.{tensor.key}", offsets)
            items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=write))
        plans.append(pickle.dumps(SavePlan(items)))
    return plans


def make_plan(plans: Sequence[bytes]) -> int:
    """Decode the local plans, make the global one, and encode each rank's part; the number of boxes in it."""
    planner = DefaultSavePlanner(flatten_state_dict=False, dedup_save_to_lowest_rank=False)
    parts, _ = planner.create_global_plan([pickle.loads(plan) for plan in plans])
    return sum(len(pickle.dumps(part)) > 0 and len(part.items) for part in parts)
