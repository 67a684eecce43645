"""``omniload data profile``: what sources cost and who would read them; bad input ends in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from omniload.scaling import Partition, SourceProfile, partition
from omniload.scaling.actors import Budget
from tests.omniload.mixtures import hard_mixture, token_rows, write_parquet
from tests.omniload.test_cli import run as run_command
from tests.omniload.test_cli import write_mixture


def run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *args: object
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of ``omniload data profile *args``, of a short look at each source."""
    return run_command(capsys, monkeypatch, "data", "profile", *args, "--seconds", 0.02)


def test_every_source_is_measured_and_has_a_reader(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_mixture(tmp_path, hard_mixture(tmp_path))
    code, out, _ = run(capsys, monkeypatch, path, "--json", "--cpus", 4, "--memory", "4GiB")
    assert code == 0
    found = json.loads(out)
    plan = Partition.from_json(found["partition"])
    shares = {one["name"]: one.pop("share") for one in found["sources"]}
    assert shares == pytest.approx({"filtered": 0.3, "long": 0.4, "short": 0.1, "tripled": 0.2})
    profiles = [SourceProfile.from_json(one) for one in found["sources"]]
    budget = Budget(cpus=4, memory_bytes=4 << 30)
    assert partition(profiles, shares, plan.demand_tokens_per_s, budget) == plan
    assert plan.shortfalls == ()
    assert plan.cpus == pytest.approx(4), "by default all processors have something to do"
    assert set(plan.num_actors()) == set(shares)


def test_tables_show_sources_and_actors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mixture = hard_mixture(tmp_path)
    mixture["sources"]["[é]"] = mixture["sources"].pop("long")
    path = write_mixture(tmp_path, mixture)
    code, out, _ = run(capsys, monkeypatch, path, "--tokens-per-second", 1)
    assert code == 0
    for text in ("CPU ms per sample", "bytes per sample", "resident", "[é], filtered, short, tripled"):
        assert text in out
    assert "1 tokens/s of 1, by 1 actors" in out
    assert "!" not in out


def test_what_the_budget_lacks_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_mixture(tmp_path, hard_mixture(tmp_path))
    code, out, _ = run(
        capsys, monkeypatch, path, "--tokens-per-second", 1e12, "--cpus", 0.5, "--memory", "100 MB"
    )
    assert code == 0
    assert "processors are needed" in out
    assert "of memory are needed" in out
    assert "one reader for each source alone takes 12" in out


def test_many_sources_of_an_actor_are_cut_short(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_parquet(tmp_path / "data.parquet", token_rows(0, 20, 10))
    sources = {f"s{i:02}": {"path": "data.parquet", "weight": 1} for i in range(12)}
    path = write_mixture(tmp_path, {"seq_len": 64, "packs": 4, "sources": sources})
    code, out, _ = run(capsys, monkeypatch, path, "--tokens-per-second", 1)
    assert code == 0
    assert "s07 and 4 more" in out


BAD: dict[str, tuple[list[Any], str]] = {
    "memory that is no size": (["--memory", "8Gib"], "--memory: '8Gib' is not a size"),
    "no memory": (["--memory", "0"], "--memory: '0' is not a size"),
    "override of no key": (["packz=3"], "unknown key 'packz'"),
    "endless processors": (["--cpus", "inf"], "budget: cpus is inf"),
    "endless demand": (["--tokens-per-second", "inf"], "a demand of inf"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_exit_code_2(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    args, message = BAD[case]
    code, out, err = run(capsys, monkeypatch, write_mixture(tmp_path, hard_mixture(tmp_path)), *args)
    assert code == 2
    assert err.splitlines()[-1].startswith("error: ")
    assert message in err
    assert not out


def test_a_damaged_or_empty_source_ends_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_mixture(tmp_path, hard_mixture(tmp_path))
    (tmp_path / "short.parquet").write_bytes((tmp_path / "short.parquet").read_bytes()[:-100])
    code, _, err = run(capsys, monkeypatch, path)
    assert code == 2
    assert "short.parquet" in err
    write_parquet(tmp_path / "short.parquet", [])
    code, _, err = run(capsys, monkeypatch, path)
    assert code == 2
    assert "source 'short' gave no token in a whole pass" in err
    assert err.count("error: ") == 1
