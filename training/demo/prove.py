"""Decides from logs alone whether runs under different layouts were one and the same training.

Pure functions: logs in, `Check` values out. A check that cannot be made, because a rank, a step or a lane is
missing, has failed. Two kinds of claims are checked: that a run equals its reference (global batches exactly,
losses and gradient norms within a relative tolerance), and that the hard conditions that make this worth
something did occur (gradients were clipped, documents were split and carried over steps).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

from training.demo.evidence import Check, Difference, Evidence, GlobalBatch, by_step, global_batches
from training.demo.logs import RunLog, StepRecord


def prove_family(reference: Evidence, others: Sequence[Evidence], *, lanes: int, rtol: float) -> list[Check]:
    """Checks a reference run, then every other run of the same training against it.

    Args:
        reference: The uninterrupted run.
        others: Interrupted and resumed runs, under any layout.
        lanes: Lanes of a global batch.
        rtol: Largest relative difference in loss and gradient norm.
    """
    checks = [
        check_complete(reference, lanes=lanes),
        check_delivered_once(reference),
        check_documents_carried(reference),
        check_clipping_active(reference),
    ]
    for other in others:
        checks.append(check_complete(other, lanes=lanes))
        checks.append(check_same_batches(reference, other))
        checks.append(check_same_loss(reference, other, rtol=rtol))
        checks.append(check_same_grad_norm(reference, other, rtol=rtol))
    return checks


def check_complete(run: Evidence, *, lanes: int) -> Check:
    """Every rank logged every step once, and the ranks together ran every lane of every step once.

    Ranks that differ only on the tensor-parallel axis must have run the same lanes with the same samples.
    """
    problems = list(_missing_ranks(run))
    for rank, records in run.log.steps.items():
        problems.extend(_wrong_steps(rank, records, run.steps))
    for step, peers in by_step(run.log).items():
        problems.extend(_wrong_lanes(step, peers, lanes))
    total = run.layout.world_size * len(run.steps)
    return _check(run, "log complete", problems, f"{total} step lines, {lanes} lanes in each step")


def check_delivered_once(run: Evidence) -> Check:
    """No token of any sample was trained on twice."""
    problems = []
    seen: dict[tuple[str, int, str, int], list[tuple[int, int, int]]] = defaultdict(list)
    for step, batch in global_batches(run.log).items():
        for samples in batch.values():
            for sample in samples:
                seen[sample.document].append((sample.start, sample.end, step))
    for (source, epoch, file, row), ranges in seen.items():
        ranges.sort()
        for (_, end, step), (start, _, other_step) in itertools.pairwise(ranges):
            if start < end:
                problems.append(
                    f"steps {step} and {other_step} both hold token {start} of row {row} of {file} "
                    f"({source}, epoch {epoch})"
                )
    num_ranges = sum(map(len, seen.values()))
    return _check(run, "no token twice", problems, f"{num_ranges} ranges of {len(seen)} documents, disjoint")


def check_documents_carried(run: Evidence) -> Check:
    """Documents were split and their rest carried over to later steps: what a careless resume would lose."""
    steps_of: dict[tuple[str, int, str, int], set[int]] = defaultdict(set)
    num_split = 0
    for step, batch in global_batches(run.log).items():
        for samples in batch.values():
            for sample in samples:
                num_split += sample.start > 0
                steps_of[sample.document].add(step)
    num_carried = sum(len(steps) > 1 for steps in steps_of.values())
    problems = [] if num_split else ["no document was split"]
    problems += [] if num_carried else ["no document was carried over to a later step"]
    detail = f"documents over several steps: {num_carried}, continuations in packs: {num_split}"
    return _check(run, "documents split and carried", problems, detail)


def check_clipping_active(run: Evidence) -> Check:
    """The gradient was clipped in at least one step, on all ranks alike."""
    problems = []
    clipped = 0
    for step, records in by_step(run.log).items():
        if len({record.clipped for record in records}) > 1:
            problems.append(f"step {step}: ranks disagree on clipping")
        clipped += records[0].clipped
    if not clipped:
        problems.append("the gradient was never clipped")
    return _check(run, "gradient clipping active", problems, f"in {clipped} of {len(run.steps)} steps")


def check_same_batches(reference: Evidence, run: Evidence) -> Check:
    """Each step's global batch has the same samples in the same packs and lanes as the reference's."""
    problems = []
    expected, actual = global_batches(reference.log), global_batches(run.log)
    num_samples = 0
    for step in run.steps:
        if step not in expected:
            problems.append(f"step {step}: missing in the log of {reference.name}")
        elif step not in actual:
            problems.append(f"step {step}: missing")
        elif expected[step] != actual[step]:
            problems.append(f"step {step}: {_batch_difference(expected[step], actual[step])}")
        else:
            num_samples += sum(map(len, actual[step].values()))
    detail = f"{num_samples} ranges equal those of {reference.name}"
    if run.steps.start > 0:
        before = _documents(batch for step, batch in expected.items() if step < run.steps.start)
        num_continued = len(before & _documents(actual.values()))
        detail += f"; documents continued across the resume: {num_continued}"
    return _check(run, "same samples, packs, lanes", problems, detail)


def check_same_loss(reference: Evidence, run: Evidence, *, rtol: float) -> Check:
    """Each step's loss, on every rank, is within a relative tolerance of the reference's."""
    return _check_close(reference, run, "same loss", loss_differences(reference.log, run.log), rtol)


def check_same_grad_norm(reference: Evidence, run: Evidence, *, rtol: float) -> Check:
    """Each step's gradient norm, on every rank, is within a relative tolerance of the reference's.

    The loss alone would not tell gradients that are all wrong by one factor: Adam divides it out.
    """
    differences = _differences(reference.log, run.log, lambda record: record.grad_norm)
    return _check_close(reference, run, "same gradient norm", differences, rtol)


def loss_differences(reference: RunLog, run: RunLog) -> list[Difference]:
    """Compares the losses of the steps that both logged, in order of steps.

    Every rank of the run is compared with every rank of the reference, so that one deviating rank shows.
    """
    return _differences(reference, run, lambda record: record.loss)


def _differences(reference: RunLog, run: RunLog, value: Callable[[StepRecord], float]) -> list[Difference]:
    expected, actual = by_step(reference), by_step(run)
    differences = []
    for step in sorted(expected.keys() & actual.keys()):
        pairs = itertools.product(map(value, expected[step]), map(value, actual[step]))
        relative = [_relative_difference(left, right) for left, right in pairs]
        worst = math.nan if any(map(math.isnan, relative)) else max(relative)
        differences.append(Difference(step=step, relative=worst))
    return differences


def _check_close(
    reference: Evidence, run: Evidence, claim: str, differences: Sequence[Difference], rtol: float
) -> Check:
    relative = {difference.step: difference.relative for difference in differences}
    problems = []
    for step in run.steps:
        if step not in relative:
            problems.append(f"step {step}: nothing to compare with {reference.name}")
        elif not relative[step] <= rtol:
            problems.append(f"step {step}: relative difference {relative[step]:.2e}, allowed {rtol:.0e}")
    worst = max(relative.values(), default=math.nan)
    size = f"largest relative difference {worst:.1e}" if worst else "exactly equal"
    return _check(run, claim, problems, f"{size}, allowed {rtol:.0e}")


def _documents(batches: Iterable[GlobalBatch]) -> set[tuple[str, int, str, int]]:
    """Every document that has a part in the batches."""
    return {sample.document for batch in batches for samples in batch.values() for sample in samples}


def _missing_ranks(run: Evidence) -> Iterator[str]:
    """Names the ranks without a log, those that should not exist, and the places of the mesh held wrongly."""
    expected = set(range(run.layout.world_size))
    for rank in sorted(expected - run.log.steps.keys()):
        yield f"rank {rank}: no log"
    for rank in sorted(run.log.steps.keys() - expected):
        yield f"rank {rank}: a log of a rank that {run.layout} does not have"
    places = Counter(
        (records[0].dp_rank, records[0].tp_rank) for records in run.log.steps.values() if records
    )
    for dp_rank in range(run.layout.dp):
        for tp_rank in range(run.layout.tp):
            if places[dp_rank, tp_rank] != 1:
                yield f"dp rank {dp_rank}, tp rank {tp_rank}: held by {places[dp_rank, tp_rank]} ranks"


def _wrong_steps(rank: int, records: Sequence[StepRecord], steps: range) -> Iterator[str]:
    """Names the steps that a rank lacks, has several times, or should not have."""
    counts = Counter(record.step for record in records)
    for step in steps:
        if counts[step] != 1:
            yield f"rank {rank}: step {step} logged {counts[step]} times"
    for step in sorted(counts.keys() - set(steps)):
        yield f"rank {rank}: logged step {step}, which is none of its steps"


def _wrong_lanes(step: int, records: Sequence[StepRecord], lanes: int) -> Iterator[str]:
    """Names the lanes of a step that no dp rank ran, that several ran, or on which tp ranks disagree."""
    holders: dict[int, set[int]] = defaultdict(set)
    by_dp_rank: dict[int, StepRecord] = {}
    for record in records:
        numbers = [lane.lane for lane in record.lanes]
        if len(set(numbers)) != len(numbers):
            yield f"step {step}: rank {record.rank} ran a lane twice"
        for number in numbers:
            holders[number].add(record.dp_rank)
        first = by_dp_rank.setdefault(record.dp_rank, record)
        if first.lanes != record.lanes:
            yield f"step {step}: ranks {first.rank} and {record.rank} share dp {first.dp_rank} but not lanes"
    for lane in range(lanes):
        if len(holders[lane]) != 1:
            yield f"step {step}: lane {lane} run by {len(holders[lane])} dp ranks"
    for lane in sorted(holders.keys() - set(range(lanes))):
        yield f"step {step}: lane {lane} of {lanes} lanes"


def _batch_difference(expected: GlobalBatch, actual: GlobalBatch) -> str:
    """Says where two global batches first differ."""
    for lane in sorted(expected.keys() | actual.keys()):
        if lane not in actual:
            return f"lane {lane} is missing"
        if lane not in expected:
            return f"lane {lane} is not in the reference"
        if expected[lane] != actual[lane]:
            missing = Counter(expected[lane]) - Counter(actual[lane])
            if missing:
                sample = min(missing)
                tokens = f"tokens {sample.start}–{sample.end} of row {sample.row} of {sample.file}"
                return f"lane {lane} lacks {sample.source} {tokens} in pack {sample.pack}"
            return f"lane {lane} has other samples, or the same in another order"
    raise AssertionError("the batches are equal")


def _relative_difference(reference: float, value: float) -> float:
    if not (math.isfinite(reference) and math.isfinite(value)):
        return math.nan
    if reference == value:
        return 0.0
    return abs(value - reference) / abs(reference) if reference else math.inf


def _check(run: Evidence, claim: str, problems: Sequence[str], detail: str) -> Check:
    if problems:
        detail = problems[0] + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else "")
    return Check(
        run=run.name,
        layout=str(run.layout),
        steps=run.steps,
        claim=claim,
        passed=not problems,
        detail=detail,
    )
