"""A job of several ranks on a simulated cluster, whose processes are killed at random while it runs."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray
from ray.cluster_utils import Cluster

from benchmarks.running.chaos_client import Orders, digest
from omniload import DataLoader
from omniload.runtime.ray.cluster import system_config
from omniload.runtime.ray.job import PLANNER

ROLES = ("loader", "shadow", "constructor", "planner", "client", "node")
LANES, SEQ_LEN = 8, 256
_ASK_S = 5.0
_LOOK_S = 0.05
_HEALTH = {
    "health_check_initial_delay_ms": 5000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 5000,
    "health_check_failure_threshold": 5,
}
"""A node that is gone is noticed within seconds; a busy machine answers slowly."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What is done to a job."""

    kills: Mapping[str, int]
    """How many, by role; in random order, one after the other."""
    steps: int
    """Steps of the stream."""
    shadows: int
    """Standbys of each loader."""
    seed: int = 0
    """Of the order of the kills, and of whom they hit."""
    settle_steps: int = 2
    """Steps that every rank takes between two kills."""
    step_s: float = 0.1
    """How long each rank trains on a step."""
    world_size: int = 4
    """Ranks, each a process."""
    num_nodes: int = 3
    """Nodes that they, and the actors, are on."""
    num_sources: int = 12
    """Sources of the mixture."""
    loaders: int = 2
    """Loaders that they are divided among."""
    timeout_s: float = 240.0
    """A rank that waits longer for a step hangs."""


@dataclass(kw_only=True, slots=True)
class Kill:
    """A kill, and what it cost."""

    role: str
    """What was killed."""
    at: float
    """When."""
    stall_s: float = 0.0
    """How much longer than usual the rank that waited longest waited for its next step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What came of a job under chaos."""

    kills: Sequence[Kill]
    """In order."""
    lost: int
    """Lanes that should have been trained on and were not, or were others."""
    duplicated: int
    """Lanes that one run of a rank gave twice, or that are not of the stream."""
    hangs: int
    """Ranks that came to no end."""
    lanes: int
    """Lanes of the stream."""

    def stalls(self) -> dict[str, list[float]]:
        """Seconds of every kill, by role."""
        return {role: [kill.stall_s for kill in self.kills if kill.role == role] for role in ROLES}


@dataclass(kw_only=True, slots=True)
class _Rank:
    """A rank, over its runs."""

    number: int
    node: Any = None
    process: subprocess.Popen[bytes] | None = None
    runs: int = 0
    records: list[dict[str, Any]] = field(default_factory=list)
    read: int = 0
    ended: bool = False


def mixture_of(folder: Path, plan: Plan) -> dict[str, Any]:
    """Many sources, unlike each other, of which one is soon exhausted."""
    rng = np.random.default_rng(plan.seed)
    sources = {}
    for number in range(plan.num_sources):
        name = f"source-{number:02}"
        rows = 40 if number == 1 else 300
        lengths = np.maximum(1, rng.exponential(40 * (1 + number % 4), rows).astype(int))
        tokens = [rng.integers(1, 30_000, length).tolist() for length in lengths.tolist()]
        if number % 3 == 2:
            path = folder / f"{name}.jsonl"
            path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in tokens))
        else:
            path = folder / f"{name}.parquet"
            table = pa.table({"input_ids": pa.array(tokens, pa.list_(pa.int32()))})
            pq.write_table(table, path, row_group_size=16)
        sources[name] = {
            "path": str(path),
            "weight": 1.0 + number % 5,
            "on_exhausted": "drop_source" if number == 1 else "repeat",
        }
    return {
        "seed": 11,
        "seq_len": SEQ_LEN,
        "packs": 2 * LANES,
        "lanes": LANES,
        "steps": plan.steps,
        "window_blocks": 2,
        "sources": sources,
    }


def expected_of(mixture: dict[str, Any]) -> dict[tuple[int, int], str]:
    """Digests of the lanes of the undisturbed run, by step and lane."""
    with DataLoader(mixture, execution="inline") as loader:
        return {(lane["step"], lane["lane"]): digest(lane) for lane in loader}


def run(plan: Plan, folder: Path) -> Outcome:
    """Run a job, and kill its processes, one after the other, until the plan is done.

    In a process of its own, as a process can be on one cluster only.

    Args:
        plan: the job, and what is done to it.
        folder: for everything that is written.

    Raises:
        RuntimeError: the process failed; says what it wrote last.
    """
    command = [sys.executable, "-m", "benchmarks.running.chaos_run", json.dumps(asdict(plan)), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the run under chaos failed: {done.stderr[-2000:]}")
    said = json.loads(done.stdout.splitlines()[-1])
    return Outcome(**{**said, "kills": [Kill(**kill) for kill in said["kills"]]})


def run_here(plan: Plan, folder: Path) -> Outcome:
    """As `run`, in this process."""
    mixture = mixture_of(folder, plan)
    expected = expected_of(mixture)
    with (
        # The names of sockets must not be long.
        tempfile.TemporaryDirectory(prefix="omniload-", ignore_cleanup_errors=True) as nodes,
        _cluster(folder, Path(nodes), plan) as cluster,
    ):
        return _Chaos(plan, folder, Path(nodes), cluster, mixture, expected).run()


@contextmanager
def _cluster(folder: Path, nodes: Path, plan: Plan) -> Iterator[Cluster]:
    """A head that runs nothing, and the nodes; they find the folder of the job's numbers through the environment."""
    before = os.environ.get("OMNILOAD_RUNTIME_DIR")
    os.environ["OMNILOAD_RUNTIME_DIR"] = str(folder / "runtime")
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 0,
            "include_dashboard": False,
            "_system_config": {**system_config(), **_HEALTH},
        },
    )
    try:
        for number in range(plan.num_nodes):
            _add_node(cluster, nodes / str(number))
        ray.init(cluster.address, log_to_driver=False, configure_logging=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()  # type: ignore[no-untyped-call]
        os.environ.pop("OMNILOAD_RUNTIME_DIR")
        if before is not None:
            os.environ["OMNILOAD_RUNTIME_DIR"] = before


def _add_node(cluster: Cluster, folder: Path) -> Any:
    folder.mkdir(exist_ok=True)
    return cluster.add_node(num_cpus=4, object_store_memory=120 << 20, temp_dir=str(folder))


class _Chaos:
    """A job that runs, and what is done to it."""

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        nodes_dir: Path,
        cluster: Cluster,
        mixture: dict[str, Any],
        expected: dict[tuple[int, int], str],
    ) -> None:
        self._plan = plan
        self._folder = folder
        self._nodes_dir = nodes_dir
        self._cluster = cluster
        self._mixture = mixture
        self._expected = expected
        self._random = random.Random(plan.seed)
        self._job = f"chaos-{os.getpid()}-{plan.seed}"
        self._ranks = [_Rank(number=number) for number in range(plan.world_size)]
        self._nodes = sorted(cluster.worker_nodes, key=lambda node: str(node.unique_id))
        self._nodes_made = len(self._nodes)
        self._kills: list[Kill] = []

    def run(self) -> Outcome:
        wanted = [role for role, count in self._plan.kills.items() for _ in range(count)]
        self._random.shuffle(wanted)
        left = deque(wanted)
        hangs = 0
        try:
            for rank in self._ranks:
                rank.node = self._nodes[rank.number % len(self._nodes)]
                self._start(rank)
            while not all(rank.ended for rank in self._ranks):
                if not self._settled():
                    hangs = sum(not rank.ended for rank in self._ranks)
                    break
                if left and not all(rank.ended for rank in self._ranks) and not self._kill(left[0]):
                    left.rotate(-1)  # there is none at the moment
                elif left:
                    left.popleft()
        finally:
            for rank in self._ranks:
                if rank.process is not None:
                    rank.process.kill()
                    rank.process.wait()
        return self._outcome(hangs)

    def _start(self, rank: _Rank) -> None:
        orders = Orders(
            address=self._cluster.address,
            node_dir=str(rank.node.get_temp_dir_path()),
            job=self._job,
            mixture=self._mixture,
            ray={"loaders": self._plan.loaders, "shadows": self._plan.shadows},
            rank=rank.number,
            world_size=self._plan.world_size,
            run=rank.runs,
            step_s=self._plan.step_s,
            timeout_s=self._plan.timeout_s,
            folder=str(self._folder),
        )
        rank.runs += 1
        with (self._folder / f"{rank.number}.err").open("ab") as errors:
            rank.process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.running.chaos_client", orders.to_json()],
                stdout=errors,
                stderr=errors,
                env={**os.environ, "RANK": str(rank.number)},
            )

    def _settled(self) -> bool:
        """Wait until every rank took some steps, starting again those that died; False if one hangs."""
        goals = {rank.number: len(rank.records) + self._plan.settle_steps for rank in self._ranks}
        deadline = time.monotonic() + self._plan.timeout_s
        while time.monotonic() < deadline:
            for rank in self._ranks:
                self._look(rank)
            if all(rank.ended or len(rank.records) >= goals[rank.number] for rank in self._ranks):
                return True
            time.sleep(_LOOK_S)
        return False

    def _look(self, rank: _Rank) -> None:
        """Read what a rank wrote, and start it again if it is dead."""
        if rank.ended:
            return
        died = rank.process is not None and rank.process.poll() is not None
        path = self._folder / f"{rank.number}.jsonl"
        if path.exists():
            with path.open("rb") as file:
                file.seek(rank.read)
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            rank.read += len(whole)
            rank.records += [json.loads(line) for line in whole.splitlines()]
            if died and len(whole) < len(text):  # it was killed while it wrote; let the next run begin a line
                with path.open("ab") as file:
                    file.truncate(rank.read)
        rank.ended = (self._folder / f"{rank.number}.end").exists()
        if died and not rank.ended:
            self._start(rank)

    def _kill(self, role: str) -> bool:
        """Kill one of a role; False if there is none."""
        killed = {"client": self._kill_client, "node": self._kill_node}.get(role)
        at = time.time()
        if not (killed() if killed is not None else self._kill_actor(role)):
            return False
        self._kills.append(Kill(role=role, at=at))
        return True

    def _kill_client(self) -> bool:
        alive = [rank for rank in self._ranks if not rank.ended and rank.process is not None]
        rank = self._random.choice(alive)
        assert rank.process is not None
        rank.process.kill()
        rank.process.wait()
        return True

    def _kill_node(self) -> bool:
        """Kill a node with all that runs on it, add another in its place, and move its ranks to those left."""
        node = self._random.choice(self._nodes)
        self._nodes.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)
        for rank in self._ranks:
            if rank.node is node and not rank.ended:
                assert rank.process is not None
                rank.process.kill()
                rank.process.wait()
                rank.node = self._random.choice(self._nodes)
        self._nodes.append(_add_node(self._cluster, self._nodes_dir / str(self._nodes_made)))
        self._nodes_made += 1
        return True

    def _kill_actor(self, role: str) -> bool:
        """Kill the process of an actor."""
        namespace = f"omniload-{self._job}"
        every = ray.util.list_named_actors(all_namespaces=True)
        names = [one["name"] for one in every if one["namespace"] == namespace]
        of_role = [name for name in names if _role(name) == role]
        self._random.shuffle(of_role)
        for name in of_role:
            try:
                actor: Any = ray.get_actor(name, namespace=namespace)
                stats: Any = ray.get(actor.stats.remote(), timeout=_ASK_S)
                os.kill(stats[0].pid, signal.SIGKILL)
            except Exception:  # it is being made anew, or of a node that is gone
                continue
            return True
        return False

    def _outcome(self, hangs: int) -> Outcome:
        lost = duplicated = 0
        of_rank = self._plan.world_size
        for rank in self._ranks:
            newest: dict[int, dict[str, Any]] = {}
            for record in rank.records:
                before = newest.get(record["step"])
                duplicated += before is not None and before["run"] == record["run"]
                newest[record["step"]] = record
            found = {
                (step, int(lane)): value
                for step, record in newest.items()
                for lane, value in record["lanes"].items()
            }
            wanted = {key: one for key, one in self._expected.items() if key[1] % of_rank == rank.number}
            lost += sum(found.get(key) != value for key, value in wanted.items())
            duplicated += len(found.keys() - wanted.keys())
        self._reckon_stalls()
        return Outcome(
            kills=self._kills, lost=lost, duplicated=duplicated, hangs=hangs, lanes=len(self._expected)
        )

    def _reckon_stalls(self) -> None:
        """The longest time between two steps of a rank after each kill, beyond the usual one."""
        gaps = [
            (after["at"], after["at"] - before["at"])
            for rank in self._ranks
            for before, after in zip(rank.records, rank.records[1:], strict=False)
        ]
        usual = float(np.median([gap for _, gap in gaps])) if gaps else 0.0
        for at, gap in gaps:
            causes = [kill for kill in self._kills if kill.at <= at]
            if causes:
                causes[-1].stall_s = max(causes[-1].stall_s, gap - usual)


def main(plan: str, folder: str) -> None:
    """Carry out a plan, and write what came of it as the last line."""
    outcome = run_here(Plan(**json.loads(plan)), Path(folder))
    sys.stdout.write("\n" + json.dumps(asdict(outcome)) + "\n")


def _role(name: str) -> str:
    if name == PLANNER:
        return "planner"
    if name.startswith("constructor"):
        return "constructor"
    return "shadow" if ".shadow" in name else "loader"


def table(outcomes: Mapping[str, Outcome]) -> str:
    """The stalls by role, as lines of text; one column of numbers for each outcome."""
    lines = [f"{'killed':<12}" + "".join(f"{name:>40}" for name in outcomes)]
    for role in ROLES:
        cells = []
        for outcome in outcomes.values():
            stalls = outcome.stalls()[role]
            if stalls:
                p50, p90 = np.percentile(stalls, [50, 90])
                cells.append(f"{len(stalls)} kills: {p50:.2f} / {p90:.2f} / {max(stalls):.2f} s")
            else:
                cells.append("-")
        lines.append(f"{role:<12}" + "".join(f"{cell:>40}" for cell in cells))
    for name, outcome in outcomes.items():
        kills = Counter(kill.role for kill in outcome.kills)
        lines.append(
            f"{name}: {sum(kills.values())} kills, {outcome.lanes} lanes, {outcome.lost} lost,"
            f" {outcome.duplicated} duplicated, {outcome.hangs} hangs"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main(*sys.argv[1:])
