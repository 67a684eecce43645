"""The demo's own files: where it may write, what the export is compared with, how the proof is printed."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
import xxhash
from rich.console import Console
from safetensors.numpy import save_file

from training.demo.cli import proof_table
from training.demo.demo import prepare_output
from training.demo.errors import LogError, OutputError
from training.demo.evidence import Check
from training.demo.export import export_problems, exported_tensors, final_tensors
from training.demo.plan import default_plan


def test_output_of_an_earlier_demo_is_replaced(tmp_path: Path) -> None:
    out = prepare_output(tmp_path / "a" / "demo")
    (out / "runs").mkdir()
    (out / "runs" / "old.log").touch()
    (out / "report.html").touch()
    assert prepare_output(out) == out
    assert [path.name for path in out.iterdir()] == [".omniload-demo"]


def test_foreign_files_are_never_removed(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(OutputError, match="no earlier demo wrote"):
        prepare_output(tmp_path)
    with pytest.raises(OutputError, match="is a file"):
        prepare_output(tmp_path / "thesis.tex")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_link_in_the_output_is_removed_but_not_followed(tmp_path: Path) -> None:
    out = prepare_output(tmp_path / "demo")
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").touch()
    (out / "data").symlink_to(tmp_path / "precious")
    prepare_output(out)
    assert (tmp_path / "precious" / "file").exists()
    assert not (out / "data").exists()


def test_export_is_compared_bit_for_bit(tmp_path: Path) -> None:
    """A zero with the other sign is equal as a number and still a difference; so are type, shape and name."""
    tensors = {"a": np.zeros((2, 3), np.float32), "b": np.arange(4, dtype=np.float64)}
    rows = {
        name: {
            "dtype": str(array.dtype),
            "shape": list(array.shape),
            "xxh3_128": xxhash.xxh3_128_hexdigest(array.tobytes()),
        }
        for name, array in tensors.items()
    }
    (tmp_path / "final_state.json").write_text(json.dumps({"step": 1, "tensors": rows}))
    memory = final_tensors(tmp_path)
    spoiled = {
        "same": (tensors, []),
        "sign": ({**tensors, "a": -tensors["a"]}, ["a differs from memory"]),
        "dtype": ({**tensors, "b": tensors["b"].astype(np.float32)}, ["b differs from memory"]),
        "shape": ({**tensors, "a": tensors["a"].reshape(3, 2)}, ["a differs from memory"]),
        "missing": ({"a": tensors["a"]}, ["b is missing in the export"]),
        "extra": ({**tensors, "c": tensors["b"]}, ["c is in the export but not in memory"]),
    }
    for name, (arrays, problems) in spoiled.items():
        (tmp_path / name).mkdir()
        save_file(arrays, tmp_path / name / "model.safetensors")
        assert export_problems(memory, exported_tensors(tmp_path / name)) == problems, name


def test_an_export_without_files_or_with_a_tensor_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="no safetensors file"):
        exported_tensors(tmp_path)
    for index in range(2):
        save_file({"a": np.zeros(2, np.float32)}, tmp_path / f"model-{index}.safetensors")
    with pytest.raises(LogError, match="holds a, which another file"):
        exported_tensors(tmp_path)


def test_a_run_without_final_state_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LogError, match=r"final_state\.json"):
        final_tensors(tmp_path)


def test_default_plan_is_consistent() -> None:
    """At most eight launches; every layout divides the lanes; what is resumed from was run before."""
    plan = default_plan()
    runs = [run for family in plan.families for run in family.runs]
    assert len(runs) <= 8
    assert len({run.name for run in runs}) == len(runs)
    for index, run in enumerate(runs):
        assert plan.size.lanes % run.layout.dp == 0
        assert run.resume_from is None or run.resume_from in {earlier.name for earlier in runs[:index]}
    assert plan.exported in {run.name for run in runs if run.kill_after is None}
    assert all(family.steps <= plan.size.steps for family in plan.families)


def test_table_shows_pass_and_fail() -> None:
    def check(passed: bool) -> Check:
        return Check(
            run="a[b]", layout="dp2 × tp1", steps=range(3, 5), claim="c", passed=passed, detail="d[/x]"
        )

    console = Console(width=120, record=True, file=io.StringIO())
    console.print(proof_table((check(True), check(False))))
    text = console.export_text()
    assert "PASS" in text
    assert "FAIL" in text
    assert "a[b]" in text
    assert "d[/x]" in text
    assert "3–4" in text
