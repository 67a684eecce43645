"""Processes killed while they write: whatever is visible is whole."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from storage import Store

NUM_KILLS = 36

# Objects say what they are: a line with name, version and length, then that many bytes of the version's value.
WRITER = """
import itertools, sys
from storage import AlreadyExists, Store
store = Store(sys.argv[1])
def body(version): return bytes([version % 251]) * (200_000 + 7_919 * (version % 50))
def head(kind, version): return f"{kind} {version} {len(body(version))}".ljust(63).encode() + b"\\n"
print("ready", flush=True)
for version in itertools.count(int(sys.argv[2])):
    store.write("replaced", [head("write", version), body(version)])
    with store.writer("streamed", header_bytes=64) as writer:
        writer.write(body(version)); writer.set_header(head("stream", version))
    store.create(f"created/{version}", [head("create", version), body(version)])
    store.write(f"new/deep/{version}/x", [head("write", version), body(version)])
    print(version, flush=True)
"""


@pytest.mark.chaos
def test_a_killed_writer_leaves_only_whole_objects(tmp_path: Path) -> None:
    store = Store(tmp_path / "root")
    dice = random.Random(7)
    num_unfinished = 0
    acknowledged: set[int] = set()
    for kill in range(NUM_KILLS):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, store.url, str(kill * 1000)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        with process.stdout:
            assert process.stdout.readline() == "ready\n"
            time.sleep(dice.uniform(0.0, 0.08))
            process.send_signal(signal.SIGKILL)
            process.wait(timeout=30)
            # A line cut by the kill says nothing.
            acknowledged |= {int(line) for line in process.stdout if line.endswith("\n")}
        num_unfinished += sum(
            name.startswith(".storage-") for _, _, names in os.walk(store.url) for name in names
        )
        for found in store.list():
            data = store.read(found.path)
            _, version, length = data[:63].decode().split()
            assert len(data) == 64 + int(length), found.path
            assert set(data[64:]) == {int(version) % 251}, found.path
    paths = {one.path for one in store.list()}
    assert {f"created/{version}" for version in acknowledged} <= paths
    assert {f"new/deep/{version}/x" for version in acknowledged} <= paths
    assert acknowledged, "no kill came late enough for anything to be written"
    assert num_unfinished, "no kill came in the middle of a write"
