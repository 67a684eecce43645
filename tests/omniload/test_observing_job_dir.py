"""Jobs of this machine publish their numbers, and are found."""

from __future__ import annotations

import json
import os
import stat
import tempfile
import threading
import time
from pathlib import Path

import pytest

from omniload.errors import JobNotFound, ObservingError
from omniload.observing.job_dir import (
    STALE_AFTER_S,
    events_path,
    job_dir,
    list_jobs,
    publish,
    read,
    runtime_dir,
    withdraw,
)
from tests.elsewhere import printed
from tests.omniload.observing import client, job


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of all jobs, which is not there yet."""
    monkeypatch.setenv("OMNILOAD_RUNTIME_DIR", str(tmp_path / "run/omniload"))
    return tmp_path / "run/omniload"


def stats_file(root: Path, name: str = "pretrain") -> Path:
    return root / name / "stats.json"


def published_elsewhere(root: Path, **changes: object) -> None:
    """As if another process, or machine, had published."""
    path = stats_file(root)
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_what_is_published_is_found(root: Path) -> None:
    assert list_jobs() == []
    assert not root.exists(), "looking makes nothing"
    publish(job())
    publish(job(job="finetune", step=3))
    publish(job(step=1_240))
    found = read("pretrain")
    assert found.stats == job(step=1_240)
    assert found.pid == os.getpid()
    assert found.stale is None
    assert [one.stats.job for one in list_jobs()] == ["finetune", "pretrain"]
    assert [path.name for path in (root / "pretrain").iterdir()] == ["stats.json"], "nothing else is left"


def test_a_job_that_ended_is_not_found_and_keeps_its_events(root: Path) -> None:
    publish(job())
    events_path("pretrain").touch()
    withdraw("pretrain")
    withdraw("pretrain")
    assert list_jobs() == []
    with pytest.raises(JobNotFound, match="no job 'pretrain'"):
        read("pretrain")
    assert (root / "pretrain/events.jsonl").exists()


def test_the_folder_is_nobody_elses(root: Path) -> None:
    publish(job())
    for folder in (root, root / "pretrain"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(stats_file(root).stat().st_mode) == 0o600


def test_by_default_the_folder_is_named_after_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMNILOAD_RUNTIME_DIR", raising=False)
    assert runtime_dir() == Path(tempfile.gettempdir()) / f"omniload-{os.geteuid()}"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
@pytest.mark.parametrize(
    "theirs", ["the folder", "a link to a folder of ours", "the folder that our link leads to"]
)
def test_a_folder_of_somebody_else_is_refused(root: Path, theirs: str) -> None:
    if theirs == "the folder":
        root.mkdir(parents=True)
        os.chown(root, 4321, 4321)
    else:
        target = root.parent / "target"
        target.mkdir(parents=True)
        root.symlink_to(target)
        os.chown(root, 4321, 4321, follow_symlinks=theirs == "the folder that our link leads to")
    for use in (lambda: publish(job()), lambda: job_dir("pretrain"), list_jobs, lambda: read("pretrain")):
        with pytest.raises(
            ObservingError, match="belongs to user 4321, not to you; set OMNILOAD_RUNTIME_DIR"
        ):
            use()
    assert not list(root.iterdir())


def test_a_folder_that_belongs_to_another_user_by_its_number_is_refused(root: Path) -> None:
    root.mkdir(parents=True)
    script = (
        "import os; os.geteuid = lambda: 4321\n"
        "from omniload.observing.job_dir import list_jobs\n"
        "try: list_jobs()\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    said = printed(script, OMNILOAD_RUNTIME_DIR=str(root))
    assert said.startswith("ObservingError")
    assert f"belongs to user {os.geteuid()}, not to you" in said


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_folder_that_others_may_write_to_is_refused(root: Path, mode: int) -> None:
    root.mkdir(parents=True)
    root.chmod(mode)
    with pytest.raises(ObservingError, match=r"others may write to .*; chmod 700 it"):
        publish(job())
    with pytest.raises(ObservingError, match="others may write to"):
        list_jobs()


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "/tmp", ".hidden", "a b", "数", "x" * 101, "a\n", "-x"]
)
def test_a_name_that_would_lead_elsewhere_is_refused(root: Path, name: str) -> None:
    with pytest.raises(ValueError, match="cannot be a name"):
        publish(job(job=name))
    with pytest.raises(JobNotFound):
        read(name)
    assert not root.exists()


def test_a_misspelt_job_is_told_what_there_is(root: Path) -> None:
    publish(job())
    with pytest.raises(JobNotFound, match="did you mean 'pretrain'"):
        read("pretrian")


def test_numbers_that_are_old_are_stale(root: Path) -> None:
    publish(job())
    assert read("pretrain").stale is None
    then = time.time() - STALE_AFTER_S - 12
    os.utime(stats_file(root), (then, then))
    found = read("pretrain")
    assert found.stale is not None
    assert found.stale.startswith("not updated for 4")
    assert not found.gone
    assert [one.stale for one in list_jobs()] == [found.stale]


def test_numbers_of_a_process_that_is_gone_are_stale(root: Path) -> None:
    script = (
        "import os\n"
        "from omniload.observing.job_dir import publish\n"
        "from tests.omniload.observing import job\n"
        "publish(job())\n"
        "print(os.getpid())"
    )
    pid = int(printed(script, OMNILOAD_RUNTIME_DIR=str(root)))
    found = read("pretrain")
    assert found.pid == pid
    assert found.gone
    assert found.stale == f"its process {pid} is gone"
    published_elsewhere(root, host="another-machine")
    assert read("pretrain").stale is None, "nothing is known of processes of another machine"


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"null", b"[]", b"{}", b"\xff", b"[" * 100_000, b'{"version": 1}'],
)
def test_a_damaged_file_is_named_and_does_not_hide_other_jobs(
    root: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    publish(job())
    publish(job(job="finetune"))
    stats_file(root).write_bytes(content)
    with pytest.raises(ObservingError, match=r"job 'pretrain': .*stats\.json is damaged"):
        read("pretrain")
    assert [one.stats.job for one in list_jobs()] == ["finetune"]
    assert "left out: job 'pretrain'" in caplog.text
    publish(job())
    assert read("pretrain").stats == job()


def test_a_file_of_another_version_is_refused(root: Path) -> None:
    publish(job())
    published_elsewhere(root, version=2)
    with pytest.raises(ObservingError, match="another version of omniload"):
        read("pretrain")


@pytest.mark.parametrize("pid", [-1, 0, 10**30, "x", None, 1.5, True])
def test_odd_process_numbers_signal_nobody(root: Path, pid: object) -> None:
    publish(job())
    published_elsewhere(root, pid=pid)
    with pytest.raises(ObservingError, match="is damaged"):
        read("pretrain")


def test_what_stands_in_the_way_is_one_line(root: Path) -> None:
    root.parent.mkdir()
    root.touch()
    with pytest.raises(ObservingError, match=r"omniload is no folder; remove it"):
        publish(job())
    root.unlink()
    root.mkdir(mode=0o700)
    (root / "pretrain").touch()
    with pytest.raises(ObservingError, match="pretrain is no folder"):
        publish(job())
    assert list_jobs() == []
    (root / "pretrain").unlink()
    stats_file(root).mkdir(parents=True)
    with pytest.raises(ObservingError, match=r"stats\.json cannot be written"):
        publish(job())
    assert [path.name for path in (root / "pretrain").iterdir()] == ["stats.json"], "no hidden file is left"
    with pytest.raises(ObservingError, match="cannot be read"):
        read("pretrain")
    with pytest.raises(ObservingError, match=r"stats\.json cannot be removed"):
        withdraw("pretrain")


def test_readers_see_the_old_numbers_or_the_new_and_never_a_part(root: Path) -> None:
    both = {
        step: job(step=step, clients=tuple(client(rank=rank, step=step) for rank in range(200)))
        for step in (1, 2)
    }
    publish(both[1])
    done = threading.Event()

    def keep_publishing() -> None:
        while not done.is_set():
            for stats in both.values():
                publish(stats)

    writers = [threading.Thread(target=keep_publishing) for _ in range(2)]
    for writer in writers:
        writer.start()
    try:
        seen: list[int] = []
        deadline = time.monotonic() + 60
        while len(seen) < 200 or len(set(seen)) < 2:
            assert time.monotonic() < deadline, "both were to be seen"
            stats = read("pretrain").stats
            assert stats == both[stats.step]
            seen.append(stats.step)
    finally:
        done.set()
        for writer in writers:
            writer.join(60)
    assert [path.name for path in (root / "pretrain").iterdir()] == ["stats.json"]
