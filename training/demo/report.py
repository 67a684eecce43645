"""Writes the report: one HTML file that needs nothing else, from the evidence of the proof."""

from __future__ import annotations

import html
import os
import platform
import statistics
import string
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from training.demo.charts.imbalance import imbalance_chart, imbalance_of
from training.demo.charts.loss import DifferenceCurve, LossCurve, difference_chart, loss_chart
from training.demo.charts.mixture import mixture_chart, schedule_of, source_shares
from training.demo.charts.timeline import saves_of, timeline_chart
from training.demo.data import DataFacts
from training.demo.evidence import Check, global_batches
from training.demo.families import FamilyResult, RunResult
from training.demo.logs import StepRecord
from training.demo.prove import loss_differences

_TEMPLATE = Path(__file__).with_name("report.html")
_MAX_ROWS = 200
_MAX_DETAIL_CHARS = 300


def write_report(
    path: Path,
    *,
    families: Sequence[FamilyResult],
    checks: Sequence[Check],
    data: DataFacts,
    mixture: Mapping[str, Any],
    created: datetime,
    total_seconds: float,
) -> None:
    """Writes the report.

    Args:
        path: The file to write.
        families: The trainings; charts of loss, mixture, imbalance and checkpoints show the first.
        checks: The proof.
        data: What the data set came to.
        mixture: Content of the mixture file.
        created: When.
        total_seconds: What everything before the report took.
    """
    main = families[0]
    passed = sum(check.passed for check in checks)
    verdict = f"{passed} of {len(checks)} checks passed"
    template = string.Template(_TEMPLATE.read_text(encoding="utf-8"))
    all_passed = passed == len(checks)
    page = template.substitute(
        verdict=verdict,
        verdict_short="proved" if all_passed else "NOT proved",
        verdict_class="pass" if all_passed else "fail",
        created=html.escape(created.strftime("%Y-%m-%d %H:%M %Z").strip()),
        headline=_headline(main, checks, total_seconds),
        loss=loss_chart([_loss_curve(run) for run in main.runs]),
        differences="".join(_differences(family, main) for family in families),
        mixture=mixture_chart(
            source_shares(global_batches(main.reference.evidence.log), schedule_of(mixture))
        ),
        imbalance=imbalance_chart(
            [
                imbalance_of(_title(run), run.evidence.log)
                for run in main.runs
                if run.evidence.layout.dp > 1 and run.plan.kill_after is None
            ]
        ),
        timeline=timeline_chart(
            saves_of(main.reference.evidence.log.spans), run_start_s=_run_start(main.reference)
        ),
        proof="".join(_proof_row(check) for check in checks[:_MAX_ROWS]),
        runs="".join(_run_row(run, family) for family in families for run in family.runs),
        sources="".join(_source_row(data, index) for index in range(len(data.sources))),
        machine=_machine(),
    )
    path.write_text(page, encoding="utf-8")


def _headline(family: FamilyResult, checks: Sequence[Check], total_seconds: float) -> str:
    """The few numbers to read first."""
    records = family.reference.evidence.log.steps[0]
    facts = [
        (f"{len(checks)}", "checks of the logs"),
        (f"{len(family.runs)}", f"{family.reference.dtype} runs of one training"),
        (f"{sum(record.tokens for record in records):,}", "tokens per run"),
        (f"{records[0].loss:.2f} → {records[-1].loss:.2f}", "loss, nats per token"),
        (f"{total_seconds:.0f} s", "data, training and proof"),
    ]
    return "".join(
        f"<div><b>{html.escape(value)}</b><span>{html.escape(name)}</span></div>" for value, name in facts
    )


def _title(run: RunResult) -> str:
    return f"{run.evidence.name} ({run.evidence.layout})"


def _loss_curve(run: RunResult) -> LossCurve:
    records = run.evidence.log.steps[min(run.evidence.log.steps)]
    points = [(record.step, record.loss) for record in records]
    return LossCurve(name=_title(run), points=points, killed=run.plan.kill_after is not None)


def _differences(family: FamilyResult, main: FamilyResult) -> str:
    """Charts how far a family's runs are from their reference; a layout keeps its colour of the main family."""
    layouts = [run.evidence.layout for run in main.others]
    curves = [
        DifferenceCurve(
            name=run.evidence.name,
            points=loss_differences(family.reference.evidence.log, run.evidence.log),
            color=layouts.index(run.evidence.layout) if run.evidence.layout in layouts else index,
        )
        for index, run in enumerate(family.others)
    ]
    # Five decades below the tolerance is at the rounding of a single number of the type.
    floor = family.family.rtol * 1e-5
    return difference_chart(curves, rtol=family.family.rtol, floor=floor, title=family.reference.dtype)


def _run_start(run: RunResult) -> float:
    """Unix time at which the first step began, in seconds."""
    first = run.evidence.log.steps[min(run.evidence.log.steps)][0]
    return first.time - first.step_ms / 1e3


def _proof_row(check: Check) -> str:
    badge = '<span class="badge pass">PASS</span>' if check.passed else '<span class="badge fail">FAIL</span>'
    return _row(
        _cell(check.run, "fixed"),
        _cell(check.layout, "fixed"),
        _cell(check.steps_text, "right"),
        _cell(check.claim, "fixed"),
        f"<td>{badge}</td>",
        _cell(check.detail[:_MAX_DETAIL_CHARS]),
    )


def _run_row(run: RunResult, family: FamilyResult) -> str:
    evidence = run.evidence
    records = evidence.log.steps[min(evidence.log.steps)]
    total_ms = sum(record.step_ms for record in records)
    return _row(
        _cell(evidence.name, "fixed"),
        _cell(str(evidence.layout), "fixed"),
        _cell(run.dtype),
        _cell(f"{evidence.steps.start}–{evidence.steps.stop - 1}", "right"),
        _cell(f"{run.seconds:.1f}", "right"),
        _cell(f"{statistics.median(record.step_ms for record in records):,.0f}", "right"),
        _cell(f"{1e3 * sum(record.tokens for record in records) / total_ms:,.0f}", "right"),
        _cell(f"{100 * sum(record.stall_ms for record in records) / total_ms:.1f}", "right"),
        _cell(_blocked(records, family.family.checkpoint_every), "right"),
        _cell(f"{records[-1].loss:.4f}", "right"),
    )


def _blocked(records: Sequence[StepRecord], checkpoint_every: int) -> str:
    """Median time for which a save held up training, in milliseconds."""
    blocked = [record.checkpoint_ms for record in records if (record.step + 1) % checkpoint_every == 0]
    return f"{statistics.median(blocked):,.0f}" if blocked else "–"


def _source_row(data: DataFacts, index: int) -> str:
    source = data.sources[index]
    return _row(
        _cell(source.name),
        _cell(f"{source.documents:,}", "right"),
        _cell(f"{source.num_bytes / 1e6:.2f} MB", "right"),
        _cell(", ".join(source.files)),
    )


def _machine() -> str:
    facts = [
        f"Python {platform.python_version()}",
        *(f"{name} {version(name)}" for name in ("omniload", "torch", "pyarrow", "tokenizers")),
        f"{platform.system()} {platform.machine()}",
        f"{os.cpu_count()} CPUs",
        f"byte order {sys.byteorder}",
    ]
    return html.escape(", ".join(facts)) + "."


def _row(*cells: str) -> str:
    return f"<tr>{''.join(cells)}</tr>\n"


def _cell(content: str, kind: str = "") -> str:
    attribute = f' class="{kind}"' if kind else ""
    return f"<td{attribute}>{html.escape(content)}</td>"
