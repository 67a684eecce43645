"""Planning the save of a very large job on one core, and what its metadata takes."""

from __future__ import annotations

import io
import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
from torch._C._distributed_c10d import HashStore

from benchmarks.checkpointing import plan_peer
from benchmarks.checkpointing.large_job import LargeJob
from benchmarks.checkpointing.large_votes import votes_of
from benchmarks.definition import Benchmark, Contender, Kind, Measure, Settings
from checkpoint.boxes import Box
from checkpoint.engine.coordination import Coordinator
from checkpoint.engine.messages import pack, unpack_all
from checkpoint.engine.metadata import TableEncoder
from checkpoint.engine.options import SaveOptions
from checkpoint.engine.planning import SavePlanner
from checkpoint.format.tables import PARTLY_READ, ROW_GROUPS, footer_of
from checkpoint.frameworks.values import CapturedState, LocalTensor
from checkpoint.planner import Plan, make_plan
from checkpoint.planner.description import join
from checkpoint.ragged import starts
from storage import Store

_SMALL_JOB = LargeJob(dp=8, tp=8, pp=2, num_layers=16)
_OPTIONS = SaveOptions(step=1, overwrite=True, timeout_s=60, user_metadata={})


def _plan_and_answer(messages: Sequence[bytes]) -> int:
    plan = make_plan(messages)
    assert all(plan.shares())
    return len(plan.held)


def _root_memory(path: Path, *, planning: bool) -> int:
    """Peak memory of a process that plans; or before it does, with all that it imports."""
    command = [sys.executable, "-m", "benchmarks.checkpointing.plan_memory", str(path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(done.stdout.split()[planning])


def _shards_of_one_rank(num_tensors: int) -> CapturedState:
    """As many tensors as a rank of the job holds boxes, small and whole."""
    value = torch.zeros(8, 8)
    return CapturedState(
        tensors=[
            LocalTensor(
                group="model",
                key=f"layers.{index}.weight",
                dtype=value.dtype,
                shape=(8, 8),
                boxes=(Box((0, 0), (8, 8)),),
                views=(value,),
                tensor=value,
            )
            for index in range(num_tensors)
        ],
        objects={"model": {"kind": "module"}},
        rank_objects={},
    )


class _OneRank:
    """A rank that plans its saves, all by itself."""

    def __init__(self, num_tensors: int) -> None:
        self._num_tensors = num_tensors
        self._store = Store("memory://checkpoint-planning")
        self._names = map(str, itertools.count())
        self._planner = SavePlanner(Coordinator(HashStore(), 0, 1))
        self._state = _shards_of_one_rank(num_tensors)

    def forget(self) -> None:
        self._planner = SavePlanner(Coordinator(HashStore(), 0, 1))

    def capture(self) -> None:
        """Descriptions are made anew for each save, and so are never the same objects."""
        self._state = _shards_of_one_rank(self._num_tensors)

    def plan(self) -> int:
        self._planner.plan(next(self._names), self._store, lambda: self._state, _OPTIONS)
        return self._num_tensors


def _pass_votes(num_ranks: int) -> int:
    """Join equal votes as they come to rank 0 from its 70 reporters, and pack an answer for each of these."""
    parts = [[b"x" * 300] * len(one) for one in np.array_split(np.arange(num_ranks), 70)]
    messages = unpack_all([pack(part) for part in parts])
    assert len(set(messages)) == 1
    answers = [b"y" * 200] * len(messages)
    return sum(len(pack(answers[: len(part)])) > 0 for part in parts)


def _read_by_a_stage(job: LargeJob, plan: Plan, tables: dict[str, bytes]) -> list[int]:
    """Bytes of the tables that a rank of each stage reads to find its tensors: catalogs, footers, row groups."""
    always = len(tables["tensors.parquet"]) + len(tables["files.parquet"])
    row_groups = []  # of each table: the first row of each, and their sizes
    for name in PARTLY_READ:
        footer = pq.ParquetFile(io.BytesIO(tables[name])).metadata
        num_rows = [footer.row_group(index).num_rows for index in range(footer.num_row_groups)]
        places = json.loads(footer.metadata[ROW_GROUPS.encode()])
        sizes = np.asarray([place["end"] - place["begin"] for place in places])
        row_groups.append((starts(np.asarray(num_rows)), sizes))
        always += len(footer_of(tables[name]))
    names = [
        re.sub(r"^state\.|\.(exp_avg|exp_avg_sq|master|step)$", "", tensor.key) for tensor in plan.tensors
    ]
    found = []
    for stage in range(job.pp):
        wanted = {name for name, _, _ in job.parameters(stage)}
        ids = [index for index, name in enumerate(names) if name in wanted]
        rows = np.concatenate([np.arange(plan.first[index], plan.first[index + 1]) for index in ids])
        found.append(always)
        for first, sizes in row_groups:
            found[-1] += int(sizes[np.unique(np.searchsorted(first, rows, side="right") - 1)].sum())
    return found


@contextmanager
def _contenders(settings: Settings) -> Iterator[Sequence[Contender]]:
    job = LargeJob() if not settings.quick else LargeJob(dp=4, tp=4, pp=2, num_layers=8)
    messages, small = list(job.messages()), list(_SMALL_JOB.messages())
    plans = plan_peer.plans_of(small)
    plan = make_plan(messages)
    votes = votes_of(plan)
    encoder = TableEncoder(plan)
    tables = encoder.encode(votes)
    num_boxes, total = len(plan.held), sum(map(len, tables.values()))
    read = _read_by_a_stage(job, plan, tables)
    one = _OneRank(int(plan.held_first[1]))

    def ours(
        measure: str, name: str, run: Callable[[], int], before: Callable[[], None] = lambda: None
    ) -> Contender:
        return Contender(measure=measure, name=name, kind=Kind.OURS, run=run, before=before)

    def joined() -> int:
        return len(join(messages).tensor_id)

    def encoded(using: Callable[[], TableEncoder]) -> int:
        return len(using().encode(votes))

    with tempfile.TemporaryDirectory(dir=settings.directory) as directory:
        path = Path(directory) / "messages"
        path.write_bytes(pack(messages))
        yield [
            Contender(measure="cold plan", name="messages decoded and joined", kind=Kind.FLOOR, run=joined),
            ours("cold plan", "plan", partial(_plan_and_answer, messages)),
            Contender(
                measure="cold plan, 128 ranks",
                name="torch DCP",
                kind=Kind.PEER,
                run=partial(plan_peer.make_plan, plans),
            ),
            ours("cold plan, 128 ranks", "plan", partial(_plan_and_answer, small)),
            Contender(
                measure="memory of rank 0",
                name="before",
                kind=Kind.FLOOR,
                run=partial(_root_memory, path, planning=False),
            ),
            ours("memory of rank 0", "plan", partial(_root_memory, path, planning=True)),
            ours("plan on one rank", "new state", one.plan, before=one.forget),
            ours("plan on one rank", "known state", one.plan, before=one.capture),
            ours("plan on one rank", "votes of all ranks, on rank 0", partial(_pass_votes, job.num_ranks)),
            ours("tables", "new plan", partial(encoded, lambda: TableEncoder(plan))),
            ours("tables", "known plan", partial(encoded, lambda: encoder)),
            ours("metadata", "all tables", lambda: 1000 * total // num_boxes),
            Contender(
                measure="metadata",
                name="digests in them",
                kind=Kind.FLOOR,
                run=lambda: 8000 * len(votes.digests) // num_boxes,
            ),
            ours("read by one rank", "mean over stages", lambda: 100_000 * sum(read) // job.pp // total),
            ours("read by one rank", "most", lambda: 100_000 * max(read) // total),
            Contender(
                measure="read by one rank",
                name="its share of the boxes",
                kind=Kind.FLOOR,
                run=lambda: 100_000 // job.pp,
            ),
        ]


def _seconds(name: str, reference: str, *, unit: str = "s", scale: float = 1.0) -> Measure:
    return Measure(name=name, unit=unit, scale=scale, higher_is_better=False, reference=reference)


def _quantity(name: str, unit: str, scale: float, reference: str) -> Measure:
    return Measure(
        name=name, unit=unit, scale=scale, higher_is_better=False, reference=reference, timed=False
    )


BENCHMARK = Benchmark(
    name="checkpoint_planning",
    measures_what="Planning one save of 405 billion parameters on 8,960 ranks, on one core, and its metadata.",
    how_to_read=(
        "Simulated: FSDP 70 x TP 8 x PP 16, bfloat16 weights and, in float32, master weights, two moments of AdamW and"
        " a step per parameter: 3.1 million boxes held, 2.0 million stored. A cold plan begins with the messages of all"
        " ranks in memory as they were sent, and ends with what each is told; the tree that carries them is not in it,"
        " nor is it in that of DCP, which gets the same boxes and pickles. Memory is the peak of a whole process."
        " On one rank the state is as many small tensors as a rank of the first stage holds. Metadata is bytes per"
        " stored box over the Parquet tables, without plain values of ranks. What one rank reads, per cent of that, is"
        " the catalogs of tensors and files, both footers, and the row groups of its tensors."
    ),
    measures=(
        _seconds("cold plan", "messages decoded and joined"),
        _seconds("cold plan, 128 ranks", "torch DCP"),
        _quantity("memory of rank 0", "MiB", 1 << 20, "before"),
        _seconds("plan on one rank", "new state", unit="ms", scale=1e-3),
        _seconds("tables", "new plan"),
        _quantity("metadata", "bytes", 1000, "digests in them"),
        _quantity("read by one rank", "%", 1000, "its share of the boxes"),
    ),
    contenders=_contenders,
)
