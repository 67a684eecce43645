"""``omniload top``: the numbers of a running job on any terminal, and in scripts."""

from __future__ import annotations

import io
import json
import math
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from omniload.observing.job_dir import STALE_AFTER_S, Published, publish, withdraw
from omniload.observing.screen import JobScreen
from omniload.observing.stats import JobStats, to_json
from tests.omniload.observing import actor, client, job, source
from tests.omniload.test_cli import run as run_command

GOLDEN = """\
pretrain  step 1,232
tokens/s 81,920  worst stall 0.2 ms (p99 4.8 ms)  plan 6.5 ms (p99 11.0 ms)  imbalance 1.038  object store 268.4 MB

actors: 4
actor       role            fetch p99    queue    memory  restarts  stale  calls    busy  fetch p50   pid  node  sources
lanes-a     constructor       31.0 ms  12.6 MB  410.0 MB         0      0  1,840  71.2 s     3.5 ms  4003  a
web-0       loader            18.2 ms  12.6 MB  410.0 MB         0      0  1,840  71.2 s     3.5 ms  4001  a     web
web-shadow  loader, shadow    18.2 ms  12.6 MB  410.0 MB         1      0      0   0.0 s     3.5 ms  4002  a     web
planner     planner                 –  12.6 MB  410.0 MB         0      0  1,840  71.2 s          –  4000  a

sources: 3
source     drift  declared  realised  failures     tokens
code    ! -20.0%    25.00%    20.00%        17  2,003,456
maths      +5.0%     5.00%     5.25%         0    526,000
web        +0.0%    70.00%    70.00%         0  7,012,345

ranks: 2
rank  stall p99  stall p50   step  ready  tokens/s  fetch p50     queue
   1     4.8 ms     0.2 ms  1,233      0    40,960    14.0 ms  524.3 kB
   0     2.5 ms     0.2 ms  1,233      2    40,960    14.0 ms  524.3 kB
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of all jobs."""
    monkeypatch.setenv("OMNILOAD_RUNTIME_DIR", str(tmp_path / "run"))
    return tmp_path / "run"


def run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *args: object
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of ``omniload top *args``."""
    return run_command(capsys, monkeypatch, "top", *args)


def shown(stats: JobStats, width: int, height: int | None = None, age_s: float = 0.0) -> str:
    """What a terminal without colours shows."""
    file = io.StringIO()
    console = Console(file=file, width=width, height=height, color_system=None)
    published = Published(stats=stats, host="node-a", pid=1, age_s=age_s, gone=False)
    console.print(JobScreen(published), height=height)
    return "".join(f"{line.rstrip()}\n" for line in file.getvalue().splitlines())


def test_once_prints_everything(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(job())
    monkeypatch.setenv("NO_COLOR", "1")
    code, out, err = run(capsys, monkeypatch, "--once")
    assert (code, err) == (0, "")
    assert "\x1b" not in out
    assert "".join(f"{line.rstrip()}\n" for line in out.splitlines()) == GOLDEN


def test_json_is_one_object_for_scripts(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(job(imbalance=math.nan))
    code, out, _ = run(capsys, monkeypatch, "pretrain", "--once", "--json")
    assert code == 0
    assert json.loads(out) == {**to_json(job(imbalance=math.nan)), "stale": None}
    assert out.count("\n") == 1


def test_a_stale_job_is_marked_and_fails_a_script(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(job())
    then = time.time() - STALE_AFTER_S - 60
    os.utime(root / "pretrain/stats.json", (then, then))
    code, out, err = run(capsys, monkeypatch, "pretrain", "--once")
    assert code == 1
    assert re.search(r"STALE: not updated for 9\d s", out)
    code, out, _ = run(capsys, monkeypatch, "pretrain", "--once", "--json")
    assert code == 1
    assert json.loads(out)["stale"].startswith("not updated")
    code, out, err = run(capsys, monkeypatch, "--once")
    assert (code, out) == (2, "")
    assert "none is running" in err
    assert "'pretrain' was, but not updated for 9" in err


def test_the_job_has_to_be_named_if_there_are_several(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, err = run(capsys, monkeypatch)
    assert code == 2
    assert err == f"error: JOB: none is running according to {root}\n"
    publish(job())
    publish(job(job="finetune"))
    code, _, err = run(capsys, monkeypatch)
    assert (code, err) == (2, "error: JOB: 2 jobs are running, finetune, pretrain; name one\n")
    code, _, err = run(capsys, monkeypatch, "pretrian")
    assert code == 2
    assert "did you mean 'pretrain'?" in err
    code, out, _ = run(capsys, monkeypatch, "finetune", "--once")
    assert code == 0
    assert out.startswith("finetune ")


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "inf", "1e9"])
def test_an_interval_that_makes_no_sense_is_refused(
    interval: str, root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(job())
    code, _, err = run(capsys, monkeypatch, "--interval", interval)
    assert code == 2
    assert err.startswith("error: --interval: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("width", [1, 7, 20, 40, 60, 80, 100, 120, 200, 300])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    text = shown(job(), width)
    assert max(map(len, text.splitlines())) <= width
    if width >= 10:
        tables, wide = (one.partition("actors:")[2] for one in (text, shown(job(), 300)))
        assert tables.count("\n") == wide.count("\n"), "no row is folded"


def test_narrow_terminals_keep_what_tells_most() -> None:
    wide, narrow = shown(job(), 300), shown(job(), 40)
    assert "sources" in wide
    assert re.search(r"^actor +role +fetch p99$", narrow, re.MULTILINE)
    assert re.search(r"^source +drift +declared +realised$", narrow, re.MULTILINE)
    assert re.search(r"^rank +stall p99 +stall p50 +step +ready$", narrow, re.MULTILINE)


@pytest.mark.parametrize("height", [1, 10, 16, 20, 24, 40, 200])
def test_a_low_terminal_shows_the_worst_of_many(height: int) -> None:
    large = job(
        actors=tuple(actor(name=f"a{i}", fetch_p99_ms=float(i)) for i in range(300)),
        sources=(source(name="fine"), source(name="off", realised_ratio=0.1)),
        clients=tuple(client(rank=i, stall_p99_ms=float(i)) for i in range(4096)),
    )
    text = shown(large, 100, height)
    lines = text.splitlines()
    assert len(lines) <= max(height, 3 + 3 * 4)
    assert "actors: 300" in text
    assert "ranks: 4,096" in text
    if height >= 24:
        assert re.search(r"^a299 ", text, re.MULTILINE)
        assert re.search(r"^4095 ", text, re.MULTILINE)
        assert re.search(r"^off +! -85\.7%", text, re.MULTILINE)
        assert re.search(r"^and [\d,]+ more$", text, re.MULTILINE)
        assert len(lines) >= min(height - 1, 24), "the height is used"


def test_a_job_of_nothing_yet_is_shown_with_dashes() -> None:
    empty = job(
        actors=(), sources=(), clients=(), imbalance=math.nan, plan_p50_ms=math.nan, plan_p99_ms=math.nan
    )
    assert shown(empty, 200) == (
        "pretrain  step 1,232\n"
        "tokens/s 0  worst stall – (p99 –)  plan – (p99 –)  imbalance –  object store 268.4 MB\n"
    )


def test_names_cannot_take_the_screen_apart() -> None:
    text = shown(job(sources=(source(name="a\x1b[2J\n[bold]数"),)), 200)
    assert "a?[2J?[bold]数" in text
    assert "\x1b" not in text


def test_a_file_gets_all_columns_and_another_alphabet_question_marks(root: Path) -> None:
    publish(job(sources=(source(name="数据"),), imbalance=math.nan))
    printed = subprocess.run(
        [sys.executable, "-m", "omniload", "top", "--once"],
        env={name: value for name, value in os.environ.items() if name != "COLUMNS"}
        | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=True,
        timeout=60,
    ).stdout
    assert b"?? " in printed
    assert b"imbalance ?" in printed
    assert b"node  sources" in printed, "a file has no width, so nothing is left out"


@contextmanager
def watched(*args: str, **environment: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """``omniload top`` on a terminal of its own: the process, and the other end of the terminal."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "omniload", "top", "--interval", "0.1", *args],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "40"} | environment,
    )
    os.close(theirs)
    try:
        yield process, ours
    finally:
        process.kill()
        process.wait(60)
        os.close(ours)


def output_until(terminal: int, text: bytes | None) -> bytes:
    """What a terminal shows up to a text, or to the end."""
    seen = b""
    while text is None or text not in seen:
        try:
            got = os.read(terminal, 65536)
        except OSError:  # how Linux says that the other end is closed
            got = b""
        if not got:
            assert text is None, seen
            break
        seen += got
    return seen


@pytest.mark.parametrize("ended_by", ["Ctrl-C", "SIGTERM", "the job"])
def test_the_live_view_follows_the_job_and_gives_the_terminal_back(root: Path, ended_by: str) -> None:
    publish(job())
    with watched() as (process, terminal):
        output_until(terminal, b"step 1,232")
        publish(job(step=1_299))
        output_until(terminal, b"step 1,299")
        if ended_by == "the job":
            withdraw("pretrain")
        else:
            process.send_signal(signal.SIGINT if ended_by == "Ctrl-C" else signal.SIGTERM)
        rest = output_until(terminal, None)
        assert process.wait(60) == 0
    assert b"\x1b[?25h" in rest, "the cursor is back"
    _, _, after = rest.partition(b"\x1b[?1049l")
    assert b"step 1,299" in after, "the last numbers stay on the normal screen"
    assert b"Traceback" not in rest


def test_a_dumb_terminal_gets_one_picture_after_the_other(root: Path) -> None:
    publish(job())
    with watched(TERM="dumb", NO_COLOR="1") as (process, terminal):
        seen = output_until(terminal, b"step 1,232")
        publish(job(step=1_299))
        seen += output_until(terminal, b"step 1,299")
        process.send_signal(signal.SIGINT)
        seen += output_until(terminal, None)
        assert process.wait(60) == 0
    assert b"\x1b" not in seen
    assert b"Aborted" not in seen


def test_json_lines_go_on_until_the_reader_has_enough(root: Path) -> None:
    publish(job())
    process = subprocess.Popen(
        [sys.executable, "-m", "omniload", "top", "--json", "--interval", "0.1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    lines = [json.loads(process.stdout.readline()) for _ in range(2)]
    process.stdout.close()
    assert process.wait(60) in (0, 1)
    assert b"Traceback" not in process.stderr.read()
    process.stderr.close()
    assert [line["step"] for line in lines] == [1_232, 1_232]
