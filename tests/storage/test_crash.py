"""Processes killed while they write and commit: whatever is visible is whole, and what was acknowledged is there."""

import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from storage import Store
from tests.storage.killed_writer import PART_BYTES, check_whole
from tests.storage.seaweed import S3Server
from tests.storage.uploads import abort_uploads, unfinished_uploads

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

NUM_KILLS_LOCAL = 140
NUM_KILLS_S3 = 60

KillOne = Callable[[Store, dict[str, object], int, int, float | None], set[int]]


@pytest.fixture
def kill_one(tmp_path: Path) -> Iterator[KillOne]:
    """Let a writer run for some seconds (None: until it has finished a version), kill it, give what it had finished."""
    acknowledged = tmp_path / "acknowledged"
    with subprocess.Popen(
        [sys.executable, "-m", "tests.storage.killed_writer"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        stdin, stdout = parent.stdin, parent.stdout

        def kill(
            store: Store, options: dict[str, object], first: int, streamed: int, after_s: float | None
        ) -> set[int]:
            acknowledged.write_text("")
            task = {"url": store.url, "options": options, "first": first, "streamed_bytes": streamed}
            stdin.write(json.dumps({**task, "acknowledge": str(acknowledged)}) + "\n")
            stdin.flush()
            child = int(stdout.readline())
            if after_s is None:
                _await_version(acknowledged)
            else:
                time.sleep(after_s)
            os.kill(child, signal.SIGKILL)
            _await_gone(child)
            return set(map(int, acknowledged.read_text().split()))

        yield kill
        stdin.close()


def _await_version(acknowledged: Path) -> None:
    deadline = time.monotonic() + 60
    while not acknowledged.read_text():
        assert time.monotonic() < deadline, "no version was finished within 60 s"
        time.sleep(0.001)


def _await_gone(process: int) -> None:
    deadline = time.monotonic() + 30
    while Path(f"/proc/{process}").exists():
        assert time.monotonic() < deadline, f"process {process} did not end within 30 s of SIGKILL"
        time.sleep(0.001)


def _run(
    store: Store,
    options: dict[str, object],
    kill_one: KillOne,
    num_kills: int,
    streamed_bytes: int,
    look: Callable[[], None],
) -> None:
    dice = random.Random(7)
    seen: dict[str, str | None] = {}
    begin = time.monotonic()
    done = kill_one(store, options, 0, streamed_bytes, None)
    # So that two kills of three fall into the first version, however fast the machine is now.
    longest_s = 1.5 * (time.monotonic() - begin)
    for kill in range(1, num_kills):
        done |= kill_one(store, options, kill * 1000, streamed_bytes, dice.uniform(0, longest_s))
        look()
        check_whole(store, seen)
    assert len(done) > num_kills // 10, "hardly a kill came late enough for anything to be finished"
    assert {f"commit/{version}/manifest" for version in done} <= set(seen)


def test_a_killed_writer_leaves_only_whole_files(tmp_path: Path, kill_one: KillOne) -> None:
    store = Store(tmp_path / "root")
    num_unfinished = 0

    def look() -> None:
        nonlocal num_unfinished
        num_unfinished += sum(
            name.startswith(".storage-") for _, _, names in os.walk(store.url) for name in names
        )

    _run(store, {}, kill_one, NUM_KILLS_LOCAL, 200_000, look)
    assert num_unfinished, "no kill came in the middle of a write"


def test_a_killed_writer_leaves_only_whole_s3_objects(s3: S3Server, kill_one: KillOne) -> None:
    store = Store(f"s3://{s3.bucket}/killed-{uuid.uuid4().hex}", s3.storage_options)
    try:
        _run(store, s3.storage_options, kill_one, NUM_KILLS_S3, PART_BYTES + 100_000, lambda: None)
        assert unfinished_uploads(s3, store), "no kill came in the middle of an upload"
    finally:
        abort_uploads(s3, store)
