"""`omniload ckpt ls` and `inspect`: names are shown as they are, and one bad checkpoint hides no other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from typer.testing import CliRunner

import checkpoint
from checkpoint.cli import app


def test_names_that_look_like_markup_are_shown_as_they_are(tmp_path: Path) -> None:
    name = "step[bold]1 :smile:"
    state = {"red": {"a[/b]": torch.ones(2), ":smile:": torch.ones(1)}}
    checkpoint.save(tmp_path / name, state, user_metadata={"[u]": "[/x]"})
    listed = CliRunner().invoke(app, ["ls", str(tmp_path)], env={"COLUMNS": "200"})
    assert listed.exit_code == 0
    assert name in listed.stdout
    inspected = CliRunner().invoke(app, ["inspect", str(tmp_path / name)])
    assert inspected.exit_code == 0
    for text in ("a[/b]", ":smile:", "[u]: [/x]"):
        assert text in inspected.stdout


def test_a_checkpoint_that_cannot_be_read_hides_no_other(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        checkpoint.save(tmp_path / f"step-{step}", {"extra": {"n": step}}, step=step)
    (tmp_path / "step-2" / "manifest.json").write_text("{}")
    listed = CliRunner().invoke(app, ["ls", str(tmp_path)], env={"COLUMNS": "200"})
    assert listed.exit_code == 2
    assert [line.split()[0] for line in listed.stdout.splitlines()[1:]] == ["step-1", "step-3"]
    assert listed.stderr.count("\n") == 1
    assert "step-2" in listed.stderr


def test_what_the_terminal_cannot_show_is_escaped(tmp_path: Path) -> None:
    path = tmp_path / "größe"
    checkpoint.save(path, {"extra": {"w": torch.ones(2), "ü": torch.ones(1)}}, user_metadata={"é": "ñ"})
    for command in (["ls", str(tmp_path)], ["inspect", str(path)], ["verify", str(path)]):
        done = subprocess.run(
            [sys.executable, "-c", "from checkpoint.cli import app; app()", *command],
            env={**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "300"},
            capture_output=True,
            timeout=60,
        )
        assert (done.returncode, done.stderr) == (0, b"")
        assert b"gr\\xf6\\xdfe" in done.stdout
