"""Configurations: what is accepted is honoured, what is not is refused in one line that helps."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from training.__main__ import main
from training.config import TrainConfig
from training.errors import ConfigError

DEMO = Path(__file__).parents[2] / "training" / "configs" / "demo.yaml"


def test_shipped_configuration_is_valid():
    assert TrainConfig.load(DEMO).parallel.tp == 2


def test_overrides_replace_values_at_any_depth():
    config = TrainConfig.load(
        DEMO, ["steps=6", "optimizer.lr=3e-4", "faults.skip_lane=[3, 1]", "resume=runs/a/checkpoints"]
    )
    assert (config.steps, config.optimizer.lr, config.faults.skip_lane) == (6, 3e-4, (3, 1))
    assert config.resume == "runs/a/checkpoints"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("stepz=3", r"unknown key 'stepz'; did you mean 'steps'\?"),
        ("optimizer.clipnorm=3", r"unknown key 'optimizer.clipnorm'; did you mean 'clip_norm'\?"),
        ("parallel.zz=3", r"unknown key 'parallel.zz'; known are: tp"),
        ("steps=0", r"steps: input should be greater than or equal to 1, got 0"),
        ("dtype=int8", r"dtype: input should be 'float32' or 'float64', got 'int8'"),
        ("model.num_heads=5", r"model: hidden_size 128 is not an even multiple of num_heads 5"),
        ("model.num_kv_heads=3", r"model: num_kv_heads 3 does not divide num_heads 4"),
        ("steps", r"override 'steps' is not of the form key=value"),
        ("steps.more=1", r"override 'steps.more=1': 'steps' is a value"),
        ("steps=[", r"override 'steps=\[': the value is not valid YAML"),
    ],
)
def test_bad_values_are_refused_by_name(override, expected):
    with pytest.raises(ConfigError, match=expected) as caught:
        TrainConfig.load(DEMO, [override])
    assert "\n" not in str(caught.value)


def test_missing_keys_are_named(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"out": "x", "mixture": "m.yaml", "steps": 1}))
    with pytest.raises(ConfigError, match=r"config\.yaml: 'model' is missing"):
        TrainConfig.load(path)


@pytest.mark.parametrize(
    ("text", "expected"), [(None, "no such"), ("[1]", "no mapping"), ("a: [", "not valid YAML")]
)
def test_unreadable_files_are_refused(tmp_path, text, expected):
    path = tmp_path / "config.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=expected):
        TrainConfig.load(path)


def test_command_answers_a_bad_configuration_with_one_line(capsys):
    """Exit code 2, one line on stderr, nothing on stdout, no torch imported for it."""
    assert main(["--config", str(DEMO), "stepz=3"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [f"error: {DEMO}: unknown key 'stepz'; did you mean 'steps'?"]


def test_a_mistake_that_all_ranks_find_is_told_by_the_first_before_another_can_end_the_job(tmp_path):
    config = tmp_path / "bad.yaml"
    config.write_text("no_such_key: 1\n")
    command = [sys.executable, "-m", "training", "--config", str(config)]
    other = subprocess.Popen(command, env=os.environ | {"RANK": "1"}, stderr=subprocess.PIPE)
    try:
        first = subprocess.run(
            command,
            env=os.environ | {"RANK": "0"},
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
        assert first.returncode == 2
        assert first.stderr.startswith("error: ")
        assert other.poll() is None, "it waits for the first to tell"
    finally:
        other.kill()
        other.communicate()
