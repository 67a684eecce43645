"""``shuffle: global``: one permutation of all rows, another in every epoch, of the rows of one split."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import storage
from omniload import DataLoader
from omniload.errors import MixtureError
from omniload.loader import SourceLoader
from omniload.mixture import SourceSpec
from omniload.pieces import Cursor
from omniload.sources import InMemorySource, open_source
from omniload.sources.order import Feistel
from omniload.sources.shuffled import BLOCK_ROWS, RowAccess, ShuffledRows
from tests.omniload.mixtures import token_rows, write_parquet
from tests.omniload.test_laws import assert_same_lane
from tests.omniload.token_files import put_mds, put_megatron

SIZES = {"a": 700, "b": 1, "c": 0, "d": 900}


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
def test_many_images_at_once_are_those_of_one_by_one(size: int, key: int) -> None:
    permutation = Feistel(size, key)
    indices = np.arange(0, size, 7)
    assert permutation.of(indices).tolist() == [permutation(i) for i in indices.tolist()]


def memory(column: str = "input_ids") -> InMemorySource:
    """Every row is its own number, counted over all files."""
    tables, first = {}, 0
    for path, size in SIZES.items():
        numbers = range(first, first + size)
        values = [[i] for i in numbers] if column == "input_ids" else [str(i) for i in numbers]
        type_ = pa.list_(pa.int32()) if column == "input_ids" else pa.string()
        tables[path] = pa.table({column: pa.array(values, type_)})
        first += size
    return InMemorySource(tables)


def rows_of(source: ShuffledRows, epoch: int) -> list[int]:
    found: list[int] = []
    for block in range(source.num_blocks(epoch)):
        raw = source.read_block(epoch, block)
        assert np.array_equal(raw.row_ids, source.row_ids(epoch, block))
        values = raw.rows(np.arange(raw.num_rows))
        assert raw.table is not None
        assert raw.table.to_pylist() == values
        assert [row["input_ids"][0] for row in values] == raw.row_ids.tolist()  # type: ignore[index]
        found += raw.row_ids.tolist()
    return found


def test_every_epoch_is_another_order_of_all_rows() -> None:
    source = ShuffledRows(memory(), seed=1, split="train", held_out=0.0)
    assert source.num_blocks(0) == 4
    epochs = [rows_of(source, epoch) for epoch in range(3)]
    total = sum(SIZES.values())
    for order in epochs:
        assert sorted(order) == list(range(total))
        per_quarter = np.bincount(np.array(order[:BLOCK_ROWS]) // 401, minlength=4)
        assert per_quarter.min() > BLOCK_ROWS / 8, "the first block has rows of some places only"
    assert sum(a == b for a, b in zip(epochs[0], epochs[1], strict=True)) < 20


def test_the_splits_have_the_rows_that_they_have_in_windows() -> None:
    for split in ("train", "held_out"):
        expected = set()
        loader = SourceLoader(
            memory(),
            SourceSpec(path=("x",), weight=1),
            name="s",
            seed=1,
            seq_len=8,
            held_out=0.2,
            split=split,
        )
        cursor = Cursor()
        while cursor.epoch == 0:
            chunk = loader.read(cursor, 10_000)
            payload = loader.payload(chunk.pieces)
            expected |= {int(tokens[0]) for tokens in payload.tokens}
            cursor = chunk.end
        found = rows_of(ShuffledRows(memory(), seed=1, split=split, held_out=0.2), 0)  # type: ignore[arg-type]
        assert set(found) == expected
        assert len(found) == len(expected) > 200


@pytest.mark.parametrize("column", ["input_ids", "text"])
def test_a_loader_reads_and_derives_again_what_it_published(column: str) -> None:
    spec = SourceSpec(
        path=("x",), weight=1, transforms=() if column == "input_ids" else ("tests.omniload.rows:as_tokens",)
    )

    def new() -> SourceLoader:
        return SourceLoader(
            memory(column),
            spec,
            name="s",
            seed=3,
            seq_len=8,
            shuffle="global",
            window_blocks=2,
            buffer_bytes=0,
        )

    loader, cursor, seen = new(), Cursor(), []
    while cursor.epoch < 2:
        chunk = loader.read(cursor, 100)
        tokens = [int(one[0]) for one in loader.payload(chunk.pieces).tokens]
        assert tokens == [int(one[0]) for one in new().payload(chunk.pieces).tokens]
        for piece, token in zip(chunk.pieces, tokens, strict=True):
            paths, ids = loader.origins(int(piece["file"]), int(piece["block"]), piece["row"][None])
            first = sum(size for path, size in SIZES.items() if path < paths[0])
            assert first + ids[0] == token
        seen += tokens
        cursor = chunk.end
    total = sum(SIZES.values())
    assert sorted(seen[:total]) == sorted(seen[total:]) == list(range(total))
    assert seen[:total] != seen[total:]


def put(folder: Path, format_name: str) -> None:
    """1,300 documents in two datasets; every token names its document, and says how far it is in that."""
    for file, numbers in enumerate((range(900), range(900, 1300))):
        documents = [[i, *range(i % 7)] for i in numbers]
        if format_name == "megatron":
            put_megatron(storage.Store(folder), f"{file}", documents, dtype="int32")
        else:
            samples = [[np.array(document, "<i4").tobytes()] for document in documents]
            columns = {"input_ids": ("ndarray:int32", None)}
            put_mds(storage.Store(folder), f"{file}", columns, samples_of(samples), shard_samples=64)


def samples_of(values: list[list[bytes]]) -> list[list[bytes]]:
    """Arrays of one dimension as MDS encodes them: a byte for that and for sizes of one byte, the size, the items."""
    return [[b"\x04" + bytes([len(value) // 4]) + value] for [value] in values]


@pytest.mark.parametrize("format_name", ["megatron", "mds"])
def test_single_rows_are_those_of_the_blocks(tmp_path: Path, format_name: str) -> None:
    put(tmp_path, format_name)
    source = open_source("s", SourceSpec(path=(str(tmp_path),), weight=1))
    assert isinstance(source, RowAccess)
    rng = np.random.default_rng(0)
    for file, first in ((0, 0), (1, 900)):
        blocks = [source.read_block(file, block) for block in range(source.num_blocks(file))]
        stored = [row for block in blocks for row in block.rows(np.arange(block.num_rows))]
        ids = np.concatenate([block.row_ids for block in blocks])
        assert source.num_rows(file) == len(stored) == (900, 400)[file]
        for size in (1, 2, 50, len(stored)):
            rows = np.sort(rng.choice(len(stored), size, replace=False))
            found = source.read_rows(file, rows)
            assert np.array_equal(found.row_ids, rows)
            assert np.array_equal(ids[rows], rows)
            picked = rng.permutation(size)
            values = [np.asarray(row["input_ids"]).tolist() for row in found.rows(picked)]  # type: ignore[index]
            assert values == [np.asarray(stored[i]["input_ids"]).tolist() for i in rows[picked]]  # type: ignore[index]
            assert values == [[first + i, *range((first + i) % 7)] for i in rows[picked].tolist()]
            assert found.table is not None
            assert found.table["input_ids"].to_pylist() == [
                [first + i, *range((first + i) % 7)] for i in rows.tolist()
            ]


@pytest.mark.parametrize("format_name", ["megatron", "mds"])
def test_the_stream_of_a_global_shuffle_resumes_and_is_shared_by_ranks(
    tmp_path: Path, format_name: str
) -> None:
    put(tmp_path, format_name)
    mixture = {
        "seq_len": 64,
        "packs": 12,
        "lanes": 6,
        "seed": 5,
        "steps": 12,
        "shuffle": "global",
        "sources": {"s": {"path": str(tmp_path), "weight": 1, "on_exhausted": "repeat"}},
    }
    whole, states, seen = {}, {}, []
    with DataLoader(mixture) as loader:
        for group in loader.steps():
            states[group[0]["step"]] = loader.state_dict()
            for lane in group:
                whole[lane["step"], lane["lane"]] = lane
                seen += [(row["epoch"], row["file"], row["row"]) for row in loader.samples(lane).to_pylist()]
    first_epoch = [(file, row) for epoch, file, row in seen if epoch == 0]
    assert len(first_epoch) == len(set(first_epoch)) > 1000
    assert {epoch for epoch, _, _ in seen} >= {0, 1}
    for rank in range(3):
        with DataLoader(mixture, dp_rank=rank, dp_size=3) as resumed:
            resumed.load_state_dict(states[4])
            rest = {(lane["step"], lane["lane"]): lane for lane in resumed}
        assert len(rest) == 7 * 2
        for key, lane in rest.items():
            assert_same_lane(lane, whole[key])


def test_packed_shards_are_refused_at_the_start(tmp_path: Path) -> None:
    source = open_source("s", SourceSpec(path=("tests/fixtures/mds/text_zstd",), weight=1))
    with pytest.raises(MixtureError, match="is compressed, and shuffle: global reads single samples"):
        ShuffledRows(source, seed=0, split="train", held_out=0.0)


def test_a_format_of_blocks_only_is_refused_with_the_remedy(tmp_path: Path) -> None:
    write_parquet(tmp_path / "x.parquet", token_rows(0, 5, 5))
    source = open_source("s", SourceSpec(path=(str(tmp_path / "x.parquet"),), weight=1))
    with pytest.raises(MixtureError, match="set shuffle: window and raise window_blocks"):
        ShuffledRows(source, seed=0, split="train", held_out=0.0)
