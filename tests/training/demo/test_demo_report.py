"""The report is one self-contained, bounded file that escapes what it shows and says what the logs say."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.training.demo.synthetic import LANES, SyntheticRun, run
from training.demo.charts import svg
from training.demo.charts.imbalance import imbalance_of
from training.demo.charts.mixture import schedule_of, source_shares
from training.demo.charts.timeline import saves_of
from training.demo.data import DataFacts, SourceFacts
from training.demo.evidence import global_batches
from training.demo.families import FamilyResult, RunResult
from training.demo.logs import SpanRecord
from training.demo.plan import Family, RunPlan
from training.demo.prove import prove_family
from training.demo.report import write_report

HOSTILE = "<script>alert('x')</script>&\""
MIXTURE = {
    "sources": {"code": {"weight": 0.6}, "long": {"weight": 0.4}},
    "schedule": [{"step": 0}, {"step": 4, "weights": {"code": 0.25, "long": 0.75}}],
}


class Tags(HTMLParser):
    """Collects every tag with its attributes, and checks that tags are closed in order."""

    VOID = frozenset({"br", "meta"})

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def report_of(directory: Path, reference: SyntheticRun, *others: SyntheticRun) -> str:
    evidence = [reference.evidence(directory / "reference", "reference")]
    evidence += [other.evidence(directory / f"{index}", HOSTILE) for index, other in enumerate(others)]
    checks = prove_family(evidence[0], evidence[1:], lanes=LANES, rtol=1e-5)
    results = []
    for index, entry in enumerate(evidence):
        plan = RunPlan(name=entry.name, layout=entry.layout, kill_after=5 if index == 1 else None)
        results.append(
            RunResult(plan=plan, directory=directory, evidence=entry, dtype="float32", seconds=12.0)
        )
    planned = Family(
        dtype="float32",
        steps=8,
        checkpoint_every=2,
        rtol=1e-5,
        reference=results[0].plan,
        others=tuple(result.plan for result in results[1:]),
    )
    family = FamilyResult(family=planned, runs=tuple(results))
    source = SourceFacts(name="code", documents=5, num_bytes=1_000_000, files=(HOSTILE,))
    path = directory / "report.html"
    write_report(
        path,
        families=[family, family],
        checks=checks,
        data=DataFacts(mixture=directory / "mixture.yaml", sources=(source,), vocabulary_size=4096),
        mixture=MIXTURE,
        created=datetime(2030, 1, 2, 3, 4, tzinfo=UTC),
        total_seconds=99.0,
    )
    return path.read_text(encoding="utf-8")


def save_spans(run: SyntheticRun, per_rank: int = 3) -> None:
    for rank in run.rows:
        run.spans[rank] = [
            {
                "name": f"checkpoint.phase{index % 3}",
                "start_ns": 1_700_000_000_000_000_000 + index * 1_000_000,
                "duration_ns": 2_000_000,
                "attributes": {},
            }
            for index in range(per_rank)
        ]


def test_report_is_well_formed_and_needs_nothing_else(tmp_path: Path) -> None:
    reference = run()
    save_spans(reference)
    page = report_of(tmp_path, reference, run(steps=range(5)), run(dp=4, tp=1, steps=range(4, 8)))
    tags = Tags()
    tags.feed(page)
    tags.close()
    assert tags.open == []
    names = {tag for tag, _ in tags.seen}
    assert not names & {"script", "link", "img", "iframe", "object", "embed"}
    for _, attributes in tags.seen:
        assert not {"src", "href", "onload", "onclick", "style"} & attributes.keys()
    links = set(re.findall(r"https?://[^\"\s<]*", page))
    assert links == {"http://www.w3.org/2000/svg"}
    pictures = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    assert len(pictures) == 6
    for picture in pictures:
        ET.fromstring(picture)
    for title in ("step", "loss (nats per token)", "share of tokens", "milliseconds since the save began"):
        assert f">{title}</text>" in page


def test_names_from_outside_are_escaped(tmp_path: Path) -> None:
    page = report_of(tmp_path, run(), run(steps=range(5)))
    assert "<script>" not in page
    assert "&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt;&amp;&quot;" in page


def test_a_failed_check_is_shown_as_failed(tmp_path: Path) -> None:
    spoiled = run(steps=range(5))
    spoiled.rows_of(3)[0]["loss"] = float("nan")
    page = report_of(tmp_path, run(), spoiled)
    assert "7 of 8 checks passed" in page
    assert "NOT proved" in page
    assert page.count(">FAIL<") == 1
    assert page.count(">PASS<") == 7


def test_size_is_bounded_for_long_runs(tmp_path: Path) -> None:
    """Ten times the steps and spans of the bound make a file not much larger than at the bound."""
    sizes = []
    for index, steps in enumerate((svg.MAX_POINTS, 4 * svg.MAX_POINTS)):
        synthetic = run(dp=2, tp=1, steps=range(steps))
        save_spans(synthetic, per_rank=2 * steps)
        sizes.append(len(report_of(tmp_path / str(index), synthetic)))
    assert sizes[1] < 1.3 * sizes[0]
    assert sizes[1] < 3_000_000


def test_shares_count_tokens_and_average_the_schedule(tmp_path: Path) -> None:
    log = run(steps=range(8)).evidence(tmp_path / "run").log
    code, long = source_shares(global_batches(log), schedule_of(MIXTURE))
    assert (code.name, long.name) == ("code", "long")
    assert code.realised == (0.75,) * 8
    assert long.cumulative == (0.25,) * 8
    assert code.declared == (0.6,) * 4 + (0.25,) * 4
    assert code.declared_cumulative[3] == pytest.approx(0.6)
    assert code.declared_cumulative[7] == pytest.approx((4 * 0.6 + 4 * 0.25) / 8)


def test_imbalance_counts_tensor_ranks_once(tmp_path: Path) -> None:
    synthetic = run(dp=2, tp=2, steps=range(2))
    for row in synthetic.rows_of(1):
        for lane in row["lanes"]:
            lane["cost"] = 100 if row["dp_rank"] == 0 else 300
    imbalance = imbalance_of("run", synthetic.evidence(tmp_path / "run").log)
    assert imbalance.ranks[1] == "rank 1 (dp 0, tp 1)"
    assert [row[1] for row in imbalance.ratios] == [0.5, 0.5, 1.5, 1.5]
    assert imbalance.worst_by_step[1] == 1.5


def test_spans_are_grouped_into_saves_by_their_gaps() -> None:
    def span(rank: int, start_s: float, name: str = "checkpoint.write") -> SpanRecord:
        return SpanRecord(rank=rank, name=name, start_s=start_s, duration_s=0.5, attributes={})

    saves = saves_of([span(0, 10.0), span(1, 10.4), span(0, 20.0), span(0, 15.0, "storage.read")])
    assert [(save.start_s, round(save.duration_s, 6), len(save.spans)) for save in saves] == [
        (10.0, 0.9, 2),
        (20.0, 0.5, 1),
    ]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 39, [0, 10, 20, 30]),
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (3, 3, [3]),
        (2.9, 8.7, [3, 4, 5, 6, 7, 8]),
    ],
)
def test_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
    assert svg.linear_ticks(low, high) == expected
