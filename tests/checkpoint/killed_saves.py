"""Saves killed at every point, or at random moments; run as a program of its own.

``python -m tests.checkpoint.killed_saves WHAT SCENARIO ROOT`` imports torch once and forks a child for every rank and
every check, so that a kill costs milliseconds. It starts no thread itself, so that forking it is safe, and waits for
many cases at once, since most of their time is waiting for ranks that are dead.

Points are the calls that a save makes to storage, before and after each, and the ends of its spans: planned, staged,
written, committed.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed import FileStore

from checkpoint.boxes import Box
from checkpoint.cli_read import read_in_parts
from checkpoint.engine.coordination import Coordinator
from checkpoint.engine.save import SaveOptions, Saver
from checkpoint.errors import CoordinationTimeout
from checkpoint.frameworks.values import CapturedState
from checkpoint.manager import committed_steps, step_dir
from checkpoint.stored import StoredCheckpoint
from checkpoint.verify import verify
from storage import Store
from storage.spans import add_listener
from tests.checkpoint.simulation import held
from tests.checkpoint.watched_store import WatchedStore

KILLED = -signal.SIGKILL
TIMED_OUT = 3
_AT_ONCE = 6  # cases
_PATIENT_S = 30.0
_SPANS = ("checkpoint.plan", "checkpoint.stage", "checkpoint.write", "checkpoint.commit")

Hook = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """What is being killed.

    Attributes:
        world_size: Number of ranks.
        overwrite: Whether the save replaces a checkpoint that has replaced one.
        background: Whether it is asynchronous.
        timeout_s: Longest wait of a rank for the others.
    """

    world_size: int
    overwrite: bool
    background: bool
    timeout_s: float = 1.0

    @property
    def step(self) -> int:
        """Step that is being saved when the kill comes; 1 is there before."""
        return 1 if self.overwrite else 2


SCENARIOS = {
    "one rank": Scenario(world_size=1, overwrite=False, background=True),
    "one rank overwriting": Scenario(world_size=1, overwrite=True, background=False),
    "two ranks": Scenario(world_size=2, overwrite=False, background=True),
    "two ranks overwriting": Scenario(world_size=2, overwrite=True, background=False),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Running:
    pids: list[int]
    told: int  # what the victim wrote
    number: int

    def wait(self) -> tuple[list[int], list[str]]:
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self.pids]
        text = os.read(self.told, 1 << 16).decode()
        os.close(self.told)
        return codes, text.split("\n")[:-1]


def start(
    scenario: Scenario, root: Path, step: int, number: int, *, victim: int = -1, point: int | None = None
) -> _Running:
    """Fork all ranks of a save.

    Args:
        scenario: How to save.
        root: Where.
        step: What.
        number: Value of all that is saved.
        victim: Rank that kills itself before the ``point``-th point, telling its name; without a point it tells all.
        point: Counted from 0.
    """
    rendezvous = tempfile.mktemp(dir=root.parent)
    read, write = os.pipe()

    def rank_main(rank: int) -> None:
        left = [point]

        def hook(here: str) -> None:
            if rank != victim:
                return
            if left[0] is None or left[0] == 0:
                os.write(write, f"{here}\n".encode())
            if left[0] is not None:
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left[0] -= 1

        timeout_s = _PATIENT_S if rank == victim else scenario.timeout_s
        _save(scenario, rank, root, rendezvous, step, number, hook, timeout_s)

    pids = [_fork(lambda rank=rank: rank_main(rank)) for rank in range(scenario.world_size)]
    os.close(write)
    return _Running(pids=pids, told=read, number=number)


def _save(
    scenario: Scenario,
    rank: int,
    root: Path,
    rendezvous: str,
    step: int,
    number: int,
    hook: Hook,
    timeout_s: float,
) -> None:
    size = scenario.world_size
    tensor = torch.full((size * 3, 5), float(number))
    part = held("t", tensor, [Box((3 * rank, 0), (3, 5))])
    captured = CapturedState(tensors=[part], objects={"model": {"value": number}}, rank_objects={"rng": rank})
    options = SaveOptions(
        step=step, overwrite=scenario.overwrite, timeout_s=timeout_s, user_metadata={"value": number}
    )
    saver = Saver(Coordinator(FileStore(rendezvous, size), rank, size))
    add_listener(lambda span: hook(f"end of {span.name}") if span.name in _SPANS else None)
    store = WatchedStore(root, hook).sub(step_dir(step))
    saver.save(store, lambda: captured, options, background=scenario.background).result()


def found_in(root: Path) -> dict[int, int]:
    """Value of each step that is visible; each must verify, and be all of one save. Done in a child: it has threads."""

    def look() -> str:
        found = {}
        for step in committed_steps(Store(root)):
            checkpoint = StoredCheckpoint.open(Store(root).sub(step_dir(step)))
            report = verify(checkpoint)
            assert not report.problems, report
            (number,) = {checkpoint.manifest.user_metadata["value"], checkpoint.objects["model"]["value"]}
            (tensor,) = checkpoint.tables.tensors
            for data in read_in_parts(checkpoint, 0, Box.whole(tensor.shape)):
                assert set(data.view("f4").tolist()) == {float(number)}
            found[step] = number
        return json.dumps(found)

    read, write = os.pipe()
    code = os.waitstatus_to_exitcode(os.waitpid(_fork(lambda: os.write(write, look().encode())), 0)[1])
    os.close(write)
    text = os.read(read, 1 << 16)
    os.close(read)
    assert code == 0, f"{root}: what is visible is not whole"
    return {int(step): number for step, number in json.loads(text).items()}


def at_every_point(scenario: Scenario, directory: Path) -> list[list[Any]]:
    """Kill each rank at each of its points.

    Returns:
        For each kill: victim, name of the point, exit codes by rank, and the value of the step that was being saved
        (3 if the kill came after the commit) or None.
    """
    template = directory / "template"
    for number in (1, 2):  # so that the third overwrites one that has replaced another
        if number == 1 or scenario.overwrite:
            _clean(start(scenario, template, 1, number))
    before = found_in(template)
    points = []
    for victim in range(scenario.world_size):
        root = _copy(template, directory / f"dry-{victim}")
        names = _clean(start(scenario, root, scenario.step, 3, victim=victim))
        points += [(victim, point) for point in range(len(names))]
    results = []
    for first in range(0, len(points), _AT_ONCE):
        cases = []
        for victim, point in points[first : first + _AT_ONCE]:
            root = _copy(template, directory / f"kill-{victim}-{point}")
            running = start(scenario, root, scenario.step, 3, victim=victim, point=point)
            cases.append((victim, root, running))
        for victim, root, running in cases:
            codes, names = running.wait()
            found = found_in(root)
            assert {**before, **found} == found or scenario.overwrite, (before, found)
            assert found.get(scenario.step) in (3, before.get(scenario.step)), (names, found)
            results.append([victim, names[-1] if names else None, codes, found.get(scenario.step)])
            shutil.rmtree(root)
    return results


def at_random_moments(scenario: Scenario, root: Path, num_kills: int, seed: int) -> dict[str, int]:
    """Kill one rank, or all of them, at any moment of a save, and the next save begins in the same place.

    Returns:
        How often what was being saved was visible afterwards, and how often not.
    """
    dice = random.Random(seed)
    _clean(start(scenario, root, 1, 0))
    began = time.monotonic()
    _clean(start(scenario, root, 2, 0))
    usual_s = time.monotonic() - began
    visible = found_in(root)
    outcomes = {"committed": 0, "nothing": 0, "killed": 0}
    for number in range(1, num_kills + 1):
        step = 1 + number % 5 if scenario.overwrite else 2 + number
        running = start(scenario, root, step, number)
        victims = (
            running.pids if dice.random() < 0.7 else running.pids[dice.randrange(scenario.world_size) :][:1]
        )
        time.sleep(dice.uniform(0.0, 1.2 * usual_s))
        for pid in victims:
            os.kill(pid, signal.SIGKILL)  # a zombie if it was faster: it is waited for below
        codes, _ = running.wait()
        outcomes["killed"] += KILLED in codes
        # About one in six ends before, however busy the machine was when the usual time was taken.
        usual_s *= 1.01 if KILLED in codes else 0.95
        found = found_in(root)
        assert found.get(step) in (number, visible.get(step)), (number, found)
        assert all(found[one] == visible[one] for one in visible if one != step), (visible, found)
        if set(codes) == {0}:
            assert found[step] == number, "reported, but not visible"
        outcomes["committed" if found.get(step) == number else "nothing"] += 1
        visible = found
        if not scenario.overwrite and len(visible) > 8:  # or each check would take longer than the one before
            shutil.rmtree(root / step_dir(min(visible)))
            del visible[min(visible)]
    return outcomes


def _clean(running: _Running) -> list[str]:
    codes, names = running.wait()
    assert set(codes) == {0}, codes
    return names


def _copy(template: Path, root: Path) -> Path:
    shutil.copytree(template, root)
    return root


def _fork(call: Callable[[], object]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            call()
            code = 0
        except CoordinationTimeout:
            code = TIMED_OUT
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


if __name__ == "__main__":
    torch.set_num_threads(1)
    what, name, place, *rest = sys.argv[1:]
    if what == "random":
        print(json.dumps(at_random_moments(SCENARIOS[name], Path(place), *map(int, rest))))  # noqa: T201
    else:
        print(json.dumps(at_every_point(SCENARIOS[name], Path(place))))  # noqa: T201
