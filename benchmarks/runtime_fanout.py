"""How many connections a job opens, by the number of its ranks: real processes, without torch, of one machine."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import ray

from benchmarks.definition import Benchmark, Contender, Kind, Measure, Settings
from benchmarks.loading.corpus import write_tokens
from benchmarks.running.cluster import cluster
from benchmarks.running.ranks import answer, ranks

_SOURCES, _LOADERS, _STEPS = 128, 4, 4
_FEW, _MANY = 8, 64
_LOADER, _CONSTRUCTOR, _PLANNER = (f"of a {role}" for role in ("loader", "constructor", "planner"))


def _mixture(folder: Path, lanes: int) -> dict[str, Any]:
    """Many sources, which read the same few files."""
    folder.mkdir()
    corpus = write_tokens(folder, 400_000)
    spec = {"weight": 1, "on_exhausted": "repeat"}
    sources = {
        f"s{i:03}": {**spec, "path": str(corpus.files[i % len(corpus.files)])} for i in range(_SOURCES)
    }
    return {"seed": 1, "seq_len": 1024, "packs": lanes, "lanes": lanes, "sources": sources}


def _actors(job: str) -> dict[int, str]:
    """The processes of the actors of a job, and their roles."""
    found: dict[int, str] = {}
    named: list[dict[str, Any]] = ray.util.list_named_actors(all_namespaces=True)
    for one in named:
        if one["namespace"] == f"omniload-{job}":
            actor: Any = ray.get_actor(one["name"], namespace=one["namespace"])
            stats: Any = ray.get(actor.stats.remote(), timeout=60)[0]
            found[stats.pid] = stats.role
    return found


def _connections(actors: dict[int, str], clients: set[int]) -> Counter[str]:
    """Connections over TCP with other processes of the job; the most that an actor of a role has."""
    ends = {}
    for pid in (*actors, *clients):
        for one in psutil.Process(pid).net_connections("tcp"):
            if one.status == psutil.CONN_ESTABLISHED:
                ends[one.laddr] = pid, one.raddr
    of_actor: Counter[int] = Counter()
    for pid, other in ends.values():
        if pid in actors and other in ends and ends[other][0] != pid:
            of_actor[pid] += 1
    most: Counter[str] = Counter()
    for pid, role in actors.items():
        most[role] = max(most[role], of_actor[pid])
    return most


def _counted(num_ranks: int, folder: Path, address: str) -> Counter[str]:
    """Of a job with so many ranks, after a few steps."""
    job = f"fanout-{num_ranks}"
    options = {"address": address, "job": job, "loaders": _LOADERS}
    mixture = _mixture(folder / job, _MANY) | {"execution": "ray", "ray": options}
    each = {"mixture": mixture, "ranks": num_ranks, "execution": "ray", "steps": _STEPS, "step_s": 0.5}
    with ranks("benchmarks.running.rank", [{**each, "rank": rank} for rank in range(num_ranks)]) as processes:
        for process in processes:
            answer(process)
        return _connections(_actors(job), {process.pid for process in processes})


@contextmanager
def _contenders(settings: Settings) -> Iterator[Sequence[Contender]]:
    few, many = settings.sized(_FEW, 2), settings.sized(_MANY, 4)
    folder = Path(tempfile.mkdtemp(dir=settings.directory, prefix="runtime_fanout-"))
    os.environ["OMNILOAD_RUNTIME_DIR"] = str(folder / "runtime")
    counted: dict[int, Counter[str]] = {}

    def contender(num_ranks: int, measure: str, role: str, address: str) -> Contender:
        def run() -> int:
            if num_ranks not in counted:  # once, for all measures: it does not vary
                counted[num_ranks] = _counted(num_ranks, folder, address)
            return counted[num_ranks][role]

        return Contender(name=_name(num_ranks == many), measure=measure, kind=Kind.OURS, run=run)

    try:
        with cluster() as address:
            yield [
                contender(num_ranks, measure, role, address)
                for measure, role in (
                    (_LOADER, "loader"),
                    (_CONSTRUCTOR, "constructor"),
                    (_PLANNER, "planner"),
                )
                for num_ranks in (few, many)
            ]
    finally:
        del os.environ["OMNILOAD_RUNTIME_DIR"]
        shutil.rmtree(folder, ignore_errors=True)


def _name(many: bool) -> str:
    return f"{_MANY if many else _FEW} ranks"


BENCHMARK = Benchmark(
    name="runtime_fanout",
    measures_what="Connections of one actor with the ranks and actors of its job, which has 128 sources in 4 loaders.",
    how_to_read=(
        "The most that one actor of a role has, over TCP, after a few steps of ranks that are processes of their own"
        " and import no torch. The constructor of a node is to have one with each of its ranks, and the planner is"
        " asked once by each for its stream. A loader is to have as many whatever the number of ranks: it talks to the"
        " planner and to constructors, one per node, and besides only to a rank that asks about the sources themselves:"
        " rank 0, whether they can be opened; any, where samples come from. With a loader in every rank, each of them"
        " has every source open."
    ),
    measures=tuple(
        Measure(
            name=name,
            unit="connections",
            scale=1,
            higher_is_better=False,
            reference=_name(False),
            timed=False,
        )
        for name in (_LOADER, _CONSTRUCTOR, _PLANNER)
    ),
    contenders=_contenders,
)
