"""The harness itself: order of runs, medians, ratios, files written, and a run of the real thing at small size."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from benchmarks import __main__ as command
from benchmarks import machine, registry, report
from benchmarks.definition import Benchmark, Contender, Kind, Measure, Settings
from benchmarks.harness import Sample, interleave
from benchmarks.summary import Spread, summarise

RATE = Measure(name="copy", unit="kB/s", scale=1e3, higher_is_better=True, reference="floor")
DURATION = Measure(name="wait", unit="ms", scale=1e-3, higher_is_better=False, reference="floor")


def contender(name: str, measure: Measure = RATE, *, log: list[str] | None = None) -> Contender:
    """A contender that notes its calls in ``log`` and does 10 units of work."""
    calls = [] if log is None else log

    def run() -> int:
        calls.append(name)
        return 10

    return Contender(name=name, measure=measure.name, kind=Kind.FLOOR, run=run)


def benchmark(contenders: Sequence[Contender], *measures: Measure) -> Benchmark:
    @contextmanager
    def as_they_are(_: Settings) -> Iterator[Sequence[Contender]]:
        yield contenders

    return Benchmark(
        name="trivial",
        measures_what="Nothing.",
        how_to_read="Not at all.",
        measures=measures,
        contenders=as_they_are,
    )


def samples(*seconds: float, work: int = 1000) -> list[Sample]:
    return [Sample(work=work, seconds=each, cpu_seconds=2 * each) for each in seconds]


def test_rounds_alternate_in_direction_after_one_warm_up_of_each():
    log: list[str] = []
    taken = interleave([contender(name, log=log) for name in "abc"], 3)
    assert "".join(log) == "cba" + "abc" + "cba" + "abc"
    assert [len(own) for own in taken] == [3, 3, 3]
    assert all(sample.work == 10 and sample.seconds > 0 for own in taken for sample in own)


def test_hooks_surround_every_run_and_are_not_timed():
    log: list[str] = []

    def clock() -> float:
        log.append("clock")
        return 0.0

    one = Contender(
        name="one",
        measure="copy",
        kind=Kind.OURS,
        run=lambda: log.append("run") or 1,
        before=lambda: log.append("before"),
        after=lambda: log.append("after"),
        cpu_seconds=clock,
    )
    interleave([one], 1)
    assert log == ["before", "clock", "run", "clock", "after"] * 2


def test_processor_time_is_read_from_the_contenders_own_clock():
    ticks = iter(range(100))
    one = Contender(
        name="one", measure="copy", kind=Kind.PEER, run=lambda: 1, cpu_seconds=lambda: float(next(ticks))
    )
    [own] = interleave([one], 2)
    assert [sample.cpu_seconds for sample in own] == [1.0, 1.0]


def test_a_failure_names_the_contender_and_its_measure():
    def fail() -> int:
        raise OSError("disk full")

    broken = Contender(name="broken", measure="copy", kind=Kind.PEER, run=fail)
    with pytest.raises(RuntimeError, match="copy: contender 'broken' failed: disk full") as caught:
        interleave([broken], 1)
    assert isinstance(caught.value.__cause__, OSError)


def test_at_least_one_round():
    with pytest.raises(ValueError, match="repeats: 0"):
        interleave([contender("a")], 0)


def test_rates_and_durations_have_median_range_and_ratio_within_the_round():
    runs = [contender("floor"), contender("ours"), contender("floor", DURATION), contender("ours", DURATION)]
    taken = [samples(1, 2, 4), samples(2, 2, 2), samples(1, 3, 2), samples(2, 3, 8)]
    rates = summarise(benchmark(runs, RATE, DURATION), runs, taken)
    assert [(s.measure.name, s.name) for s in rates] == [
        ("copy", "floor"),
        ("copy", "ours"),
        ("wait", "floor"),
        ("wait", "ours"),
    ]
    assert rates[0].value == Spread(median=0.5, low=0.25, high=1.0)
    assert rates[0].ratio == Spread(median=1, low=1, high=1)
    # 0.5 against 1, 0.5 and 0.25: the ratio of the medians would be 1 with no range at all.
    assert rates[1].ratio == Spread(median=1, low=0.5, high=2)
    assert rates[3].value == Spread(median=3000, low=2000, high=8000)
    assert rates[3].ratio == Spread(median=2, low=1, high=4)
    assert rates[0].busy_cores == 2


def test_a_round_whose_reference_is_0_has_no_ratio(tmp_path: Path):
    count = Measure(name="waits", unit="s", scale=1, higher_is_better=False, reference="floor", timed=False)
    runs = [contender("floor", count), contender("ours", count)]
    place = machine.describe(tmp_path)

    def ratio(floor: Sequence[int], ours: Sequence[int]) -> Spread | None:
        taken = [[Sample(work=each, seconds=1, cpu_seconds=1) for each in own] for own in (floor, ours)]
        found = summarise(benchmark(runs, count), runs, taken)
        Console(file=io.StringIO()).print(report.render(benchmark(runs, count), place, found))
        settings = Settings(quick=True, directory=tmp_path)
        report.write_json(
            tmp_path / "waits.json", report.to_json(benchmark(runs, count), settings, place, found)
        )
        return found[1].ratio

    assert ratio([0, 2], [1, 3]) == Spread(median=1.5, low=1.5, high=1.5)
    assert ratio([0, 0], [1, 0]) is None
    assert json.loads((tmp_path / "waits.json").read_text())["results"][1]["ratio"] is None


def test_a_measure_without_its_reference_is_refused():
    runs = [contender("ours")]
    with pytest.raises(ValueError, match="no contender 'floor' for 'copy'"):
        summarise(benchmark(runs, RATE), runs, [samples(1)])


def test_json_holds_machine_settings_and_every_sample(tmp_path: Path):
    runs = [contender("floor"), contender("ours")]
    trivial = benchmark(runs, RATE)
    place = machine.describe(tmp_path)
    found = summarise(trivial, runs, interleave(runs, 2))
    settings = Settings(quick=True, directory=tmp_path)
    report.write_json(tmp_path / "new" / "trivial.json", report.to_json(trivial, settings, place, found))
    outcome = json.loads((tmp_path / "new" / "trivial.json").read_text())
    assert outcome.keys() == {"version", "benchmark", "finished", "settings", "machine", "results"}
    assert outcome["machine"].keys() == {
        "cpu",
        "cores",
        "memory_bytes",
        "load_average",
        "system",
        "kernel",
        "python",
        "libraries",
        "filesystem",
    }
    assert outcome["machine"]["cores"] >= 1
    first, second = outcome["results"]
    assert (first["contender"], second["contender"]) == ("floor", "ours")
    assert second["value"].keys() == second["ratio"].keys() == {"median", "low", "high"}
    assert len(second["samples"]) == 2
    assert second["samples"][0].keys() == {"work", "seconds", "cpu_seconds"}
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["trivial.json"]


def test_table_shows_every_contender(tmp_path: Path):
    runs = [contender("floor"), contender("ours")]
    found = summarise(benchmark(runs, RATE), runs, [samples(1, 1), samples(2, 4)])
    console = Console(width=160, file=io.StringIO())
    console.print(report.render(benchmark(runs, RATE), machine.describe(tmp_path), found))
    text = console.file.getvalue()
    assert "kB/s, more is better" in text
    row = next(line for line in text.splitlines() if "ours" in line)
    assert "0.375" in row
    assert "0.250 … 0.500" in row


def test_a_run_prints_tables_and_writes_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    trivial = benchmark([contender("floor"), contender("ours")], RATE)
    command.run_one(trivial, Settings(quick=True, directory=tmp_path), 3, tmp_path)
    outcome = json.loads((tmp_path / "trivial.json").read_text())
    assert [len(result["samples"]) for result in outcome["results"]] == [3, 3]
    assert "ours" in capsys.readouterr().out


def test_a_part_of_a_benchmark_runs_alone_and_has_a_file_of_its_own(tmp_path: Path):
    log: list[str] = []
    runs = [contender("floor", log=log), contender("floor", DURATION, log=log)]
    settings = Settings(quick=True, directory=tmp_path)
    command.run_one(benchmark(runs, RATE, DURATION), settings, 2, tmp_path, "wait")
    outcome = json.loads((tmp_path / "trivial-wait.json").read_text())
    assert [result["measure"] for result in outcome["results"]] == ["wait"]
    assert len(log) == 3, "a warm-up and two rounds of the one measure, none of the other"
    with pytest.raises(typer.BadParameter, match="trivial measures copy; wait"):
        command.run_one(benchmark(runs, RATE, DURATION), settings, 2, tmp_path, "nothing")


def test_what_is_not_timed_is_not_warmed_up(tmp_path: Path):
    log: list[str] = []
    counted = replace(RATE, timed=False)
    trivial = benchmark([contender("floor", counted, log=log)], counted)
    command.run_one(trivial, Settings(quick=True, directory=tmp_path), 2, tmp_path)
    assert log == ["floor"] * 2


def test_the_command_line_refuses_what_is_not_there(tmp_path: Path):
    runner = CliRunner()
    unknown = runner.invoke(command.app, ["run", "loader"])
    assert unknown.exit_code == 2
    nowhere = runner.invoke(command.app, ["run", "loader_packed", "--dir", str(tmp_path / "nowhere")])
    assert nowhere.exit_code == 2
    assert not list(tmp_path.iterdir())


def test_every_registered_benchmark_is_described():
    for name in registry.NAMES:
        found = registry.find(name)
        assert found.measures_what.endswith(".")
        assert found.measures


def test_an_unknown_benchmark_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'loader_packed'"):
        registry.find("loader-packed")
