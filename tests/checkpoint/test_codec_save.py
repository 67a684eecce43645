"""Saves that compress: what is asked for and nothing else, pieces that stand alone, the same bytes from every way."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

import checkpoint
from checkpoint.boxes import Box
from checkpoint.engine.save import SaveOptions
from checkpoint.errors import ObjectsDiffer, StateError
from checkpoint.format.codec import RAW_PIECE_BYTES
from checkpoint.format.manifest import read_manifest
from storage import Store
from tests.checkpoint.simulation import (
    DTYPES,
    bits,
    layouts,
    raised_by_ranks,
    random_bits,
    save_simulated,
    shapes,
    slices,
)

_numbers = itertools.count()


def place() -> Store:
    return Store(f"memory://codec/{next(_numbers)}")


def options(compression: Mapping[str, str] | None) -> SaveOptions:
    return SaveOptions(step=7, overwrite=False, timeout_s=20, user_metadata={}, compression=compression)


def rows(store: Store) -> list[dict[str, Any]]:
    """Every stored box, with its tensor and the path of its file."""
    data = store.sub(read_manifest(store)[0].data_dir)
    tensors, shards, stored, files = (
        pq.read_table(pa.BufferReader(data.read(f"{name}.parquet"))).to_pylist()
        for name in ("tensors", "shards", "stored", "files")
    )
    return [
        {**tensors[shard["tensor_id"]], **shard, **where, "path": files[where["file_id"]]["path"]}
        for shard, where in zip(shards, stored, strict=True)
    ]


def raw_bytes(store: Store, row: Mapping[str, Any]) -> bytes:
    """The bytes of a stored box, by what FORMAT.md says and nothing of this package's codec."""
    data = store.sub(read_manifest(store)[0].data_dir)
    begin = row["byte_offset"]
    (stored,) = data.read_ranges([(row["path"], begin, begin + row["stored_bytes"])])
    if row["codec"] == "none":
        assert row["piece_bytes"] is None
        return bytes(stored)
    elements = int(np.prod(row["lengths"], dtype=int))
    itemsize = row["nbytes"] // int(np.prod(row["shape"], dtype=int))
    left, raw, at = elements * itemsize, b"", 0
    for size, digest in zip(row["piece_bytes"], row["xxh3"], strict=True):
        piece = bytes(stored[at : at + size])
        assert xxhash.xxh3_64_intdigest(piece) == digest
        num_bytes = min(left, 1 << 20)
        planes = pa.decompress(piece, num_bytes, codec="zstd", asbytes=True)
        raw += np.frombuffer(planes, np.uint8).reshape(itemsize, -1).T.tobytes()
        left, at = left - num_bytes, at + size
    assert (left, at) == (0, row["stored_bytes"])
    return raw


CHOICES = [
    ({"model": "zstd"}, True),
    ({"model/large": "zstd"}, False),
    ({"*/t?": "none", "m*": "zstd"}, False),
]
"""What to compress, and whether that goes for tensors other than ``large`` too."""


@settings(max_examples=40)
@given(st.data())
def test_every_box_holds_its_bytes_whatever_is_compressed(data: st.DataObject) -> None:
    world_size = data.draw(st.integers(1, 4))
    tensors = {}
    cut = {}
    for index in range(data.draw(st.integers(1, 4))):
        shape = data.draw(shapes)
        key = f"t{index}"
        tensors[key] = random_bits(shape, data.draw(st.sampled_from(DTYPES)), seed=index)
        cut[key] = data.draw(layouts(shape, world_size))
    large = random_bits((300, 7), data.draw(st.sampled_from(DTYPES)), seed=9)
    tensors["large"], cut["large"] = large, data.draw(layouts(large.shape, world_size))
    chosen, compresses = data.draw(st.sampled_from(CHOICES))
    store = place()
    save_simulated(
        store, world_size, tensors, cut, background=data.draw(st.booleans()), options=options(chosen)
    )
    for row in rows(store):
        box = Box(tuple(row["offsets"]), tuple(row["lengths"]))
        expected = bits(tensors[row["key"]][slices(box)])
        assert raw_bytes(store, row) == expected, row["key"]
        wanted = len(expected) >= 1024 and (row["key"] == "large" or compresses)
        assert row["codec"] == ("zstd" if wanted else "none")


def test_a_large_box_is_pieces_that_stand_alone(tmp_path: Path) -> None:
    weights = torch.randn(2 * RAW_PIECE_BYTES // 2 + 500).bfloat16()
    checkpoint.save(tmp_path / "c", {"model": {"w": weights}}, compression={"model": "zstd"})
    store = Store(tmp_path / "c")
    (row,) = rows(store)
    assert row["codec"] == "zstd"
    assert len(row["piece_bytes"]) == len(row["xxh3"]) == 3
    assert weights.nbytes / row["stored_bytes"] > 1.4
    assert raw_bytes(store, row) == bits(weights)


def test_payload_files_stay_valid_safetensors(tmp_path: Path) -> None:
    """Compressed boxes are byte entries behind the others, at whatever offset they fall on."""
    state = {
        "a": torch.randn(999),
        "b": torch.randn(7).bool(),
        "c": torch.randn(501).double(),
        "d": torch.ones(5),
    }
    checkpoint.save(tmp_path / "c", {"model": state}, compression={"model/[ac]": "zstd"})
    by_key = {row["key"]: row for row in rows(Store(tmp_path / "c"))}
    assert {key: row["codec"] for key, row in by_key.items()} == {
        "a": "zstd",
        "b": "none",
        "c": "zstd",
        "d": "none",
    }
    assert max(by_key[key]["byte_offset"] for key in "bd") < min(by_key[key]["byte_offset"] for key in "ac")
    assert by_key["c"]["byte_offset"] % 8, "the bools before it leave it misaligned"
    (path,) = tmp_path.glob("c/data/*/model-00000-000.safetensors")
    with safe_open(path, framework="pt") as file:
        assert torch.equal(file.get_tensor("d"), state["d"])
        assert torch.equal(file.get_tensor("b"), state["b"])
        entry = file.get_tensor("a")
        assert (entry.dtype, entry.numel()) == (torch.uint8, by_key["a"]["stored_bytes"])


def test_saves_in_the_background_store_the_same_bytes(tmp_path: Path) -> None:
    state = {
        "strided": torch.randn(300, 40)[::3, 1::2],
        "complex": torch.randn(200, dtype=torch.complex128).conj(),
        "odd": torch.randint(0, 255, (4099,), dtype=torch.uint8),
        "one": torch.tensor(3.0),
        "large": torch.randn(700_000),
    }
    compression = {"model/[!l]*": "zstd"}
    checkpoint.save(tmp_path / "a", {"model": state}, compression=compression)
    checkpoint.async_save(tmp_path / "b", {"model": state}, compression=compression).result()
    first, second = (next(tmp_path.glob(f"{name}/data/*/model-*")).read_bytes() for name in "ab")
    assert first == second
    assert {row["codec"] for row in rows(Store(tmp_path / "a"))} == {"none", "zstd"}


def test_nothing_is_compressed_unless_asked(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "c", {"model": {"w": torch.zeros(5000)}})
    assert [row["codec"] for row in rows(Store(tmp_path / "c"))] == ["none"]


@pytest.mark.parametrize("compression", ["zstd", {"model": "gzip"}, {"model": None}, {3: "zstd"}, ["model"]])
def test_what_is_not_patterns_and_codecs_is_refused_in_one_line(compression: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="compression") as caught:
        checkpoint.save(tmp_path / "c", {"model": {"w": torch.zeros(5)}}, compression=compression)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("pattern", ["modle", "model/v*", "w"])
def test_a_pattern_that_fits_nothing_is_refused_on_all_ranks(pattern: str) -> None:
    store = place()
    tensor = random_bits((4, 4), torch.float32, seed=0)
    cut = {"w": [[Box((0, 0), (2, 4))], [Box((2, 0), (2, 4))]]}

    with pytest.raises(BaseExceptionGroup) as caught:
        save_simulated(store, 2, {"w": tensor}, cut, options=options({"model": "zstd", pattern: "zstd"}))
    assert len(caught.value.exceptions) == 2
    for error in caught.value.exceptions:
        assert isinstance(error, StateError)
        assert repr(pattern) in str(error)
    assert not store.exists("manifest.json")


def test_ranks_that_compress_differently_are_told() -> None:
    from checkpoint.engine.save import Saver
    from tests.checkpoint.simulation import captured

    store = place()
    tensor = random_bits((4, 4), torch.float32, seed=0)
    cut = {"w": [[Box((0, 0), (2, 4))], [Box((2, 0), (2, 4))]]}

    def save(coordinator: Any) -> object:
        mine = captured({"w": tensor}, cut, coordinator.rank)
        chosen = options({"model": "zstd"} if coordinator.rank else None)
        return Saver(coordinator).save(store, lambda: mine, chosen, background=False)

    for error in raised_by_ranks(2, save):
        assert isinstance(error, ObjectsDiffer)
        assert "compression" in str(error)


def test_a_manager_compresses_what_it_was_told_to(tmp_path: Path) -> None:
    manager = checkpoint.CheckpointManager(tmp_path, compression={"model": "zstd"})
    state = {"model": {"t": torch.ones(4096)}, "rest": {"t": torch.ones(4096)}}
    manager.save(1, state)
    manager.async_save(2, state).result()
    for step in (1, 2):
        sizes = {row["group"]: row["stored_bytes"] for row in rows(Store(tmp_path).sub(f"step-{step:08d}"))}
        assert sizes["model"] < 4 * 4096 == sizes["rest"]
    with pytest.raises(ValueError, match="compression has 'model': 'zip'"):
        checkpoint.CheckpointManager(tmp_path, compression={"model": "zip"})
