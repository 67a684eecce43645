"""``omniload data plan``: what it says of a run is what the run then does, and bad input ends in one line."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omniload import DataLoader
from omniload.forecasting.dry_run import DryRun
from omniload.forecasting.evenness import PLANNED, RANDOM, TOKENS, Evenness, ways_to_balance
from omniload.mixture import Mixture
from omniload.placing import ClientPlaceTree
from omniload.planner.balancing import METHODS
from omniload.planner.rules import StepRules
from tests.omniload.mixtures import hard_mixture, token_rows, write_parquet
from tests.omniload.test_cli import run as run_command
from tests.omniload.test_cli import write_mixture


def run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *args: object
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of ``omniload data plan *args``."""
    return run_command(capsys, monkeypatch, "data", "plan", *args)


def balanced(folder: Path, **keys: Any) -> dict[str, Any]:
    """Documents of very different lengths, several packs to a lane."""
    lengths = np.random.default_rng(3).lognormal(3.5, 1.2, 600).clip(2, 512).astype(int)
    write_parquet(folder / "a.parquet", [[1] * n for n in lengths.tolist()])
    write_parquet(folder / "b.parquet", token_rows(1, 300, 40))
    return {
        "seq_len": 512,
        "packs": 24,
        "lanes": 8,
        "sources": {
            "a": {"path": str(folder / "a.parquet"), "weight": 3, "on_exhausted": "repeat"},
            "b": {"path": str(folder / "b.parquet"), "weight": 1, "on_exhausted": "repeat"},
        },
        **keys,
    }


def test_the_numbers_are_those_of_the_run_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_mixture(tmp_path, hard_mixture(tmp_path / "data"))
    code, out, _ = run(capsys, monkeypatch, path, "--steps", 20, "--mesh", "dp=4,pp=2", "--json")
    assert code == 0
    found = json.loads(out)
    with DataLoader(path) as loader:
        lanes = [lane for step in islice(loader.steps(), 20) for lane in step]
        ledger = loader.ledger()
    real = sum(int((lane["segment_ids"] > 0).sum()) for lane in lanes)
    room = sum(lane["input_ids"].numel() for lane in lanes)
    assert (found["tokens"], found["places"]) == (real, room)
    assert found["padding"] == 1 - real / room > 0
    assert [one["name"] for one in found["sources"]] == list(ledger.sources)
    for one in found["sources"]:
        account = ledger.sources[one["name"]]
        assert one["tokens"] == account.emitted_tokens
        assert one["samples"] == account.emitted_samples
        assert one["realised"] == account.share
    short = next(one for one in found["sources"] if one["name"] == "short")
    assert short["ran_out"]
    assert ledger.sources["short"].exhausted
    assert short["epochs"] == 1.0
    assert any("'short' gave its last sample at step" in remark for remark in found["remarks"])


def test_passes_are_exact_once_a_source_was_read_through(tmp_path: Path) -> None:
    mixture = Mixture.load(hard_mixture(tmp_path))
    rows = {"filtered": 40 + 41 + 42, "long": 45, "short": 30, "tripled": 100}
    with DryRun(mixture) as dry:
        for _ in islice(dry.plans(), 150):
            pass
        epochs = [source.cursor.epoch for source in dry.state.sources]
        sizes = [size.rows(source.cursor) for size, source in zip(dry.sizes, dry.state.sources, strict=True)]
    assert dry.state.sources[2].exhausted
    assert min(epochs[:2] + epochs[3:]) >= 1, "the others were all read more than once"
    assert dict(zip(mixture.names, sizes, strict=True)) == rows


@pytest.mark.parametrize("shuffle", ["window", "none"])
def test_the_step_that_a_source_runs_out_at_is_foretold_from_a_few(
    shuffle: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mixture = balanced(tmp_path, shuffle=shuffle, steps=1000)
    for i in range(8):
        write_parquet(tmp_path / f"many/{i}.parquet", token_rows(i, 150, 40))
    mixture["sources"]["b"] = {"path": str(tmp_path / "many"), "weight": 1, "repeat": 2}
    path = write_mixture(tmp_path, mixture)
    code, out, _ = run(capsys, monkeypatch, path, "--steps", 8, "--json")
    assert code == 0
    found = json.loads(out)
    [remark] = found["remarks"]
    assert "'b' will give its last sample at about step" in remark
    assert "of 1,000 and ends the stream" in remark
    with DryRun(Mixture.load(path)) as dry:
        last = sum(1 for _ in dry.plans())
    assert not found["sources"][1]["ran_out"]
    assert found["sources"][1]["runs_out_at"] == pytest.approx(last, rel=0.1)


def test_ways_are_compared_on_the_same_packs(tmp_path: Path) -> None:
    mixture = Mixture.load(balanced(tmp_path))
    rules = StepRules.of(mixture)
    with DryRun(mixture) as dry:
        plan = next(dry.plans())
    ways = ways_to_balance(plan, rules)
    assert set(ways) == {PLANNED, RANDOM, TOKENS, *METHODS} - {"none"}
    totals = {name: costs.sum(axis=1).tolist() for name, costs in ways.items()}
    assert len({tuple(total) for total in totals.values()}) == 1, "no pack is lost, and none is there twice"
    assert ways[PLANNED].tolist() == plan.lane_costs.tolist()
    tree = ClientPlaceTree.parse("dp=4,pp=2")
    even = {name: Evenness.of_step(costs, tree) for name, costs in ways.items()}
    assert even["kk"].over_lanes <= even["lpt"].over_lanes < even[RANDOM].over_lanes
    assert even["lpt"].time < even[RANDOM].time


def test_even_lanes_are_even_and_an_idle_lane_shows() -> None:
    tree = ClientPlaceTree.parse("dp=2,pp=2")
    even = Evenness.of_step(np.full((1, 4), 7), tree)
    assert (even.over_lanes, even.over_ranks, even.worst) == (1, 1, 1)
    # Lanes 0 and 2 are of rank 0.
    skewed = Evenness.of_step(np.array([[3, 1, 3, 1], [0, 4, 0, 4]]), tree)
    assert skewed.over_ranks == 2 * 10 / 16
    assert skewed.by_module == (2 * 6 / 8, 2.0)
    assert Evenness.of_steps([even, even]).time == 2 * even.time


def test_tables_and_picture_show_every_source_and_every_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mixture = balanced(tmp_path)
    mixture["sources"]["<&é"] = mixture["sources"].pop("b")
    path = write_mixture(tmp_path, mixture)
    picture = tmp_path / "plan.svg"
    code, out, _ = run(
        capsys, monkeypatch, path, "--steps", 4, "--mesh", "dp=2,cp=2,pp=2", "--picture", picture
    )
    assert code == 0
    for name in ("a", "<&é", PLANNED, RANDOM, TOKENS, "lpt", "kk", "dp=2,cp=2,pp=2"):
        assert name in out
    drawn = ET.parse(picture).getroot()
    texts = {element.text for element in drawn.iter() if element.tag.endswith("text")}
    assert {"a", "<&é", PLANNED, RANDOM, "kk"} <= texts
    assert all(float(element.get("width", "0").rstrip("%")) >= 0 for element in drawn.iter())


@pytest.mark.parametrize(
    ("packing", "size", "most_padding"), [("none", "lane_tokens", 0.5), ("workload", "packs", 0.0)]
)
def test_where_packing_decides_the_lanes_only_the_plan_itself_is_judged(
    packing: str,
    size: str,
    most_padding: float,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mixture = balanced(tmp_path, packing=packing)
    mixture[size] = {"lane_tokens": 2048, "packs": mixture.pop("packs")}[size]
    path = write_mixture(tmp_path, mixture)
    code, out, _ = run(capsys, monkeypatch, path, "--steps", 4, "--json")
    assert code == 0
    found = json.loads(out)
    assert list(found["ways"]) == [PLANNED]
    assert 0 <= found["padding"] <= most_padding
    assert run(capsys, monkeypatch, path, "--steps", 4)[0] == 0


def test_a_picture_that_cannot_be_written_ends_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_mixture(tmp_path, balanced(tmp_path))
    folder = tmp_path / "folder.svg"
    folder.mkdir()
    code, out, err = run(capsys, monkeypatch, path, "--steps", 2, "--picture", folder)
    assert code == 2
    assert err.count("\n") == 1
    assert "--picture: " in err
    assert "2 steps" in out, "what was planned is shown all the same"


def test_a_stream_that_is_over_at_once_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mixture = balanced(tmp_path, packs=2400)
    mixture["sources"]["b"]["on_exhausted"] = "stop"
    code, out, _ = run(capsys, monkeypatch, write_mixture(tmp_path, mixture), "--steps", 4)
    assert code == 0
    assert "0 steps, 0 tokens" in out
    assert "'b' gave its last sample at step 0" in out


BAD = {
    "mesh that cannot share the lanes": (["--mesh", "dp=3"], "lanes: 8 cannot be shared by"),
    "axis that does not exist": (["--mesh", "dp_shrad=2"], "did you mean 'dp_shard'"),
    "axis twice": (["--mesh", "dp=2,dp=2"], "axis 'dp' is there twice"),
    "mesh of no size": (["--mesh", "dp"], "write it like"),
    "size 0": (["--mesh", "dp=0"], "size of 'dp' is 0"),
    "picture in no folder": (["--picture", "nowhere/x.svg"], "--picture: there is no folder nowhere"),
    "override of no key": (["packz=3"], "unknown key 'packz'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_exit_code_2(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    args, message = BAD[case]
    path = write_mixture(tmp_path, balanced(tmp_path))
    code, out, err = run(capsys, monkeypatch, path, *args)
    assert code == 2
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err
    assert not out


def test_a_truncated_file_ends_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_mixture(tmp_path, balanced(tmp_path))
    data = tmp_path / "a.parquet"
    data.write_bytes(data.read_bytes()[:-100])
    code, _, err = run(capsys, monkeypatch, path)
    assert code == 2
    assert err.count("\n") == 1
    assert "a.parquet" in err


def test_a_ramp_has_shares_in_a_forecast(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ramp = [{"tokens": 20_000_000_000, "ramp": "cosine", "weights": {"a": 1, "b": 3}}]
    path = write_mixture(tmp_path, balanced(tmp_path, schedule=ramp))
    code, out, _ = run(capsys, monkeypatch, path, "--steps", 4, "--json")
    assert code == 0
    shares = [source["declared"] for source in json.loads(out)["sources"]]
    assert shares == pytest.approx([0.75, 0.25], abs=1e-3)


def failing(_: object) -> None:
    """A strategy with a fault."""
    raise KeyError("no such thing")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("strategy=nope:plan", "strategy: nope:plan cannot be imported"),
        ("cost=nope:cost", "cost: nope:cost cannot be imported"),
        ("cost={backbone: {hidden_size: 3}}", "num_hidden_layers"),
    ],
)
def test_what_plans_steps_is_validated_with_the_mixture(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    override: str,
    message: str,
) -> None:
    path = write_mixture(tmp_path, balanced(tmp_path))
    code, _, error = run_command(capsys, monkeypatch, "data", "validate", path, override)
    assert code == 2
    assert message in error
    assert error.count("\n") == 1
    with pytest.raises(ValueError, match=message):
        DataLoader(Mixture.load(path, overrides=[override]))


def test_an_error_in_a_strategy_names_it_and_the_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_mixture(tmp_path, balanced(tmp_path, strategy=f"{__name__}:failing"))
    code, _, error = run(capsys, monkeypatch, path, "--steps", 2)
    assert code == 2
    assert f"strategy {__name__}:failing: step 0: KeyError: 'no such thing'" in error
    assert error.strip().count("\n") == 0


def test_a_picture_is_asked_for_by_its_ending(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_mixture(tmp_path, balanced(tmp_path))
    code, _, error = run(capsys, monkeypatch, path, "--steps", 2, "--picture", tmp_path / "plan.png")
    assert code == 2
    assert "give it a name that ends in .svg" in error
    assert not (tmp_path / "plan.png").exists()
