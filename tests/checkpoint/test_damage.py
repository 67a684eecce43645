"""A flipped bit or a cut anywhere in any file: noticed, naming file and tensor, and never a silent value."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from checkpoint.boxes import Box
from checkpoint.errors import CheckpointError
from checkpoint.format.manifest import MANIFEST, METADATA_FILES
from checkpoint.stored import StoredCheckpoint
from checkpoint.verify import verify
from storage import Store
from storage.errors import StorageError
from tests.checkpoint.simulation import load_simulated, random_bits, save_simulated

pytestmark = pytest.mark.slow

NUM_FLIPS = 500
NUM_CUTS = 60
NUM_LOADS = 15

TENSORS = {
    "a.weight": random_bits((48, 10), torch.float32, 1),
    "b.half": random_bits((30, 7), torch.bfloat16, 2),
    "c.flags": random_bits((11,), torch.bool, 3),
    "d.scalar": random_bits((), torch.float64, 4),
}
LAYOUTS = {
    "a.weight": [[Box((24 * rank, 0), (24, 10))] for rank in range(2)],
    "b.half": [[Box((0, 0), (30, 3))], [Box((0, 3), (30, 4))]],
    "c.flags": [[Box.whole((11,))]] * 2,
    "d.scalar": [[Box.whole(())]] * 2,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("damage")
    save_simulated(Store(root), 2, TENSORS, LAYOUTS)
    assert problem(root) is None
    return root


def problem(root: Path, checkpoint: StoredCheckpoint | None = None) -> str | None:
    """What is wrong, in the words of verify; with a checkpoint that was opened before, of its payload."""
    try:
        problems = verify(checkpoint or StoredCheckpoint.open(Store(root))).problems
    except (CheckpointError, StorageError) as error:
        return str(error)
    return "\n".join(problems) or None


def tensor_at(checkpoint: StoredCheckpoint, name: str, position: int) -> str | None:
    """The tensor that a byte of a payload file belongs to; None in its header."""
    boxes = checkpoint.tables.boxes
    for row in range(len(boxes.file_id)):
        begin = int(boxes.byte_offset[row])
        file = checkpoint.tables.files[int(boxes.file_id[row])].path
        if file == name and begin <= position < begin + int(boxes.stored_bytes[row]):
            return checkpoint.tensor_of(row)
    return None


def damages(data: bytes, dice: random.Random) -> Iterator[tuple[int, bytes]]:
    """Damaged versions of a file, each with the position of the damage."""
    for index in range(NUM_FLIPS):
        position = (
            index if index < 64 else len(data) - 1 - (index - 64) if index < 96 else dice.randrange(len(data))
        )
        position = min(max(position, 0), len(data) - 1)
        damaged = bytearray(data)
        damaged[position] ^= 1 << dice.randrange(8)
        yield position, bytes(damaged)
    for index in range(NUM_CUTS):
        position = 0 if index == 0 else len(data) - 1 if index == 1 else dice.randrange(len(data))
        yield position, data[:position]


FILES = [MANIFEST, *METADATA_FILES, "model-00000-000.safetensors", "model-00001-000.safetensors"]


@pytest.mark.parametrize("name", FILES)
def test_damage_is_noticed_by_name(saved: Path, name: str) -> None:
    (path,) = saved.rglob(name)
    data = path.read_bytes()
    hit: set[str | None] = set()
    payload = name.endswith(".safetensors")
    opened = StoredCheckpoint.open(Store(saved))
    assert problem(saved, opened) is None
    try:
        for position, wrong in damages(data, random.Random(name)):
            if name == MANIFEST and wrong == data[:-1]:
                continue  # a line feed less
            path.write_bytes(wrong)
            found = problem(saved, opened if payload else None)
            assert found is not None, f"byte {position} of {len(data)}"
            assert name in found, found
            if len(wrong) == len(data) and payload:
                tensor = tensor_at(opened, name, position)
                hit.add(tensor)
                assert tensor is None or f"tensor {tensor} " in found, (tensor, found)
                assert tensor is not None or "header" in found
    finally:
        path.write_bytes(data)
    if payload:
        assert {None, "model/a.weight", "model/b.half"} <= hit
    assert problem(saved) is None


@pytest.mark.parametrize("name", FILES)
def test_a_load_of_damaged_files_raises_or_gives_the_values_that_were_saved(saved: Path, name: str) -> None:
    """Never others. It may not notice what it does not need, such as the first four bytes of a table."""
    (path,) = saved.rglob(name)
    data = path.read_bytes()
    dice = random.Random(name)
    num_refused = 0
    try:
        for _ in range(NUM_LOADS):
            position = dice.randrange(len(data))
            damaged = bytearray(data)
            damaged[position] ^= 1 << dice.randrange(8)
            path.write_bytes(damaged)
            try:
                load_simulated(Store(saved), 2, TENSORS, LAYOUTS)
            except* (CheckpointError, StorageError):
                num_refused += 1
    finally:
        path.write_bytes(data)
    assert num_refused >= NUM_LOADS - 2
