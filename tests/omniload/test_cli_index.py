"""``omniload data index``: what it says, what it leaves behind, and that one bad file does not stop the others."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from tests.omniload.mixtures import token_rows, write_parquet
from tests.omniload.reading import open_path
from tests.omniload.test_cli import run, write_mixture
from tests.omniload.test_source_webdataset import many, pack


@pytest.fixture
def mixture(tmp_path: Path) -> str:
    """Of three tar files, a compressed file of lines and a Parquet file."""
    (tmp_path / "tar").mkdir()
    for number in range(3):
        (tmp_path / f"tar/{number}.tar").write_bytes(pack(many(3, 1 << 20)))
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(b'{"text": "one"}\n' * 200_000))
    write_parquet(tmp_path / "x.parquet", token_rows(0, 50, 30))
    return write_mixture(
        tmp_path,
        {
            "seq_len": 64,
            "packs": 4,
            "sources": {
                "pictures": {"path": "tar", "weight": 1},
                "lines": {"path": "x.jsonl.gz", "weight": 1},
                "tokens": {"path": "x.parquet", "weight": 1},
            },
        },
    )


def outcomes(out: str) -> list[list[str]]:
    """Cells of the rows of the table."""
    rows = [[cell.strip() for cell in line.strip("│┃| ").split("│")] for line in out.splitlines()]
    return [row for row in rows if len(row) == 4]


def test_all_sources_of_a_mixture_are_indexed(
    mixture: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = run(capsys, monkeypatch, "data", "index", mixture)
    assert (code, err) == (0, "")
    assert outcomes(out) == [
        ["lines", "jsonl", "1", "needs --rewrite"],
        ["pictures", "webdataset", "3", "built"],
        ["tokens", "parquet", "1", "nothing to build"],
    ]
    assert len(list(tmp_path.rglob("*.index"))) == 3
    assert open_path(tmp_path / "x.jsonl.gz").num_blocks(0) == 1
    code, out, _ = run(capsys, monkeypatch, "data", "index", mixture, "--rewrite")
    assert code == 0
    assert outcomes(out)[:2] == [
        ["lines", "jsonl", "1", "rewritten"],
        ["pictures", "webdataset", "3", "there already"],
    ]
    assert open_path(tmp_path / "x.jsonl.gz").num_blocks(0) == 4


def test_a_path_is_indexed_without_a_mixture(
    mixture: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = run(capsys, monkeypatch, "data", "index", f"{tmp_path}/tar/{{0..2}}.tar")
    assert code == 0
    [row] = outcomes(out)
    assert row[1:] == ["webdataset", "3", "built"]


def test_keys_of_the_mixture_are_overridden_and_a_path_has_none(
    mixture: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = ["sources.lines=null", "sources.tokens=null"]
    one = f"sources.pictures.path={tmp_path}/tar/1.tar"
    code, out, _ = run(capsys, monkeypatch, "data", "index", mixture, one, *gone)
    assert code == 0
    assert outcomes(out) == [["pictures", "webdataset", "1", "built"]]
    code, _, err = run(capsys, monkeypatch, "data", "index", f"{tmp_path}/tar", "seq_len=8")
    assert code == 2
    assert err == f"error: seq_len=8: overrides a key of a mixture, and {tmp_path}/tar is a path; remove it\n"


def test_a_bad_file_is_named_and_the_others_are_indexed(
    mixture: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tar/1.tar").write_bytes(b"no tar" * 1000)
    code, out, err = run(capsys, monkeypatch, "data", "index", mixture)
    assert code == 2
    assert err.count("\n") == 1
    assert err.startswith(f"error: {tmp_path}/tar/1.tar: has no tar header")
    assert ["pictures", "webdataset", "2", "built"] in outcomes(out)


def test_a_file_of_two_sources_is_rewritten_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(b'{"text": "one"}\n' * 200_000))
    source = {"path": "x.jsonl.gz", "weight": 1}
    mixture = write_mixture(tmp_path, {"seq_len": 64, "packs": 4, "sources": {"a": source, "b": source}})
    code, out, err = run(capsys, monkeypatch, "data", "index", mixture, "--rewrite")
    assert (code, err) == (0, "")
    assert outcomes(out) == [["a", "jsonl", "1", "rewritten"]]


def test_a_path_that_is_not_there_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for what in (f"{tmp_path}/none-*.tar", f"{tmp_path}/none.yaml"):
        code, _, err = run(capsys, monkeypatch, "data", "index", what)
        assert code == 2
        assert err.count("\n") == 1
        assert "none" in err
