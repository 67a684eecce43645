"""A checkpoint as Hugging Face safetensors files, on the CPU, one output file in memory at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from safetensors.torch import save as encode_safetensors

from checkpoint.boxes import Box
from checkpoint.engine.read import Wanted, read_boxes
from checkpoint.errors import MismatchError
from checkpoint.format.dtypes import DTYPES
from checkpoint.format.index import TensorRow
from checkpoint.planner import torch_dtype
from checkpoint.stored import StoredCheckpoint
from storage import Store

CONFIG_GROUP: Final = "hf_config"
"""State key whose objects become ``config.json``."""

_FLOATS: Final = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertReport:
    """What was written.

    Attributes:
        files: Names of the safetensors files.
        num_tensors: Entries in them.
        num_bytes: Bytes of tensor data in them.
    """

    files: tuple[str, ...]
    num_tensors: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Output:
    """A tensor to be written: under ``name``, from the stored tensor ``tensor_id``."""

    name: str
    tensor_id: int
    row: TensorRow
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.row.num_bytes // DTYPES[self.row.dtype].itemsize * self.dtype.itemsize


def convert_to_hf(
    checkpoint: StoredCheckpoint,
    destination: Store,
    *,
    group: str = "model",
    max_shard_bytes: int = 5_000_000_000,
    dtype: str | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> ConvertReport:
    """Write one group of a checkpoint as Hugging Face safetensors.

    Tensors keep their names. A tensor that several parameters share is written under its first name, and under the
    others too unless ``config.json`` says ``tie_word_embeddings``, in which case readers tie them themselves.
    Everything that is read is verified; after an error nothing stays behind.

    Args:
        checkpoint: Where from.
        destination: Where to; must be empty.
        group: State key of the model.
        max_shard_bytes: Largest size of a file, unless a single tensor is larger.
        dtype: Convert floating-point tensors to ``float16``, ``bfloat16``, ``float32`` or ``float64``, rounding to
            nearest; None keeps them as they are.
        progress: Called with the number of bytes written since the last call.

    Raises:
        MismatchError: No such group, a dtype that safetensors lacks, or a destination that is not empty.
        CorruptCheckpoint: The checkpoint is damaged.
    """
    config = _config(checkpoint)
    outputs = _outputs(checkpoint, group, dtype, tied=bool(config and config.get("tie_word_embeddings")))
    if destination.list():
        raise MismatchError(f"{destination.url}: is not empty; convert into a new directory")
    checkpoint.check_files()
    for output in outputs:
        checkpoint.tables.check_tiling(output.tensor_id)
    shards = _shards(outputs, max_shard_bytes)
    names = (
        ["model.safetensors"]
        if len(shards) == 1
        else [f"model-{index:05d}-of-{len(shards):05d}.safetensors" for index in range(1, len(shards) + 1)]
    )
    num_bytes = sum(output.num_bytes for output in outputs)
    written: list[str] = []
    try:
        for name, shard in zip(names, shards, strict=True):
            written.append(name)
            destination.write(name, _encode(checkpoint, shard))
            progress(sum(output.num_bytes for output in shard))
        if len(shards) > 1:
            written.append("model.safetensors.index.json")
            weight_map = {one.name: name for name, shard in zip(names, shards, strict=True) for one in shard}
            index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
            destination.write(written[-1], (json.dumps(index, indent=2) + "\n").encode())
        if config is not None:
            written.append("config.json")
            if dtype is not None:
                config = {**config, "torch_dtype": dtype}
            destination.write(written[-1], (json.dumps(config, indent=2) + "\n").encode())
    except BaseException:
        for name in written:
            destination.delete(name)
        raise
    return ConvertReport(files=tuple(names), num_tensors=len(outputs), num_bytes=num_bytes)


def _config(checkpoint: StoredCheckpoint) -> dict[str, Any] | None:
    stored = checkpoint.objects.get(CONFIG_GROUP)
    if stored is None:
        return None
    config = stored.get("value") if isinstance(stored, Mapping) else None
    if not isinstance(config, dict):
        raise MismatchError(
            f"{checkpoint.store.url}: {CONFIG_GROUP!r} is not a dict, so it cannot become config.json"
        )
    return config


def _outputs(checkpoint: StoredCheckpoint, group: str, dtype: str | None, *, tied: bool) -> list[_Output]:
    if dtype is not None and dtype not in _FLOATS:
        raise MismatchError(f"dtype {dtype!r} is not one of {', '.join(_FLOATS)}")
    rows = {
        tensor.key: (index, tensor)
        for index, tensor in enumerate(checkpoint.tables.tensors)
        if tensor.group == group
    }
    if not rows:
        groups = sorted({tensor.group for tensor in checkpoint.tables.tensors})
        raise MismatchError(
            f"{checkpoint.store.url}: no tensors in group {group!r}; --group is one of {', '.join(groups)}"
        )
    names = {key: key for key in rows}
    objects = checkpoint.objects.get(group)
    aliases = objects.get("aliases") if isinstance(objects, Mapping) else None
    if aliases and not tied:
        names |= {alias: key for alias, key in aliases.items() if key in rows}
    outputs = []
    for name, key in sorted(names.items()):
        tensor_id, row = rows[key]
        if DTYPES[row.dtype].safetensors is None:
            raise MismatchError(f"{group}/{key}: safetensors has no {row.dtype}; it cannot be exported")
        target = torch_dtype(row.dtype)
        if dtype is not None and target.is_floating_point:
            target = torch_dtype(dtype)
        outputs.append(_Output(name=name, tensor_id=tensor_id, row=row, dtype=target))
    return outputs


def _shards(outputs: list[_Output], max_shard_bytes: int) -> list[list[_Output]]:
    shards: list[list[_Output]] = [[]]
    room = max_shard_bytes
    for output in outputs:
        if shards[-1] and output.num_bytes > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(output)
        room -= output.num_bytes
    return shards


def _encode(checkpoint: StoredCheckpoint, shard: list[_Output]) -> bytes:
    tensors = {}
    wanted = []
    for output in shard:
        tensor = torch.empty(output.row.shape, dtype=torch_dtype(output.row.dtype), device="cpu")
        tensors[output.name] = tensor
        if tensor.numel():
            wanted.append(Wanted(tensor_id=output.tensor_id, box=Box.whole(output.row.shape), view=tensor))
    read_boxes(checkpoint, wanted, verify=True)
    # transformers refuses files that do not name the framework.
    return encode_safetensors(
        {output.name: tensors[output.name].to(output.dtype) for output in shard}, metadata={"format": "pt"}
    )
