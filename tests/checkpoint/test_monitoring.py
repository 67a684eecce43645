"""Where the time of saves and loads went: phases by rank, stragglers, heat maps, one page."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import checkpoint
from checkpoint.cli import app
from checkpoint.errors import FormatError
from checkpoint.monitoring import phase_times, read_spans, recording, report, stragglers
from storage import Span
from storage.spans import set_rank

MS = 1_000_000


def span(
    phase: str, rank: int, start_ms: float, length_ms: float, num_bytes: int = 0, thread: str = "main"
) -> Span:
    return Span(
        name=f"checkpoint.{phase}",
        start_ns=10**18 + int(start_ms * MS),
        duration_ns=int(length_ms * MS),
        thread=thread,
        attributes={"rank": rank, "num_bytes": num_bytes, "path": "a <b> & 'c'"},
    )


def job(num_ranks: int, slow: int) -> list[Span]:
    """A save of ranks one of which writes four times as long."""
    spans = []
    for rank in range(num_ranks):
        factor = 4 if rank == slow else 1
        spans += [
            span("plan", rank, 0, 20),
            span("stage", rank, 20, 5),
            span("write", rank, 25, 30 * factor, 1000, "checkpoint-save"),
            span("digest", rank, 25, 10, 1000, "checkpoint-digest"),
        ]
    return [*spans, span("commit", 0, 150, 8)]


class Page(HTMLParser):
    """Checks that elements are closed in order, and keeps the titles of rectangles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.titles: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "img", "iframe")
        assert all(not (name in ("src", "href") or name.startswith("on")) for name, _ in attrs)
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "title":
            self.titles.append(data)


def test_phases_are_added_up_by_rank_and_overlaps_count_once() -> None:
    spans = [
        span("write", 0, 0, 10, 5),
        span("write", 0, 5, 10, 5),
        span("write", 2, 0, 3),
        span("read", 2, 100, 7, 9),
        Span(name="storage.write", start_ns=0, duration_ns=10**12, thread="x", attributes={"rank": 1}),
    ]
    times = phase_times(spans)
    assert times.ranks == (0, 2)
    assert times.phases == ("write", "read")
    assert np.array_equal(times.seconds, [[0.015, 0.003], [0.0, 0.007]])
    assert np.array_equal(times.counts, [[2, 1], [0, 1]])
    assert np.array_equal(times.num_bytes, [[10, 0], [0, 9]])


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 20)), min_size=1, max_size=12))
def test_time_that_is_covered_is_that_of_the_milliseconds_in_any_span(cuts: list[tuple[int, int]]) -> None:
    times = phase_times([span("copy", 0, start, length) for start, length in cuts])
    covered = {at for start, length in cuts for at in range(start, start + length)}
    assert times.seconds[0, 0] == len(covered) / 1000


def test_the_rank_that_the_others_wait_for_is_named() -> None:
    times = phase_times(job(8, slow=5))
    (found,) = stragglers(times)
    assert (found.phase, found.rank, found.seconds, found.median_s) == ("write", 5, 0.12, 0.03)
    assert stragglers(phase_times(job(8, slow=-1))) == []
    assert stragglers(phase_times(job(1, slow=0))) == [], "there is nobody to compare with"


def test_a_page_that_needs_nothing_else_shows_each_rank_in_its_place() -> None:
    text = report(job(8, slow=5), mesh=(4, 2))
    page = Page(text)
    assert "rank 5</span>: write 120 ms, median 30 ms" in text
    assert {f"rank {rank}: 5 ms" for rank in range(8)} <= set(page.titles)
    (worst,) = re.findall(r'<rect ([^>]*) fill="rgb\(235,0,0\)"><title>rank 5: 120 ms', text)
    assert worst.startswith('x="18" y="36"'), "in a mesh of 4 by 2 it is the second of the third row"
    assert "a <b>" not in text
    assert "a &lt;b&gt;" in text


def test_a_page_of_thousands_of_ranks_is_bounded() -> None:
    text = report(job(3000, slow=1234))
    Page(text)
    assert len(text) < 3_000_000
    assert "2936 more are not shown" in text
    assert "rank 1234 checkpoint-save" in text


@pytest.mark.parametrize(("mesh", "words"), [((2, 2), "too small for rank 7"), ((8, 0), "too small")])
def test_a_mesh_that_does_not_hold_the_ranks_is_refused(mesh: tuple[int, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        report(job(8, slow=5), mesh=mesh)


def test_nothing_to_report_is_said() -> None:
    with pytest.raises(ValueError, match="was recording on"):
        report([])


def saved_and_loaded(tmp_path: Path) -> list[Path]:
    for rank in range(2):
        with recording(tmp_path / "spans", rank):
            state = {"extra": {"x": torch.ones(100)}}
            checkpoint.async_save(tmp_path / f"c{rank}", state).result()
            checkpoint.load(tmp_path / f"c{rank}", state)
    assert set_rank(None) is None, "as it was before"
    return sorted((tmp_path / "spans").iterdir())


def test_the_command_reports_what_ranks_recorded(tmp_path: Path) -> None:
    files = saved_and_loaded(tmp_path)
    assert [path.name for path in files] == ["rank-00000.json", "rank-00001.json"]
    out, trace = tmp_path / "report.html", tmp_path / "out" / "trace.json"
    arguments = ["report", *map(str, files), "--mesh", "1x2", "--out", str(out), "--trace", str(trace)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    text = out.read_text()
    Page(text)
    for phase in ("plan", "stage", "write", "digest", "commit", "open", "match", "read"):
        assert f"<td>{phase}</td>" in text
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["args"].get("rank") for event in events if event["ph"] == "X"} == {0, 1}
    # A trace holds all that a report needs.
    again = CliRunner().invoke(app, ["report", str(trace), "--out", str(tmp_path / "again.html")])
    assert again.exit_code == 0, again.output
    first, second = read_spans(files), read_spans([trace])
    assert {(one.name, one.duration_ns) for one in first} == {(one.name, one.duration_ns) for one in second}


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[1]", b'[{"name": 1}]', b"\xff", b'{"traceEvents": 5}', b"null"]
)
def test_files_that_are_no_spans_are_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "wrong.json"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=r"wrong\.json: neither spans nor a trace"):
        read_spans([path])
    done = CliRunner().invoke(app, ["report", str(path)])
    assert done.exit_code == 2
    assert done.stderr.count("\n") == 1


def test_the_command_refuses_what_it_cannot_use_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty.json").write_text("[]")
    for arguments, words in (
        ([str(tmp_path / "none.json")], "no such file"),
        ([str(tmp_path / "empty.json")], "was recording on"),
        ([str(tmp_path / "empty.json"), "--mesh", "4by2"], "was recording on|write the sizes"),
    ):
        done = CliRunner().invoke(app, ["report", *arguments, "--out", str(tmp_path / "x.html")])
        assert done.exit_code == 2
        assert re.search(words, done.stderr)
        assert not (tmp_path / "x.html").exists()


def test_a_report_may_go_to_the_root_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with recording(tmp_path / "spans"):
        checkpoint.save(tmp_path / "c", {"extra": {"n": 1}})
    (spans,) = (tmp_path / "spans").iterdir()
    opened = Mock()
    monkeypatch.setattr("checkpoint.cli_report.Store", opened)
    done = CliRunner().invoke(app, ["report", str(spans), "--out", "/x.html"])
    assert done.exit_code == 0, done.output
    opened.assert_called_once_with("/")
    assert opened.return_value.write.call_args.args[0] == "x.html"
