"""``omniload data`` on mixture files: overrides on the command line, the schema, and no trace of a look."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.omniload.mixtures import token_rows, write_parquet
from tests.omniload.test_cli import run


@pytest.fixture
def path(tmp_path: Path) -> str:
    write_parquet(tmp_path / "data/0.parquet", token_rows(0, 50, 30))
    (tmp_path / "bad.jsonl").write_text('{"input_ids": [1, 2, 3]}\noops\n' * 20)
    sources = {
        "code": {"path": "data/*.parquet", "weight": 1},
        "bad": {"path": "bad.jsonl", "weight": 1, "on_exhausted": "repeat"},
    }
    mixture = {"seq_len": 64, "packs": 4, "lanes": 4, "quarantine": "q.jsonl", "sources": sources}
    (tmp_path / "m.yaml").write_text(yaml.safe_dump(mixture))
    return str(tmp_path / "m.yaml")


def test_overrides_hold_for_validate_and_preview(
    path: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = ["seq_len=32", "lanes=2", "sources.code.weight=0.25"]
    code, out, err = run(capsys, monkeypatch, "data", "validate", path, *overrides, "--dp-size", "2")
    assert (code, err) == (0, "")
    assert "4 packs of 32 tokens a step in 2 lanes, 1 for each of 2" in out
    assert "0.2 " in out
    code, out, _ = run(capsys, monkeypatch, "data", "preview", path, *overrides)
    assert code == 0
    assert "128 places" in out
    for command in ("validate", "preview"):
        code, out, err = run(capsys, monkeypatch, "data", command, path, "sources.cod.weight=1")
        assert (code, out) == (2, "")
        assert err == "error: override 'sources.cod.weight': no 'cod' in 'sources'; did you mean 'code'?\n"


def test_a_preview_writes_no_quarantine_file(
    path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert run(capsys, monkeypatch, "data", "preview", path)[0] == 0
    assert sorted(tmp_path.rglob("*")) == before


def test_the_schema_is_printed_for_editors(
    path: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = run(capsys, monkeypatch, "data", "schema")
    assert code == 0
    schema: dict[str, Any] = json.loads(out)
    jsonschema.validate(yaml.safe_load(Path(path).read_text()), schema)
    assert {"include", "groups", "temperature", "seq_len", "sources"} <= schema["properties"].keys()
