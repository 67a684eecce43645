"""The command: what it prints, and that bad input ends in one line on stderr and exit code 2."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from omniload.cli import main
from omniload.cli.doctor import shadowed
from tests.omniload.mixtures import hard_mixture, token_rows, write_parquet


def run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *args: object
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of ``omniload *args``."""
    monkeypatch.setattr(sys, "argv", ["omniload", *map(str, args)])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        main()
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


def write_mixture(folder: Path, mixture: dict[str, Any]) -> str:
    path = folder / "mixture.yaml"
    path.write_text(yaml.safe_dump(mixture))
    return str(path)


def simple(folder: Path, **source: Any) -> dict[str, Any]:
    write_parquet(folder / "data/0.parquet", token_rows(0, 50, 30))
    return {
        "seq_len": 64,
        "packs": 4,
        "lanes": 4,
        "sources": {"code": {"path": "data/*.parquet", "weight": 1, **source}},
    }


def test_validate_accepts_a_good_mixture_and_says_what_it_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_mixture(tmp_path, hard_mixture(tmp_path))
    code, out, _ = run(capsys, monkeypatch, "data", "validate", path, "--dp-size", "6")
    assert code == 0
    assert "filtered" in out
    assert "2 for each of 6 data-parallel ranks" in out


def test_what_the_terminal_cannot_show_is_escaped(tmp_path: Path) -> None:
    write_parquet(tmp_path / "größe.parquet", token_rows(0, 50, 30))
    mixture = {"seq_len": 64, "packs": 4, "sources": {"a": {"path": "größe.parquet", "weight": 1}}}
    done = subprocess.run(
        [sys.executable, "-m", "omniload", "data", "preview", write_mixture(tmp_path, mixture)],
        env={**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "400"},
        capture_output=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"gr\\xf6\\xdfe.parquet" in done.stdout


def test_preview_shows_where_samples_come_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = run(capsys, monkeypatch, "data", "preview", write_mixture(tmp_path, simple(tmp_path)))
    assert code == 0
    assert "0.parquet" in out
    assert "step 0" in out


def truncated_parquet(folder: Path) -> dict[str, Any]:
    mixture = simple(folder)
    path = folder / "data/0.parquet"
    path.write_bytes(path.read_bytes()[:-100])
    return mixture


def without_text(folder: Path) -> dict[str, Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    mixture = simple(folder)
    pq.write_table(pa.table({"body": ["x"], "title": ["y"]}), folder / "data/0.parquet")
    return mixture


BAD = {
    "unknown key": (lambda f: {**simple(f), "seqlen": 3}, "unknown key 'seqlen'; did you mean 'seq_len'?"),
    "unknown key of a source": (
        lambda f: simple(f, wieght=1),
        "'sources.code.wieght'; did you mean 'weight'?",
    ),
    "path that matches nothing": (lambda f: simple(f, path="data/*.parq"), "data/*.parq"),
    "missing text column": (without_text, "it has body, title"),
    "all weights zero": (lambda f: simple(f, weight=0), "every weight is 0"),
    "negative weight": (
        lambda f: simple(f, weight=-1),
        "sources.code.weight: input should be greater than or equal to 0",
    ),
    "lanes that do not divide packs": (
        lambda f: {**simple(f), "lanes": 3},
        "nearest values that do: 1, 2, 4",
    ),
    "truncated Parquet": (truncated_parquet, "0.parquet"),
    "misspelt weight": (
        lambda f: {**simple(f), "sources": {"code": {"path": "data/*.parquet", "weigth": 1}}},
        "unknown key 'sources.code.weigth'; did you mean 'weight'?",
    ),
    "weight too small to count": (
        lambda f: {
            **simple(f),
            "sources": {n: {"path": "data/*.parquet", "weight": w} for n, w in (("a", 1), ("b", 1e-12))},
        },
        "the weight of 'b', 1e-12, is below 1e-08 of the largest",
    ),
    "eos without tokenizer": (lambda f: {**simple(f), "eos": "<eos>"}, "eos: nothing is tokenised"),
    "eos that is neither name nor id": (lambda f: {**simple(f), "eos": True}, "eos: "),
    "source that gives nothing": (
        lambda f: simple(f, transforms=["tests.omniload.test_client:none_of_it"]),
        "source 'code'",
    ),
    "tokenizer that is not there": (lambda f: {**simple(f), "tokenizer": "t.json"}, "t.json"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_exit_code_2(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make, message = BAD[case]
    path = write_mixture(tmp_path, make(tmp_path))
    before = sorted(tmp_path.rglob("*"))
    for command in ("validate", "preview"):
        code, out, err = run(capsys, monkeypatch, "data", command, path)
        assert code == 2
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        assert message in err
        assert not out
    assert sorted(tmp_path.rglob("*")) == before, "something was written"


def test_ranks_that_cannot_share_the_lanes_are_told_the_nearest_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_mixture(tmp_path, simple(tmp_path))
    code, _, err = run(capsys, monkeypatch, "data", "validate", path, "--dp-size", "3")
    assert code == 2
    assert "nearest dp_size for these lanes: [1, 2, 4]" in err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such mixture file"),
        ("seed: [", "not valid YAML in line 1"),
        ("seed: 1\nseed: 2", "key 'seed' given twice, the second time in line 2"),
        ("- a", "holds no mapping"),
        ("? [a]\n: 1", "not valid YAML"),
        ("packs: 4", "'seq_len' is missing"),
    ],
)
def test_a_file_that_is_no_mixture_is_named(
    text: str | None,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "m.yaml"
    if text is not None:
        path.write_text(text)
    code, _, err = run(capsys, monkeypatch, "data", "validate", str(path))
    assert code == 2
    assert err.startswith(f"error: {path}: ")
    assert message in err


@pytest.mark.parametrize("module", ["checkpoint.py", "training/__init__.py"])
def test_doctor_names_a_module_that_shadows_one_of_ours(tmp_path: Path, module: str) -> None:
    assert all(finding.ok for finding in shadowed(tmp_path))
    (tmp_path / module).parent.mkdir(exist_ok=True)
    (tmp_path / module).touch()
    [problem] = [finding for finding in shadowed(tmp_path) if not finding.ok]
    assert problem.what == Path(module).parts[0].removesuffix(".py")
    assert str(tmp_path / module) in problem.found


def test_importing_is_cheap_and_the_public_surface_is_sorted() -> None:
    script = (
        "import sys, omniload, storage, omniload.cli;"
        "heavy = {'torch', 'ray', 's3fs', 'checkpoint', 'training'} & set(sys.modules);"
        "assert not heavy, heavy;"
        "assert omniload.__all__ == sorted(omniload.__all__);"
        "assert all(hasattr(omniload, name) for name in omniload.__all__)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
