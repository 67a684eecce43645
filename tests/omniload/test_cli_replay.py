"""``omniload data replay``: the samples of any later step, from a state, are those that a run is given."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import yaml

from omniload import DataLoader
from tests.omniload.mixtures import hard_mixture
from tests.omniload.test_cli import run as run_command

STEPS = 24


def run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *args: object
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of ``omniload data replay *args``."""
    return run_command(capsys, monkeypatch, "data", "replay", *args)


def rows_of(loader: Any, lanes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What `MixtureLoader.samples` says of some lanes, as the command prints it."""
    return [
        {"step": lane["step"], "lane": lane["lane"], **row}
        for lane in lanes
        for row in loader.samples(lane).to_pylist()
    ]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run: its mixture file, its state before every step, one inside step 5 on two ranks, and its samples."""
    folder = tmp_path_factory.mktemp("run")
    path = folder / "mixture.yaml"
    path.write_text(yaml.safe_dump(hard_mixture(folder / "data")))
    states, samples, carried = [], [], 0
    with DataLoader(path) as loader:
        states.append(loader.state_dict())
        for lanes in islice(loader.steps(), STEPS):
            samples.append(rows_of(loader, lanes))
            states.append(loader.state_dict())
            carried += sum(source.carried_tokens for source in loader.ledger().sources.values())
        exhausted = loader.ledger().sources["short"].exhausted
    with DataLoader(path, dp_rank=0, dp_size=2) as half:
        for lane in half:
            if lane["step"] == 5 and lane["lane"] == 4:
                break
        inside = half.state_dict()
    assert exhausted, "a source has left the stream"
    assert carried, "pieces wait for a pack"
    assert inside["lanes_yielded"], "the state is from inside a step"
    return {"folder": folder, "path": path, "states": states, "samples": samples, "inside": inside}


def saved(recorded: dict[str, Any], state: object, name: str = "state.json") -> Path:
    path: Path = recorded["folder"] / name
    path.write_text(json.dumps(state))
    return path


@pytest.mark.parametrize(("at", "step"), [(0, 0), (0, 9), (3, 3), (7, 20), (STEPS - 1, STEPS - 1)])
def test_samples_equal_those_of_a_run(
    at: int,
    step: int,
    recorded: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = saved(recorded, recorded["states"][at])
    code, out, _ = run(capsys, monkeypatch, recorded["path"], "--state", state, "--step", step, "--json")
    assert code == 0
    assert [json.loads(line) for line in out.splitlines()] == recorded["samples"][step]


def test_one_lane_is_that_part_of_the_step_and_the_table_counts_its_pieces(
    recorded: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = saved(recorded, recorded["states"][2])
    args = (recorded["path"], "--state", state, "--step", 6, "--lane", 7)
    wanted = [row for row in recorded["samples"][6] if row["lane"] == 7]
    _, out, _ = run(capsys, monkeypatch, *args, "--json")
    assert [json.loads(line) for line in out.splitlines()] == wanted
    code, out, _ = run(capsys, monkeypatch, *args)
    assert code == 0
    assert f"{len(wanted)} pieces; plan " in out
    assert all(row["file"] in out for row in wanted)


def test_a_state_from_inside_a_step_on_several_ranks_replays_the_whole_step(
    recorded: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = saved(recorded, recorded["inside"])
    code, out, _ = run(capsys, monkeypatch, recorded["path"], "--state", state, "--step", 5, "--json")
    assert code == 0
    assert [json.loads(line) for line in out.splitlines()] == recorded["samples"][5]


def test_decisions_that_a_state_holds_are_heeded(
    recorded: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with DataLoader(recorded["path"]) as loader:
        steps = loader.steps()
        for _ in range(3):
            next(steps)
        first = loader.control.earliest_step
        loader.control.set_weights({"filtered": 0.0, "tripled": 0.5}, at_step=first + 1)
        loader.control.skip_steps(2, at_step=first + 2)
        state = saved(recorded, loader.state_dict(), "decided.json")
        samples = {}
        for lanes in islice(steps, 8):
            samples[lanes[0]["step"]] = rows_of(loader, lanes)
    step = first + 3
    assert samples[step] != recorded["samples"][step], "the decisions change something"
    code, out, _ = run(capsys, monkeypatch, recorded["path"], "--state", state, "--step", step, "--json")
    assert code == 0
    assert [json.loads(line) for line in out.splitlines()] == samples[step]


def test_a_checkpoint_folder_is_as_good_as_a_file(
    recorded: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import checkpoint

    with DataLoader(recorded["path"]) as loader:
        loader.load_state_dict(recorded["states"][4])
        checkpoint.save(recorded["folder"] / "step-4", {"loader": loader, "extra": {"step": 4}})
    args = (recorded["path"], "--state", recorded["folder"] / "step-4", "--step", 6, "--json")
    code, out, _ = run(capsys, monkeypatch, *args)
    assert code == 0
    assert [json.loads(line) for line in out.splitlines()] == recorded["samples"][6]
    code, _, err = run(capsys, monkeypatch, *args, "--key", "data")
    assert code == 2
    assert err.startswith("error: --state: ")
    assert err.count("\n") == 1


def bad_files(recorded: dict[str, Any]) -> dict[str, tuple[Path, str]]:
    state = recorded["states"][3]
    text = recorded["folder"] / "cut.json"
    text.write_text(json.dumps(state)[:-40])
    empty = recorded["folder"] / "empty.json"
    empty.touch()
    binary = recorded["folder"] / "binary.json"
    binary.write_bytes(b"\xff\xfe\x00")
    deep = recorded["folder"] / "deep.json"
    deep.write_text("[" * 100_000)
    other = {**state, "identity": {**state["identity"], "tokenizer": "another"}}
    return {
        "not there": (recorded["folder"] / "no.json", "no.json cannot be read"),
        "truncated": (text, "is not JSON"),
        "empty": (empty, "is not JSON"),
        "binary": (binary, "is not JSON"),
        "nested without end": (deep, "is not JSON"),
        "a list": (saved(recorded, [1], "list.json"), "holds no loader state"),
        "another object": (saved(recorded, {"step": 3}, "object.json"), "version None"),
        "of another mixture": (saved(recorded, other, "other.json"), "the tokenizer changed"),
        "without its stream": (saved(recorded, {**state, "stream": {}}, "gone.json"), "damaged"),
        "a folder that is no checkpoint": (recorded["folder"], "--state: "),
    }


@pytest.mark.parametrize(
    "case",
    [
        "not there",
        "truncated",
        "empty",
        "binary",
        "nested without end",
        "a list",
        "another object",
        "of another mixture",
        "without its stream",
        "a folder that is no checkpoint",
    ],
)
def test_what_is_no_state_of_the_mixture_ends_in_one_line(
    case: str, recorded: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, message = bad_files(recorded)[case]
    code, out, err = run(capsys, monkeypatch, recorded["path"], "--state", path, "--step", 4)
    assert code == 2
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err
    assert not out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--step", 2), "--step: 2 is before step 3"),
        (("--step", 3, "--lane", 12), "--lane: 12 is not in 0..11"),
        (("--step", 9, "steps=6"), "ends before step 6"),
    ],
)
def test_a_step_or_lane_that_is_not_in_the_stream_is_refused_with_the_numbers(
    args: tuple[object, ...],
    message: str,
    recorded: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = saved(recorded, recorded["states"][3])
    code, out, err = run(capsys, monkeypatch, recorded["path"], "--state", state, *args)
    assert code == 2
    assert err.count("\n") == 1
    assert message in err
    assert not out
