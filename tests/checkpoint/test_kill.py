"""SIGKILL at every step of a save: the newest visible checkpoint is always complete and verifies."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

# One process imports torch once and forks a child for every point, so that a kill costs milliseconds.
_PROGRAM = """
import json, os, signal, sys, tempfile, traceback
import torch
torch.set_num_threads(1)
from torch.distributed import FileStore
from checkpoint.boxes import Box
from checkpoint.engine.coordination import Coordinator
from checkpoint.engine.save import SaveOptions, Saver
from checkpoint.errors import CoordinationTimeout
from checkpoint.frameworks.values import CapturedState
from checkpoint.manager import committed_steps, step_dir
from checkpoint.stored import StoredCheckpoint
from checkpoint.verify import verify
from storage import Store
from tests.checkpoint.simulation import held
from tests.checkpoint.watched_store import WatchedStore

root, world_size, overwrite, background, kills = json.loads(sys.argv[1])

def save(rank, rendezvous, step, value, hook, timeout_s):
    tensor = torch.full((world_size * 3, 5), float(value))
    part = held("t", tensor, [Box((3 * rank, 0), (3, 5))])
    options = SaveOptions(step=step, overwrite=overwrite, timeout_s=timeout_s, user_metadata={"value": value})
    saver = Saver(Coordinator(FileStore(rendezvous, world_size), rank, world_size))
    store = WatchedStore(root, hook).sub(step_dir(step))
    captured = CapturedState(tensors=[part], objects={"model": {"value": value}}, rank_objects={"rng": rank})
    saver.save(store, lambda: captured, options, background=background).result()

def run(step, value, victim, point):
    # Forks all ranks; rank `victim` kills itself at `point`, or reports its points if that is None.
    rendezvous = tempfile.mktemp()
    read, write = os.pipe()
    pids = []
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            def hook(here):
                if rank != victim:
                    return
                if point is None:
                    os.write(write, (here + "\\n").encode())
                elif here == point:
                    os.kill(os.getpid(), signal.SIGKILL)
            code = 1
            try:
                save(rank, rendezvous, step, value, hook, 30 if point is None else 0.5)
                code = 0
            except CoordinationTimeout:
                code = 3
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    os.close(write)
    return codes, os.read(read, 65536).decode().split("\\n")[:-1]

codes, points = run(1, 1, 0, None)
assert codes == [0] * world_size, codes
results = []
visible = {1: 1}
for value, (victim, point) in enumerate(kills or [(0, one) for one in points], start=2):
    step = 1 if overwrite else value
    codes, _ = run(step, value, victim, point)
    found = {}
    for one in committed_steps(Store(root)):
        checkpoint = StoredCheckpoint.open(Store(root).sub(step_dir(one)))
        report = verify(checkpoint)
        assert not report.problems, report
        # All of it is of one save: manifest and objects agree about which.
        (number,) = {checkpoint.manifest.user_metadata["value"], checkpoint.objects["model"]["value"]}
        found[one] = number
    results.append([victim, point, codes, found.get(step) == value])
    assert found.get(step) in (value, visible.get(step)), (point, found)
    assert {**visible, **found} == found, (visible, found)
    visible = found
print(json.dumps(results))
"""

_DATA = "data of model-0000{}-000.safetensors"
_CLOSE = "close of model-0000{}-000.safetensors"
_KILLS = {
    "every point of a single rank": (1, False, True, []),
    "two ranks": (
        2,
        False,
        True,
        [
            (0, f"before {_DATA}".format(0)),
            (1, f"after {_DATA}".format(1)),
            (1, f"before {_CLOSE}".format(1)),
            (0, "before write tensors.parquet"),
            (0, "before create manifest.json"),
            (0, "after create manifest.json"),
        ],
    ),
    "two ranks overwriting": (
        2,
        True,
        False,
        [
            (1, f"after {_CLOSE}".format(1)),
            (0, "before write manifest.json"),
            (0, "after write manifest.json"),
        ],
    ),
}


@pytest.mark.parametrize("case", _KILLS)
def test_kill(tmp_path: Path, case: str) -> None:
    world_size, overwrite, background, kills = _KILLS[case]
    arguments = json.dumps([str(tmp_path), world_size, overwrite, background, kills])
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, arguments],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    if not kills:
        points = {point for _, point, _, _ in results}
        assert {
            f"before {_DATA}".format(0),
            "before write stored.parquet",
            "after create manifest.json",
        } <= points
    for victim, point, codes, committed in results:
        assert codes[victim] == -9, point
        # The manifest, and nothing else, decides.
        assert committed == (point in ("after create manifest.json", "after write manifest.json")), point
        for rank, code in enumerate(codes):
            assert rank == victim or code == 3, "the others time out instead of waiting for ever"
