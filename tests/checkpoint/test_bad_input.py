"""What can be wrong with a checkpoint or a state: one clear line each, and no silent value."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import checkpoint
from checkpoint.cli import app
from checkpoint.engine.commit import Attempt, commit
from checkpoint.engine.metadata import TableEncoder
from checkpoint.engine.votes import encode_vote
from checkpoint.errors import (
    CheckpointError,
    CorruptCheckpoint,
    FormatError,
    MismatchError,
    NotACheckpoint,
    StateError,
    TilingError,
    UnsupportedVersion,
)
from checkpoint.format.digest import digest_hex
from checkpoint.format.objects import encode_objects
from checkpoint.planner import describe, make_plan
from checkpoint.stored import StoredCheckpoint
from checkpoint.verify import verify
from storage import Store
from tests.checkpoint.forging import forge_rows


def model(width: int = 5) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), nn.Linear(width, 3))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    checkpoint.save(tmp_path / "c", {"model": model(), "extra": {"note": "x"}}, step=1)
    return tmp_path / "c"


@pytest.mark.parametrize("step", [5, np.int64(5), np.array(5), torch.tensor(5), torch.tensor([5])])
def test_whatever_is_a_whole_number_is_a_step(tmp_path: Path, step: Any) -> None:
    assert type(checkpoint.save(tmp_path / "c", {"extra": {"n": 1}}, step=step).step) is int
    assert StoredCheckpoint.open(Store(tmp_path / "c")).manifest.step == 5
    manager = checkpoint.CheckpointManager(tmp_path / "run")
    manager.save(step, {"extra": {"n": 1}})
    assert manager.restore({"extra": {"n": 1}}, step=step) == 5


@pytest.mark.parametrize(
    "step",
    [-1, 5.0, "5", True, np.bool_(True), torch.tensor(True), torch.tensor(5.0), np.array([1, 2]), 10**18],
)
def test_what_is_no_step_is_refused_before_anything_is_written(tmp_path: Path, step: Any) -> None:
    manager = checkpoint.CheckpointManager(tmp_path)
    calls: list[Callable[[], object]] = [
        lambda: checkpoint.save(tmp_path / "c", {"extra": {"n": 1}}, step=step),
        lambda: checkpoint.async_save(tmp_path / "c", {"extra": {"n": 1}}, step=step),
        lambda: manager.save(step, {"extra": {"n": 1}}),
        lambda: manager.async_save(step, {"extra": {"n": 1}}),
        lambda: manager.save_if_due(step, {"extra": {"n": 1}}),
        lambda: manager.restore({"extra": {"n": 1}}, step=step),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"^step is .*: give a whole number from 0 to"):
            call()
    assert list(tmp_path.iterdir()) == []


def test_what_no_reader_would_take_is_never_committed() -> None:
    """Whatever checks arguments further up."""
    store = Store("memory://unreadable")
    attempt = Attempt(attempt="0" * 32, run_id="1" * 32, step=-1, overwrite=False, user_metadata={})
    tables = TableEncoder(make_plan([describe([])]))
    with pytest.raises(FormatError, match="step -1 is not a whole number"):
        commit(store, attempt, tables, encode_objects({}, ""), [encode_vote([], {})])
    assert store.list() == []


@pytest.mark.parametrize("damage", [b"{}", b"", b"\xff", b" " * (2 << 20)])
def test_overwrite_replaces_a_checkpoint_that_nobody_can_read(tmp_path: Path, damage: bytes) -> None:
    manager = checkpoint.CheckpointManager(tmp_path)
    saves: list[Callable[[], object]] = [
        lambda: checkpoint.save(tmp_path / "step-00000001", {"extra": {"n": 1}}, overwrite=True),
        lambda: manager.save(1, {"extra": {"n": 1}}, overwrite=True),
    ]
    for save in saves:
        (tmp_path / "step-00000001").mkdir(exist_ok=True)
        (tmp_path / "step-00000001" / "manifest.json").write_bytes(damage)
        save()
        assert verify(StoredCheckpoint.open(Store(tmp_path / "step-00000001"))).problems == ()


def payload(saved: Path) -> Path:
    (path,) = saved.glob("data/*/model-00000-000.safetensors")
    return path


def rejected(saved: Path, kind: type[CheckpointError], *words: str) -> None:
    """Loading raises ``kind`` with ``words`` in one line and leaves the model as it was; the command exits with 2."""
    target = model()
    before = {key: value.clone() for key, value in target.state_dict().items()}
    with pytest.raises(kind) as caught:
        checkpoint.load(saved, {"model": target})
    message = str(caught.value)
    assert type(caught.value) is kind
    assert "\n" not in message
    for word in words:
        assert word in message, message
    for key, value in target.state_dict().items():
        assert torch.equal(value, before[key])
    done = CliRunner().invoke(app, ["verify", str(saved)])
    assert done.exit_code == 2
    for word in words:
        assert word in done.stderr


def test_a_directory_without_manifest(saved: Path) -> None:
    (saved / "manifest.json").unlink()
    rejected(saved, NotACheckpoint, str(saved), "no manifest.json")


def test_a_payload_file_one_byte_short(saved: Path) -> None:
    path = payload(saved)
    path.write_bytes(path.read_bytes()[:-1])
    rejected(saved, CorruptCheckpoint, path.name, f"has {path.stat().st_size} bytes")


def test_a_missing_payload_file(saved: Path) -> None:
    payload(saved).unlink()
    rejected(saved, CorruptCheckpoint, "model-00000-000.safetensors", "is missing")


def test_a_flipped_bit_in_a_payload_names_file_and_tensor(saved: Path) -> None:
    path = payload(saved)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptCheckpoint, match=rf"{path.name}: bytes .* of tensor model/1\.weight"):
        checkpoint.load(saved, {"model": model()})
    done = CliRunner().invoke(app, ["verify", str(saved)])
    assert done.exit_code == 2
    assert "model/1.weight" in done.stderr
    checkpoint.load(saved, {"model": model()}, verify=False)  # asked for


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (lambda: {"model": model(6)}, ("model/0.bias is [6], stored [5]", "shapes")),
        (lambda: {"model": model().double()}, ("torch.float64, stored torch.float32",)),
        (
            lambda: {"model": nn.Sequential(*model(), nn.Linear(3, 3))},
            ("has no model/2.bias", "strict=False"),
        ),
        (lambda: {"model": nn.Sequential(nn.Linear(4, 5))}, ("model/1.bias, model/1.weight have no place",)),
        (lambda: {"nodel": model()}, ("'nodel' is not in the checkpoint",)),
    ],
)
def test_a_state_that_does_not_fit_is_refused_before_payload_is_read(
    saved: Path, state: Callable[[], dict[str, Any]], words: tuple[str, ...]
) -> None:
    path = payload(saved)
    path.write_bytes(b"\0" * path.stat().st_size)  # would be noticed if it were read
    with pytest.raises(MismatchError) as caught:
        checkpoint.load(saved, state())
    for word in words:
        assert word in str(caught.value)


def test_not_strict_loads_what_fits_and_reports_the_rest(saved: Path) -> None:
    longer = nn.Sequential(*model(), nn.Linear(3, 3))
    report = checkpoint.load(saved, {"model": longer}, strict=False)
    assert report.missing == ("model/2.bias", "model/2.weight")
    report = checkpoint.load(saved, {"model": nn.Sequential(nn.Linear(4, 5))}, strict=False)
    assert report.unexpected == ("model/1.bias", "model/1.weight")


def set_value(column: str, value: Any, row: int = 0) -> Callable[[list[dict[str, Any]]], None]:
    def change(rows: list[dict[str, Any]]) -> None:
        rows[row][column] = value

    return change


@pytest.mark.parametrize(
    ("name", "column", "value", "kind", "words"),
    [
        ("files.parquet", "path", "../../../etc/passwd", FormatError, ("may not leave the directory",)),
        ("files.parquet", "path", "/etc/passwd", FormatError, ("may not leave the directory",)),
        ("files.parquet", "header_bytes", 1 << 40, FormatError, ("header of",)),
        ("tensors.parquet", "shape", [1 << 40, 1 << 40], FormatError, ("model/0.bias", "do not add up")),
        ("tensors.parquet", "shape", [-5], FormatError, ("model/0.bias", "impossible shape")),
        ("tensors.parquet", "dtype", "float3", FormatError, ("model/0.bias", "unknown dtype 'float3'")),
        ("tensors.parquet", "box_count", 2, FormatError, ("box counts",)),
        ("shards.parquet", "offsets", [1], TilingError, ("model/0.bias", "out of bounds")),
        ("shards.parquet", "lengths", [1 << 62], FormatError, ("model/0.bias", "do not add up")),
        ("shards.parquet", "lengths", [5, 1], FormatError, ("dimensions",)),
        ("shards.parquet", "file_id", 7, FormatError, ("disagree about files",)),
        ("stored.parquet", "byte_offset", 4097, FormatError, ("model/0.bias", "do not add up")),
        ("stored.parquet", "byte_offset", 4100, FormatError, ("holes, overlap or leave the file",)),
        ("stored.parquet", "xxh3", [], FormatError, ("model/0.bias", "do not add up")),
        ("stored.parquet", "codec", "lz77", UnsupportedVersion, ("codec 'lz77'", "newer")),
        ("stored.parquet", "codec", "zstd", FormatError, ("model/0.bias", "do not add up")),
    ],
)
def test_tables_that_contradict_themselves(
    saved: Path, name: str, column: str, value: Any, kind: type[CheckpointError], words: tuple[str, ...]
) -> None:
    forge_rows(saved, name, set_value(column, value))
    rejected(saved, kind, *words)


def test_a_file_that_claims_another_size(saved: Path) -> None:
    forge_rows(saved, "files.parquet", set_value("num_bytes", 1 << 62))
    with pytest.raises(FormatError, match=r"boxes in model-00000-000.* leave holes"):
        checkpoint.load(saved, {"model": model()})
    done = CliRunner().invoke(app, ["verify", str(saved)])
    assert done.exit_code == 2
    assert "holes, overlap or leave the file" in done.stderr


def test_a_header_that_disagrees_with_the_tables_is_found_by_verify(saved: Path) -> None:
    forge_rows(saved, "tensors.parquet", set_value("key", "0.bias2"))
    problems = verify(StoredCheckpoint.open(Store(saved))).problems
    assert len(problems) == 1
    assert "disagrees with the tables" in problems[0]


def test_a_column_of_another_type(saved: Path) -> None:
    schema = pa.schema(
        {"rank": pa.int64(), "key": pa.string(), "value": pa.int64()},
    )
    forge_rows(saved, "rank_objects.parquet", lambda rows: rows.clear(), schema)
    with pytest.raises(FormatError, match=r"rank_objects.parquet: no column 'value' of type string"):
        StoredCheckpoint.open(Store(saved)).rank_objects(0)


def test_metadata_sizes_are_bounded_before_they_are_read(saved: Path) -> None:
    manifest = json.loads((saved / "manifest.json").read_bytes())
    manifest["files"]["objects.json"]["bytes"] = 1 << 60
    manifest["digest"] = "0" * 16
    text = json.dumps(manifest, separators=(",", ":")).encode() + b"\n"
    digest = digest_hex(text).encode()
    (saved / "manifest.json").write_bytes(re.sub(rb'"0{16}"}\n$', b'"' + digest + b'"}\n', text))
    rejected(saved, FormatError, "size of objects.json")


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"run": {"tags": {1}}}, r"user_metadata\.run\.tags: cannot store a builtins.set"),
        ({"notes": "x" * (1 << 20)}, "user_metadata is too large"),
        (5, "user_metadata is 5: give a dict"),
    ],
)
def test_metadata_that_cannot_be_stored_is_refused_before_anything_is_written(
    tmp_path: Path, metadata: Any, words: str
) -> None:
    for save in (checkpoint.save, checkpoint.async_save):
        with pytest.raises(StateError, match=words):
            save(tmp_path / "c", {"extra": {"n": 1}}, user_metadata=metadata)
    assert not (tmp_path / "c").exists()


def test_metadata_is_stored_as_it_was_when_save_was_called(tmp_path: Path) -> None:
    metadata: dict[str, Any] = {"run": {"tags": ["a"]}}

    class Changing:
        def state_dict(self) -> dict[str, object]:
            metadata["run"]["tags"].append("b")
            return {"n": 1}

        def load_state_dict(self, state: object) -> None: ...

    checkpoint.async_save(tmp_path / "c", {"it": Changing()}, user_metadata=metadata).result()
    stored = StoredCheckpoint.open(Store(tmp_path / "c")).manifest.user_metadata
    assert stored == {"run": {"tags": ["a"]}}
