"""The tables that a save writes: what a rank needs of them can be read, and verified, by itself."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import checkpoint
from checkpoint.boxes import Box
from checkpoint.engine.metadata import TableEncoder
from checkpoint.engine.options import SaveOptions
from checkpoint.engine.save import Saver
from checkpoint.engine.votes import VotedFile, Votes
from checkpoint.format.digest import digest_hex
from checkpoint.format.manifest import read_manifest, read_metadata
from checkpoint.format.tables import PARTLY_READ, ROW_GROUPS, decode_table, footer_of
from checkpoint.frameworks.values import CapturedState
from checkpoint.planner import describe, make_plan
from checkpoint.stored import StoredCheckpoint
from checkpoint.verify import verify
from storage import Store
from tests.checkpoint.independent_reader import read_tensors
from tests.checkpoint.simulation import bits, held, random_bits, run_ranks

# More boxes than two row groups have.
NUM_BOXES = 28_801


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tensors cut to pieces over two ranks, and one more."""
    path = tmp_path_factory.mktemp("many")
    long = random_bits((NUM_BOXES - 2,), torch.int8, seed=1)

    def fn(coordinator: object) -> None:
        rank = coordinator.rank  # type: ignore[attr-defined]
        boxes = [Box((index,), (1,)) for index in range(rank, len(long), 2)]
        rows = [Box((rank, 0), (1, 3))]
        state = CapturedState(
            tensors=[held("long", long, boxes), held("z", long[:6].view(2, 3), rows)],
            objects={"model": {}},
            rank_objects={"rng": "x" * 1000 * rank, "other": rank},
        )
        options = SaveOptions(step=1, overwrite=False, timeout_s=60, user_metadata={})
        Saver(coordinator).save(Store(path), lambda: state, options, background=False)  # type: ignore[arg-type]

    run_ranks(2, fn)
    return path


def test_every_row_group_can_be_read_and_checked_by_itself(saved: Path) -> None:
    manifest, _ = read_manifest(Store(saved))
    rows = []
    for name in sorted(PARTLY_READ):
        data = read_metadata(Store(saved), manifest, name)
        footer = footer_of(data)
        vouched = manifest.files[name]
        assert (vouched.footer_bytes, vouched.footer_xxh3) == (len(footer), digest_hex(footer))
        file = pq.ParquetFile(io.BytesIO(data))
        groups = json.loads(file.metadata.metadata[ROW_GROUPS.encode()])
        edges = [4, *(group["end"] for group in groups)]
        assert [group["begin"] for group in groups] == edges[:-1]
        assert edges[-1] == len(data) - len(footer)
        for index, group in enumerate(groups):
            part = data[group["begin"] : group["end"]]
            assert digest_hex(part) == group["xxh3"]
            # The row group and the footer are all that decoding it takes.
            alone = bytearray(len(data))
            alone[group["begin"] : group["end"]] = part
            alone[-len(footer) :] = footer
            found = pq.ParquetFile(io.BytesIO(bytes(alone))).read_row_group(index)
            assert found.equals(file.read_row_group(index))
        rows.append([file.metadata.row_group(index).num_rows for index in range(len(groups))])
    assert rows[0] == rows[1]
    assert len(rows[0]) > 2
    assert sum(rows[0]) == NUM_BOXES


def test_statistics_tell_the_tensors_of_a_row_group_and_the_ranks_of_objects(saved: Path) -> None:
    manifest, _ = read_manifest(Store(saved))
    for name, column, expected in (
        ("shards", "tensor_id", [(0, 0), (0, 0), (0, 1)]),
        ("rank_objects", "rank", [(0, 1)]),
    ):
        file = pq.ParquetFile(io.BytesIO(read_metadata(Store(saved), manifest, f"{name}.parquet"))).metadata
        chunks = [file.row_group(group).column(0) for group in range(file.num_row_groups)]
        assert all(chunk.path_in_schema == column for chunk in chunks)
        assert [(chunk.statistics.min, chunk.statistics.max) for chunk in chunks] == expected


def test_only_the_tables_that_are_read_in_parts_have_their_footers_vouched_for(saved: Path) -> None:
    manifest, _ = read_manifest(Store(saved))
    assert {name for name, file in manifest.files.items() if file.footer_bytes is not None} == PARTLY_READ


def test_many_boxes_are_read_by_a_reader_that_knows_the_format_only(saved: Path) -> None:
    found = read_tensors(saved)
    long = random_bits((NUM_BOXES - 2,), torch.int8, seed=1)
    assert found["model", "long"].tobytes() == bits(long)
    assert found["model", "z"].tobytes() == bits(long[:6])
    assert verify(StoredCheckpoint.open(Store(saved))).problems == ()
    assert StoredCheckpoint.open(Store(saved)).rank_objects(1) == {"rng": "x" * 1000, "other": 1}


def test_a_state_without_tensors_or_without_dimensions_has_tables_too(tmp_path: Path) -> None:
    for index, state in enumerate(({"a": 1}, {"t": torch.zeros(0, 3)}, {"t": torch.tensor(5)}, {})):
        target = {
            key: torch.ones_like(value) if isinstance(value, torch.Tensor) else 0
            for key, value in state.items()
        }
        checkpoint.save(tmp_path / str(index), {"extra": state})
        checkpoint.load(tmp_path / str(index), {"extra": target})
        assert [repr(value) for value in target.values()] == [repr(value) for value in state.values()]
        assert verify(StoredCheckpoint.open(Store(tmp_path / str(index)))).problems == ()
        assert len(read_tensors(tmp_path / str(index))) == ("t" in state)


def test_what_saves_of_one_plan_have_in_common_is_encoded_once() -> None:
    """Until files are numbered otherwise."""
    state = [held(key, random_bits((4,), torch.int8, seed=1), [Box.whole((4,))]) for key in "ab"]
    encoder = TableEncoder(make_plan([describe(state)]))

    def votes(files: list[int], digest: int) -> Votes:
        column = np.asarray
        return Votes(
            files=[
                VotedFile("model", 0, one, f"model-00000-00{one}.safetensors", 4104, 4096, 7)
                for one in range(2)
            ],
            rank_objects=[],
            rank=column([0, 0]),
            file=column(files),
            position=column([1, 0]),
            byte_offset=column([4096, 4096]),
            stored_bytes=column([4, 4]),
            codec=column([0, 0], dtype=np.uint8),
            piece_counts=column([1, 1]),
            piece_bytes=column([4, 4]),
            digests=column([digest, digest + 1], dtype=np.uint64),
        )

    first, second, third = (
        encoder.encode(votes(files, digest)) for files, digest in (([0, 1], 1), ([0, 1], 2), ([1, 0], 2))
    )
    for name in ("tensors.parquet", "shards.parquet"):
        assert second[name] is first[name]
    assert decode_table("stored.parquet", first["stored.parquet"], "").column("xxh3").to_pylist() == [
        [2],
        [1],
    ]
    assert decode_table("stored.parquet", second["stored.parquet"], "").column("xxh3").to_pylist() == [
        [3],
        [2],
    ]
    for name in ("shards.parquet", "stored.parquet"):
        assert decode_table(name, second[name], "").column("file_id").to_pylist() == [1, 0]
        assert decode_table(name, third[name], "").column("file_id").to_pylist() == [0, 1]
