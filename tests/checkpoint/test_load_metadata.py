"""Of the tables of a large checkpoint only what is needed is read, and that is verified by itself."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from checkpoint.boxes import Box
from checkpoint.errors import CorruptCheckpoint
from checkpoint.format.manifest import read_manifest
from checkpoint.stored import StoredCheckpoint
from storage import Store
from storage.spans import Span, add_listener, remove_listener
from tests.checkpoint.simulation import load_simulated, random_bits, save_simulated

_ROWS = 3000  # boxes of each tensor: 5 tensors are several row groups
_TENSORS = {f"t{index}": random_bits((_ROWS, 2), torch.int16, seed=index) for index in range(5)}
_LAYOUT = [[Box((row, 0), (1, 2)) for row in range(_ROWS)]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("metadata") / "c"
    save_simulated(Store(path), 1, _TENSORS, dict.fromkeys(_TENSORS, _LAYOUT))
    return path


@pytest.mark.parametrize("ids", [[], [0], [4], [1, 3], [0, 1, 2, 3, 4]])
def test_narrowed_tables_hold_what_the_whole_ones_do(saved: Path, ids: list[int]) -> None:
    whole = StoredCheckpoint.open(Store(saved)).tables.boxes
    narrow = StoredCheckpoint.open(Store(saved)).narrowed(ids).tables.boxes
    for tensor_id in range(len(_TENSORS)):
        rows, all_rows = narrow.rows_of(tensor_id), whole.rows_of(tensor_id)
        assert len(rows) == (_ROWS if tensor_id in ids else 0)
        if tensor_id not in ids:
            continue
        for ours, theirs in zip(narrow.corners_of(tensor_id, 2), whole.corners_of(tensor_id, 2), strict=True):
            assert np.array_equal(ours, theirs)
        here, there = slice(rows.start, rows.stop), slice(all_rows.start, all_rows.stop)
        assert np.array_equal(narrow.file_id[here], whole.file_id[there])
        assert np.array_equal(narrow.stored_bytes[here], whole.stored_bytes[there])
        pieces = slice(int(narrow.piece_first[rows.start]), int(narrow.piece_first[rows.stop]))
        all_pieces = slice(int(whole.piece_first[all_rows.start]), int(whole.piece_first[all_rows.stop]))
        assert np.array_equal(narrow.piece_offset[pieces], whole.piece_offset[all_pieces])
        assert np.array_equal(narrow.digests[pieces], whole.digests[all_pieces])


def test_only_footers_and_some_row_groups_are_read(saved: Path) -> None:
    stored = StoredCheckpoint.open(Store(saved))
    _ = stored.catalog
    spans: list[Span] = []
    add_listener(spans.append)
    try:
        _ = stored.narrowed([4]).tables
    finally:
        remove_listener(spans.append)
    assert not [one for one in spans if one.name == "storage.read"]
    read = sum(int(one.attributes["num_bytes"]) for one in spans if one.name == "storage.read_ranges")
    files = stored.manifest.files
    footers = sum(files[name].footer_bytes or 0 for name in ("shards.parquet", "stored.parquet"))
    whole = sum(files[name].num_bytes for name in ("shards.parquet", "stored.parquet"))
    assert footers < read < footers + (whole - footers) * 0.7


def test_a_rank_loads_with_the_tables_of_its_tensors(saved: Path) -> None:
    some = {key: _TENSORS[key] for key in ("t1", "t4")}
    whole = [[Box.whole((_ROWS, 2))]]
    # The others are not in the state; every rank has other tensors, and rank 0 shares out the reading of all.
    stored = StoredCheckpoint.open(Store(saved))
    assert len(stored.narrowed([1, 4]).tables.boxes.file_id) == 2 * _ROWS
    load_simulated(Store(saved), 1, some, dict.fromkeys(some, whole), strict=False)
    layouts = {"t1": [*whole, []], "t4": [[], *whole], "t0": whole * 2}
    load_simulated(Store(saved), 2, {**some, "t0": _TENSORS["t0"]}, layouts, strict=False)


@pytest.mark.parametrize("name", ["shards.parquet", "stored.parquet"])
def test_damage_in_what_is_read_is_found_and_elsewhere_it_is_not_looked_for(
    saved: Path, tmp_path: Path, name: str
) -> None:
    place = tmp_path / "c"
    shutil.copytree(saved, place)
    manifest, _ = read_manifest(Store(place))
    path = place / manifest.data_dir / name
    intact = path.read_bytes()
    footer_bytes = manifest.files[name].footer_bytes
    assert footer_bytes is not None
    for position, tensors, words in (
        (100, [0], r"bytes 4\.\.\d+ do not match their digest"),
        (len(intact) - footer_bytes - 1, [4], r"do not match their digest"),
        (len(intact) - footer_bytes, [0], r"the digest of its footer does not match"),
        (len(intact) - 1, [4], r"the digest of its footer does not match"),
    ):
        data = bytearray(intact)
        data[position] ^= 8
        path.write_bytes(data)
        with pytest.raises(CorruptCheckpoint, match=words):
            _ = StoredCheckpoint.open(Store(place)).narrowed(tensors).tables
        with pytest.raises(CorruptCheckpoint, match="digest does not match the manifest"):
            _ = StoredCheckpoint.open(Store(place)).tables
    data = bytearray(intact)
    data[100] ^= 8
    path.write_bytes(data)
    assert len(StoredCheckpoint.open(Store(place)).narrowed([4]).tables.boxes.file_id) == _ROWS
    path.write_bytes(intact[:-1])
    with pytest.raises(CorruptCheckpoint, match=r"\d+ bytes, the manifest says \d+"):
        _ = StoredCheckpoint.open(Store(place)).narrowed([4]).tables
