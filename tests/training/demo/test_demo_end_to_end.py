"""The proof against the real trainer: it passes for a correct resume and fails for each fault made on purpose."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from training.demo import data
from training.demo.errors import RunError, RunTimeoutError
from training.demo.evidence import Layout
from training.demo.export import convert, export_problems, exported_tensors, final_tensors
from training.demo.families import FamilyResult, RunResult, checkpoint_of, run_family
from training.demo.plan import Family, RunPlan
from training.demo.runs import launch

pytestmark = pytest.mark.slow

SIZE = data.MixtureSize(steps=6, seq_len=128, packs=8, lanes=2, switch_step=3)
SMALL = (
    "model.num_layers=1",
    "model.hidden_size=32",
    "model.intermediate_size=64",
    "model.num_heads=2",
    "model.num_kv_heads=2",
    "optimizer.clip_norm=0.2",
)
TWO_BY_ONE, ONE_BY_TWO = Layout(dp=2, tp=1), Layout(dp=1, tp=2)


class Silent:
    """Shows nothing; remembers what it was told."""

    def __init__(self) -> None:
        self.progress: dict[str, list[int]] = {}

    @contextmanager
    def watch(self, plan: RunPlan, steps: range) -> Iterator[Callable[[int], None]]:
        yield self.progress.setdefault(plan.name, [len(steps)]).append

    def ended(self, result: RunResult) -> None:
        assert result.seconds > 0


def resumed(name: str, *faults: str) -> RunPlan:
    return RunPlan(
        name=name, layout=ONE_BY_TWO, resume_from="reference", resume_step=3, overrides=(*SMALL, *faults)
    )


FAMILY = Family(
    dtype="float32",
    steps=6,
    checkpoint_every=3,
    rtol=1e-5,
    reference=RunPlan(name="reference", layout=TWO_BY_ONE, overrides=SMALL),
    others=(
        resumed("correct"),
        resumed("optimizer dropped", "faults.drop_optimizer=true"),
        resumed("lane skipped", "faults.skip_lane=[4,1]"),
        resumed("sample repeated", "faults.repeat_sample=4"),
    ),
)


@pytest.fixture(scope="module")
def mixture(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return data.build(tmp_path_factory.mktemp("data"), SIZE, library=library).mixture


@pytest.fixture(scope="module")
def result(mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> FamilyResult:
    """One reference and four runs resumed from it, three of them with a fault."""
    watcher = Silent()
    directory = tmp_path_factory.mktemp("runs")
    result = run_family(FAMILY, directory=directory, mixture=mixture, timeout_s=120.0, watcher=watcher)
    assert list(watcher.progress) == [run.plan.name for run in result.runs]
    return result


def test_the_proof_passes_exactly_for_the_correct_run(result: FamilyResult) -> None:
    """Each fault breaks the claims it should; the numbers alone would have told every one of them."""
    failed: dict[str, set[str]] = {run.plan.name: set() for run in result.runs}
    for check in result.prove(lanes=SIZE.lanes):
        if not check.passed:
            failed[check.run].add(check.claim)
    numbers = {"same loss", "same gradient norm"}
    assert failed == {
        "reference": set(),
        "correct": set(),
        "optimizer dropped": {*numbers},
        "lane skipped": {"log complete", "same samples, packs, lanes", *numbers},
        "sample repeated": {"same samples, packs, lanes", *numbers},
    }


def test_the_export_is_the_state_in_memory_of_the_same_run_only(result: FamilyResult, tmp_path: Path) -> None:
    by_name = {run.plan.name: run for run in result.runs}
    source, steps = checkpoint_of(by_name["correct"].directory)
    assert steps == FAMILY.steps
    convert(source, tmp_path / "export")
    exported = exported_tensors(tmp_path / "export")
    assert export_problems(final_tensors(by_name["correct"].directory), exported) == []
    assert export_problems(final_tensors(by_name["optimizer dropped"].directory), exported)


def start(plan: RunPlan, mixture: Path, directory: Path, timeout_s: float) -> None:
    launch(
        plan,
        FAMILY,
        directory=directory,
        mixture=mixture,
        resume=None,
        steps=range(FAMILY.steps),
        timeout_s=timeout_s,
        on_progress=lambda _: None,
    )


@pytest.mark.parametrize("kill_after", [None, 5])
def test_a_run_that_cannot_start_is_reported_with_what_it_said(
    mixture: Path, tmp_path: Path, kill_after: int | None
) -> None:
    """Also a run that was to be killed: dying of something else is not what was planned."""
    plan = RunPlan(name="bad", layout=ONE_BY_TWO, kill_after=kill_after, overrides=("optimizer.lrr=1",))
    with pytest.raises(RunError, match=r"run bad e(?s:.*)unknown key 'optimizer\.lrr'"):
        start(plan, mixture, tmp_path / "bad", timeout_s=60.0)


def test_a_run_past_its_time_limit_is_ended_and_named(mixture: Path, tmp_path: Path) -> None:
    plan = RunPlan(name="late", layout=ONE_BY_TWO, overrides=SMALL)
    with pytest.raises(RunTimeoutError, match="run late had logged 0 steps at its time limit"):
        start(plan, mixture, tmp_path / "late", timeout_s=0.5)
    left = [path for path in Path("/proc").glob("[0-9]*/cmdline") if _mentions(path, str(tmp_path / "late"))]
    assert left == []


def _mentions(cmdline: Path, argument: str) -> bool:
    try:
        return argument.encode() in cmdline.read_bytes()
    except OSError:  # it ended meanwhile
        return False
