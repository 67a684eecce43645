"""What a job reads when it loads into another layout, and how fast boxes of many sizes are read."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from benchmarks.checkpointing import layouts
from benchmarks.checkpointing.large_job import LargeJob
from benchmarks.checkpointing.large_votes import votes_of
from benchmarks.checkpointing.layouts import CHANGES, NUM_RANKS, Layouts
from benchmarks.checkpointing.many_boxes import ManyBoxes
from benchmarks.checkpointing.ranks import RankPool
from benchmarks.definition import Benchmark, Contender, Kind, Measure, Settings
from checkpoint.engine.metadata import TableEncoder
from checkpoint.format.manifest import MANIFEST, Manifest, MetadataFile, encode_manifest
from checkpoint.format.tables import PARTLY_READ, footer_of
from checkpoint.planner import make_plan
from checkpoint.stored import StoredCheckpoint
from storage import Store

_BOX_BYTES = {"8 KiB": 8 << 10, "64 KiB": 64 << 10, "1 MiB": 1 << 20, "16 MiB": 16 << 20}
_REFERENCE = "pread"


def _resharding(pool: RankPool, directory: Path) -> Iterator[Contender]:
    needed: int = pool.call(layouts.num_bytes)[0]

    def read(form: str, source: str, target: str) -> int:
        num_bytes = sum(pool.call(layouts.load, form, target, directory / f"{form} {source}"))
        return int(1000 * num_bytes / needed)

    for form in ("checkpoint", "dcp"):
        for source in sorted({source for source, _ in CHANGES}):
            pool.call(layouts.save, form, source, directory / f"{form} {source}")
    for source, target in CHANGES:
        measure = f"{source} into {target}"
        yield Contender(
            name="checkpoint.load",
            measure=measure,
            kind=Kind.OURS,
            run=partial(read, "checkpoint", source, target),
        )
        yield Contender(
            name="torch DCP load", measure=measure, kind=Kind.PEER, run=partial(read, "dcp", source, target)
        )


def _sizes(directory: Path, num_bytes: int) -> Iterator[Contender]:
    for name, box_bytes in _BOX_BYTES.items():
        boxes = ManyBoxes(directory, num_bytes, box_bytes)
        measure = f"boxes of {name}"
        plain, hashed = partial(boxes.read, hashed=False), partial(boxes.read, hashed=True)
        yield Contender(name=_REFERENCE, measure=measure, kind=Kind.FLOOR, run=plain)
        yield Contender(name=f"{_REFERENCE} (A/A)", measure=measure, kind=Kind.CONTROL, run=plain)
        yield Contender(name=f"{_REFERENCE} + xxh3", measure=measure, kind=Kind.FLOOR, run=hashed)
        yield Contender(name="checkpoint.load", measure=measure, kind=Kind.OURS, run=boxes.load)


def _opening(directory: Path, job: LargeJob) -> Iterator[Contender]:
    """Opening what a rank of one stage needs of a checkpoint of a very large job."""
    store = Store(directory / "large")
    plan = make_plan(list(job.messages()))
    contents = TableEncoder(plan).encode(votes_of(plan)) | {"objects.json": b"{}"}
    manifest = Manifest(
        attempt="0" * 32,
        run_id="0" * 32,
        step=None,
        created="",
        writer={},
        files={
            name: MetadataFile.of(data, footer_of(data) if name in PARTLY_READ else None)
            for name, data in contents.items()
        },
    )
    for name, data in contents.items():
        store.write(f"{manifest.data_dir}/{name}", data)
    store.create(MANIFEST, encode_manifest(manifest))
    wanted = {name for name, _, _ in job.parameters(job.pp // 2)}

    def opened(*, narrowed: bool) -> int:
        stored = StoredCheckpoint.open(store)
        ids = {
            tensor_id
            for (_, key), tensor_id in stored.tensor_ids.items()
            if re.sub(r"^state\.|\.(exp_avg|exp_avg_sq|master|step)$", "", key) in wanted
        }
        tables = (stored.narrowed(ids) if narrowed else stored).tables
        tables.check_tilings(ids)
        return len(ids)

    yield Contender(name="all tables", measure="open", kind=Kind.FLOOR, run=partial(opened, narrowed=False))
    yield Contender(
        name="what a stage needs", measure="open", kind=Kind.OURS, run=partial(opened, narrowed=True)
    )


@contextmanager
def _contenders(settings: Settings) -> Iterator[Sequence[Contender]]:
    with tempfile.TemporaryDirectory(dir=settings.directory, prefix="checkpoint_load-") as name:
        directory = Path(name)
        job = LargeJob() if not settings.quick else LargeJob(dp=4, tp=4, pp=2, num_layers=8)
        with RankPool(NUM_RANKS, Layouts, settings.sized(1001, 51)) as pool:
            yield [
                *_resharding(pool, directory),
                *_sizes(directory, settings.sized(256 << 20, 16 << 20)),
                *_opening(directory, job),
            ]


BENCHMARK = Benchmark(
    name="checkpoint_load",
    measures_what="Bytes that a job reads per byte that it needs, and the speed of loads by size of the stored boxes.",
    how_to_read=(
        "A into B: the state saved in layout A is loaded into layout B by four ranks or two; 1 is what has to be read,"
        " counted by the kernel for all files, metadata included. Boxes of S: one process loads tensors of 16 MiB that"
        " are stored in boxes of S, verified; the floors read the same bytes box by box, without names or layout, and"
        " pread does not look at them. open: what a rank of one pipeline stage needs to know of the checkpoint of a job"
        " of 8,960 ranks, and what it would take to read all tables."
    ),
    measures=(
        *(
            Measure(
                name=f"{source} into {target}",
                unit="bytes read per byte",
                scale=1000,
                higher_is_better=False,
                reference="checkpoint.load",
                timed=False,
            )
            for source, target in CHANGES
        ),
        *(
            Measure(
                name=f"boxes of {name}", unit="GB/s", scale=1e9, higher_is_better=True, reference=_REFERENCE
            )
            for name in _BOX_BYTES
        ),
        Measure(name="open", unit="s", scale=1, higher_is_better=False, reference="all tables"),
    ),
    contenders=_contenders,
)
