"""The demo's six steps, from nothing to a report: data, training, breaking and resuming, proof, export, report."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import yaml
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from training.demo import data, export, report
from training.demo.errors import OutputError
from training.demo.evidence import Check
from training.demo.families import FamilyResult, RunResult, checkpoint_of, run_family
from training.demo.plan import DemoPlan, RunPlan

_MARKER = ".omniload-demo"
_NUM_STEPS = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoResult:
    """What the demo came to."""

    checks: tuple[Check, ...]
    """The proof."""
    report: Path
    """The report file."""

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return all(check.passed for check in self.checks)


def run_demo(out: Path, plan: DemoPlan, console: Console) -> DemoResult:
    """Runs the whole demo.

    Args:
        out: Where everything is written; what an earlier demo left there is removed first.
        plan: Sizes and runs.
        console: Where one line per step is printed, with a progress bar while a step takes long.

    Raises:
        OutputError: `out` holds something that is not an earlier demo.
        CorpusError: The Python installation has no text to train on.
        RunError: A run or the export failed.
        RunTimeoutError: A run did not end in time.
        LogError: A run left something else than the trainer writes.
    """
    start = time.monotonic()
    created = datetime.now(UTC)
    out = prepare_output(out)
    terminal = _Terminal(console)
    facts = _build_data(out, plan, terminal)
    families = [
        run_family(
            family, directory=out / "runs", mixture=facts.mixture, timeout_s=plan.timeout_s, watcher=terminal
        )
        for family in plan.families
    ]
    checks = _prove(families, plan, terminal)
    [exported] = (run for family in families for run in family.runs if run.plan.name == plan.exported)
    checks.append(_export(exported, out / "export", terminal))
    page = out / "report.html"
    report.write_report(
        page,
        families=families,
        checks=checks,
        data=facts,
        mixture=yaml.safe_load(facts.mixture.read_text(encoding="utf-8")),
        created=created,
        total_seconds=time.monotonic() - start,
    )
    terminal.say(6, "report", f"{page.stat().st_size / 1e3:.0f} kB in {page}")
    return DemoResult(checks=tuple(checks), report=page)


def prepare_output(out: Path) -> Path:
    """Makes an empty output directory, removing what an earlier demo left there.

    Returns:
        The absolute path.

    Raises:
        OutputError: There is something else; nothing is removed.
    """
    out = out.absolute()
    if out.exists() and not out.is_dir():
        raise OutputError(f"{out}: is a file; choose another --out")
    if out.is_dir() and any(out.iterdir()) and not (out / _MARKER).is_file():
        raise OutputError(f"{out}: holds files that no earlier demo wrote; choose another --out or empty it")
    if out.is_dir():
        for child in out.iterdir():
            if child.is_dir() and not child.is_symlink():
                shutil.rmtree(child)
            elif child.name != _MARKER:
                child.unlink()
    out.mkdir(parents=True, exist_ok=True)
    (out / _MARKER).touch()
    return out


class _Terminal:
    """Prints a line per step of the demo, and a progress bar while a run goes on."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def say(self, number: int, name: str, text: str, seconds: float | None = None) -> None:
        """Prints what a step of the demo came to, and how long it took."""
        took = f" [dim]({seconds:.1f} s)[/dim]" if seconds is not None else ""
        line = f"[bold]{number}/{_NUM_STEPS} {name:<6}[/bold]  {escape(text)}{took}"
        self.console.print(line, highlight=False, soft_wrap=True)

    @contextlib.contextmanager
    def bar(self, name: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
        """Shows a progress bar; gives what to tell how much is done."""
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn(unit),
            TimeElapsedColumn(),
        )
        # Without a terminal a bar would only leave empty lines.
        disable = not self.console.is_terminal
        with Progress(*columns, console=self.console, transient=True, disable=disable) as progress:
            task = progress.add_task(escape(name), total=total)
            yield lambda done: progress.update(task, completed=done)

    @contextlib.contextmanager
    def watch(self, plan: RunPlan, steps: range) -> Iterator[Callable[[int], None]]:
        """Shows a progress bar while a run goes on."""
        with self.bar(f"{plan.name} ({plan.layout})", len(steps), "steps") as done:
            yield done

    def ended(self, result: RunResult) -> None:
        """Prints a line for a run that ended."""
        plan, steps = result.plan, result.evidence.steps
        text = f"{plan.name}: {plan.layout}, {result.dtype}, steps {steps.start}–{steps.stop - 1}"
        if plan.kill_after is not None:
            text += ", then killed"
        number, name = (3, "resume") if plan.resume_from is not None else (2, "train")
        self.say(number, name, text, result.seconds)


def _build_data(out: Path, plan: DemoPlan, terminal: _Terminal) -> data.DataFacts:
    start = time.monotonic()
    with terminal.bar("data", data.NUM_STAGES, "stages") as done:
        stages = itertools.count(1)
        facts = data.build(out / "data", plan.size, on_stage=lambda: done(next(stages)))
    documents = sum(source.documents for source in facts.sources)
    megabytes = sum(source.num_bytes for source in facts.sources) / 1e6
    text = f"{len(facts.sources)} sources, {documents:,} documents, {megabytes:.1f} MB of text"
    terminal.say(1, "data", text, time.monotonic() - start)
    return facts


def _prove(families: list[FamilyResult], plan: DemoPlan, terminal: _Terminal) -> list[Check]:
    start = time.monotonic()
    checks = [check for family in families for check in family.prove(lanes=plan.size.lanes)]
    passed = sum(check.passed for check in checks)
    terminal.say(4, "prove", f"{passed} of {len(checks)} checks of the logs passed", time.monotonic() - start)
    return checks


def _export(run: RunResult, target: Path, terminal: _Terminal) -> Check:
    """Converts a run's last checkpoint and compares it with the state the run ended with."""
    start = time.monotonic()
    source, steps = checkpoint_of(run.directory)
    with terminal.bar("export", 2, "stages") as done:
        export.convert(source, target)
        done(1)
        memory = export.final_tensors(run.directory)
        problems = export.export_problems(memory, export.exported_tensors(target))
    detail = problems[0] if problems else f"{len(memory)} tensors bit for bit those in memory"
    terminal.say(5, "export", f"{run.plan.name} after {steps} steps: {detail}", time.monotonic() - start)
    return Check(
        run=run.plan.name,
        layout=str(run.plan.layout),
        steps=range(steps - 1, steps),
        claim="export equals memory",
        passed=not problems,
        detail=detail,
    )
