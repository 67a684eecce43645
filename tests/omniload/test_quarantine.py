"""Bad rows: each is in the file once per epoch, when its step is served; too many end the stream for all alike."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import resource
import threading
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from omniload import Chaos, DataLoader
from omniload.errors import OmniloadError, QuarantineError, SourceError, TooManyFailures
from omniload.loader import SourceLoader, open_loader
from omniload.mixture import Mixture, SourceSpec
from omniload.quarantine import Quarantine
from omniload.sources import InMemorySource
from tests.omniload.loading import chunks
from tests.omniload.mixtures import on_both_runtimes
from tests.omniload.quarantining import STEPS, failure, write_many

ROWS = 60


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def is_bad(row: int) -> bool:
    return row % 7 == 3 or row > ROWS - 4


def mixture(folder: Path, **keys: Any) -> dict[str, Any]:
    """Two passes over good rows with bad ones among them, also at the very end; and a source without any."""
    with (folder / "mixed.jsonl").open("w") as file:
        for row in range(ROWS):
            file.write(
                "oops\n" if is_bad(row) else json.dumps({"input_ids": [row + 1] * (5 + row % 9)}) + "\n"
            )
    (folder / "good.jsonl").write_text('{"input_ids": [1, 2, 3, 4, 5]}\n' * 40)
    mixed = {"path": str(folder / "mixed.jsonl"), "weight": 2, "repeat": 2, "on_exhausted": "drop_source"}
    good = {"path": str(folder / "good.jsonl"), "weight": 1, "on_exhausted": "repeat"}
    return {
        "seq_len": 16,
        "packs": 4,
        "lanes": 2,
        "steps": 40,
        "quarantine": str(folder / "bad.jsonl"),
        "sources": {"mixed": {**mixed, **keys}, "good": good},
    }


def bad_offsets(folder: Path) -> set[int]:
    offset, found = 0, set()
    for row, line in enumerate((folder / "mixed.jsonl").read_bytes().splitlines(keepends=True)):
        if is_bad(row):
            found.add(offset)
        offset += len(line)
    return found


@on_both_runtimes
@pytest.mark.parametrize("chaos", [None, Chaos(seed=1, max_chunk_samples=3, evict_probability=0.4)])
def test_every_bad_row_consumed_is_in_the_file_once_per_epoch(tmp_path: Path, chaos: Chaos | None) -> None:
    path = tmp_path / "bad.jsonl"
    with DataLoader(mixture(tmp_path), chaos=chaos) as loader:
        assert path.read_text() == ""
        for group in loader.steps():
            account = loader.ledger().sources["mixed"]
            written = lines(path)
            assert len(written) == account.failures, "rows read ahead are in the file, or rows served are not"
            assert all(line["step"] <= group[0]["step"] for line in written)
        assert loader.ledger().sources["mixed"].exhausted, (
            "the rows after the last good one were never passed"
        )
    assert {(line["epoch"], line["row"]) for line in written} == {
        (epoch, row) for epoch in (0, 1) for row in bad_offsets(tmp_path)
    }
    assert len(written) == 2 * len(bad_offsets(tmp_path))
    first = written[0]
    assert first["source"] == "mixed"
    assert first["path"] == str(tmp_path / "mixed.jsonl")
    assert first["reason"].startswith("not JSON")
    assert list(first) == ["source", "path", "row", "epoch", "window", "position", "reason", "step"]


@on_both_runtimes
def test_a_resume_from_any_step_completes_the_file_and_repeats_nothing(
    execution: str, tmp_path: Path
) -> None:
    whole = mixture(tmp_path)
    with DataLoader(whole, quarantine=tmp_path / "reference.jsonl") as loader:
        states = [loader.state_dict() for _ in islice(loader.steps(), 20)]
        list(loader)
    reference = (tmp_path / "reference.jsonl").read_bytes()
    assert reference
    path = tmp_path / "bad.jsonl"
    for step in range(0, len(states), 1 if execution == "inline" else 12):
        state = states[step]
        with DataLoader(whole) as loader:  # runs on after the state was taken, as before a crash
            list(islice(loader.steps(), step + 4))
        if step % 3 == 0:
            with path.open("ab") as file:
                file.write(b'{"source": "mixed", "pa')  # and the crash tears a line
        with DataLoader(whole) as loader:
            loader.load_state_dict(state)
            list(loader)
        assert path.read_bytes() == reference
        path.unlink()


@pytest.mark.parametrize("shuffle", ["none", "window", "global"])
def test_a_bad_row_is_named_by_its_file_and_number_in_any_order(shuffle: Any) -> None:
    files = {name: [{"input_ids": [] if row % 9 == 4 else [row]} for row in range(70)] for name in ("a", "b")}
    source = InMemorySource(files, block_rows=20)
    spec = SourceSpec(path=("memory",), weight=1)
    loader = SourceLoader(source, spec, name="memory", seed=5, seq_len=8, shuffle=shuffle)
    failed = [failure for chunk in chunks(loader, max_samples=13) for failure in chunk.failed]
    assert list(loader.failures) == failed
    assert sorted((failure.path, failure.row_id) for failure in failed) == [
        (f"memory:{name}", row) for name in ("a", "b") for row in range(4, 70, 9)
    ]
    assert len({(failure.window, failure.position) for failure in failed}) == len(failed)


@on_both_runtimes
def test_at_the_end_of_the_data_the_file_has_what_the_ledger_counts(tmp_path: Path) -> None:
    """Also what was read for a step that could not be filled."""
    keys = mixture(tmp_path, repeat=1)
    del keys["steps"], keys["sources"]["good"]
    with DataLoader(keys) as loader:
        list(loader)
        assert loader.ledger().sources["mixed"].failures == len(bad_offsets(tmp_path))
    written = lines(tmp_path / "bad.jsonl")
    assert {line["row"] for line in written} == bad_offsets(tmp_path)
    assert len(written) == len(bad_offsets(tmp_path))


@on_both_runtimes
def test_only_data_parallel_rank_0_writes(tmp_path: Path) -> None:
    with DataLoader(mixture(tmp_path), dp_rank=1, dp_size=2) as loader:
        list(loader)
        assert loader.ledger().sources["mixed"].failures > 0
    assert not (tmp_path / "bad.jsonl").exists()


@pytest.mark.parametrize("path", ["here", "here/file/x.jsonl", "nul\0", "/dev/full", "fifo"])
def test_a_file_that_cannot_be_written_is_an_error_at_the_start(tmp_path: Path, path: str) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here/file").touch()
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(
        QuarantineError, match=r"quarantine: .* cannot be written .*; free it, or give another"
    ) as raised:
        DataLoader(mixture(tmp_path), quarantine=tmp_path / path)
    assert "\n" not in str(raised.value)


@on_both_runtimes
def test_a_file_that_stops_being_writable_ends_the_run_before_its_step(tmp_path: Path) -> None:
    """Nothing is skipped: once the file can be written again, the stream goes on at that step."""
    with DataLoader(mixture(tmp_path), quarantine=tmp_path / "q/bad.jsonl") as loader:
        expected = [lane["step"] for lane in loader]
    with DataLoader(mixture(tmp_path), quarantine=tmp_path / "r/bad.jsonl") as loader:
        (tmp_path / "r/bad.jsonl").unlink()
        (tmp_path / "r").rmdir()
        (tmp_path / "r").write_text("in the way")
        seen: list[int] = []
        with pytest.raises(QuarantineError):
            seen.extend(lane["step"] for lane in loader)
        (tmp_path / "r").unlink()
        seen += [lane["step"] for lane in loader]
    assert seen == expected
    assert (tmp_path / "r/bad.jsonl").read_bytes() == (tmp_path / "q/bad.jsonl").read_bytes()


def test_what_is_in_the_file_is_not_written_again_and_what_is_no_line_of_ours_is_left(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text('# mine\n[1]\n{"source": 3}\n\n')
    quarantine = Quarantine(path)
    quarantine.add([failure(1), failure(2), failure(1)], step=4)
    quarantine.add([failure(2), failure(1, epoch=1), failure(1, source="t"), failure(1, path="r")], step=5)
    Quarantine(path).add([failure(1), failure(3, reason="ünlesbar \udc80\n")], step=9)
    quarantine.add([failure(3)], step=9)
    kept, ours = path.read_text().splitlines()[:4], path.read_text().splitlines()[4:]
    assert kept == ["# mine", "[1]", '{"source": 3}', ""]
    written = [json.loads(line) for line in ours]
    assert [(w["source"], w["path"], w["row"], w["epoch"], w["step"]) for w in written] == [
        ("s", "p", 1, 0, 4),
        ("s", "p", 2, 0, 4),
        ("s", "p", 1, 1, 5),
        ("t", "p", 1, 0, 5),
        ("s", "r", 1, 0, 5),
        ("s", "p", 3, 0, 9),
    ]
    assert written[-1]["reason"] == "ünlesbar \udc80\n"


def test_lines_that_do_not_fit_on_the_disk_are_written_whole_later(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    quarantine = Quarantine(path)
    quarantine.add([failure(1)], step=0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size * 5 // 2, limits[1]))
    try:
        with pytest.raises(QuarantineError, match="File too large"):
            quarantine.add([failure(2), failure(3), failure(4)], step=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not path.read_bytes().endswith(b"\n"), "no line was torn"
    quarantine.add([failure(2), failure(3), failure(4)], step=1)
    assert [line["row"] for line in lines(path)] == [1, 2, 3, 4]


def test_a_file_that_is_rotated_or_emptied_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    quarantine = Quarantine(path)
    quarantine.add([failure(1)], step=0)
    path.rename(tmp_path / "old.jsonl")
    quarantine.add([failure(1), failure(2)], step=1)
    assert [line["row"] for line in lines(path)] == [1, 2]
    path.write_text("")
    quarantine.add([failure(1)], step=2)
    assert [line["row"] for line in lines(path)] == [1]


def test_processes_that_share_a_rank_write_each_row_once(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(3)
    processes = [context.Process(target=write_many, args=(path, start)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert [line["row"] for line in lines(path)] == list(range(3 * STEPS))


# Budgets


def consume(
    keys: dict[str, Any], state: dict[str, Any] | None = None, **options: Any
) -> tuple[list[int], str, list[Any]]:
    """Steps served, the error that ended them, and the states before each step."""
    with DataLoader(keys, **options) as loader:
        if state is not None:
            loader.load_state_dict(state)
        steps, states = [], [loader.state_dict()]
        try:
            for group in loader.steps():
                steps.append(group[0]["step"])
                states.append(loader.state_dict())
        except TooManyFailures as error:
            with pytest.raises(TooManyFailures):  # every time it is asked
                next(iter(loader))
            return steps, str(error), states
        return steps, "", states


@pytest.mark.parametrize("budget", [{"max_failures": 5}, {"max_failure_fraction": 0.15}, {"max_failures": 0}])
def test_a_budget_ends_the_stream_at_one_step_for_every_rank_chunk_and_resume(
    tmp_path: Path, budget: dict[str, Any]
) -> None:
    keys = mixture(tmp_path, **budget)
    steps, message, states = consume(keys)
    assert message
    assert "\n" not in message
    assert ("max_failures" in budget) == (len(steps) < 10)
    written = (tmp_path / "bad.jsonl").read_bytes()
    assert str(tmp_path / "bad.jsonl") in message
    assert f"row {lines(tmp_path / 'bad.jsonl')[-1]['row']}: not JSON" in message, (
        "the last reasons are in the file"
    )
    for options in ({"dp_rank": 1, "dp_size": 2}, {"chaos": Chaos(seed=3, max_chunk_samples=2)}):
        assert consume(keys, **options)[:2] == (steps, message)
    for step, state in enumerate(states):
        rest, again, _ = consume(keys, state)
        assert rest == steps[step:]
        assert again.split(", the last")[0] == message.split(", the last")[0]
    assert (tmp_path / "bad.jsonl").read_bytes() == written
    # With a larger budget the run goes on where it ended, and the file is complete at its end.
    on, message, _ = consume(mixture(tmp_path), states[-1])
    assert not message
    assert on[0] == len(steps)
    assert on[-1] == 39
    assert len(lines(tmp_path / "bad.jsonl")) == 2 * len(bad_offsets(tmp_path))


def test_a_budget_of_failures_is_exact(tmp_path: Path) -> None:
    most = 2 * len(bad_offsets(tmp_path)) if mixture(tmp_path) else 0
    assert consume(mixture(tmp_path, max_failures=most))[1] == ""
    steps, message, _ = consume(mixture(tmp_path, max_failures=most - 1))
    assert steps
    assert message.startswith(
        f"source 'mixed': {most} of {2 * ROWS} rows quarantined, over its max_failures: {most - 1},"
    )


def test_a_fraction_is_judged_of_a_hundred_rows_or_more(tmp_path: Path) -> None:
    bad = len(bad_offsets(tmp_path)) if mixture(tmp_path) else 0
    assert bad / ROWS > 0.15
    assert consume(mixture(tmp_path, repeat=1, max_failure_fraction=0.01))[1] == "", (
        "60 rows are too few to judge"
    )
    assert "max_failure_fraction: 0.01" in consume(mixture(tmp_path, max_failure_fraction=0.01))[1]
    assert consume(mixture(tmp_path, max_failure_fraction=0.25))[1] == ""


def test_endless_bad_rows_end_at_the_budget_and_not_after_the_whole_file(tmp_path: Path) -> None:
    keys = mixture(tmp_path, max_failures=20, repeat=1)
    good = json.dumps({"input_ids": [1] * 10}) + "\n"
    (tmp_path / "mixed.jsonl").write_text(good * 30 + "oops\n" * 100_000)
    with (
        DataLoader(keys | {"shuffle": "none"}) as loader,
        pytest.raises(SourceError, match=r"21 of 51 rows") as raised,
    ):
        list(loader)
    assert isinstance(raised.value, TooManyFailures)
    assert isinstance(raised.value, OmniloadError)
    assert len(raised.value.failures) <= 21
    assert len(lines(tmp_path / "bad.jsonl")) == 21


def test_a_lock_that_another_process_holds_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    quarantine = Quarantine(path)
    file = os.open(path, os.O_RDWR)
    fcntl.flock(file, fcntl.LOCK_EX)
    thread = threading.Thread(target=quarantine.add, args=([failure(1)], 0))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive(), "it did not wait for the lock"
    os.close(file)
    thread.join(60)
    assert not thread.is_alive()
    assert len(lines(path)) == 1


def test_a_source_without_a_good_row_says_what_is_wrong_with_its_rows(tmp_path: Path) -> None:
    keys = mixture(tmp_path)
    (tmp_path / "mixed.jsonl").write_text("oops\n" * 70_000)
    with (
        DataLoader(keys) as loader,
        pytest.raises(SourceError, match=r"\(70000 rows quarantined, the last .*not JSON"),
    ):
        list(loader)


def test_a_window_of_bad_rows_comes_in_parts(tmp_path: Path) -> None:
    """So that what a chunk holds of them is bounded; the account is the same."""
    keys = mixture(tmp_path, repeat=1)
    good = json.dumps({"input_ids": [1] * 10}) + "\n"
    (tmp_path / "mixed.jsonl").write_text(good + "oops\n" * 50_000 + good)
    del keys["quarantine"], keys["steps"], keys["sources"]["good"]
    keys |= {"packs": 1, "lanes": 1, "seq_len": 10, "shuffle": "none"}
    sizes = [len(chunk.failed) for chunk in chunks(open_loader("mixed", Mixture.load(keys)))]
    assert sum(sizes) == 50_000
    assert max(sizes) < 20_000
    with DataLoader(keys) as loader:
        assert len(list(loader.steps())) == 2
        assert loader.ledger().sources["mixed"].failures == 50_000
