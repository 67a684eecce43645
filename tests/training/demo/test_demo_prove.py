"""The proof passes for equal trainings under different layouts, and fails for every way to be unequal."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.training.demo.synthetic import LANES, PACK_TOKENS, SyntheticRun, run
from training.demo.evidence import Check
from training.demo.prove import loss_differences, prove_family

RTOL = 1e-5


def prove(directory: Path, reference: SyntheticRun, *others: SyntheticRun) -> list[Check]:
    evidence = [other.evidence(directory / f"other-{index}") for index, other in enumerate(others)]
    return prove_family(
        reference.evidence(directory / "reference", "reference"), evidence, lanes=LANES, rtol=RTOL
    )


def failures(checks: list[Check]) -> dict[str, str]:
    return {check.claim: check.detail for check in checks if not check.passed}


def test_equal_trainings_pass(tmp_path: Path) -> None:
    """Killed early, resumed on dp4 and on dp1 × tp2: every check passes."""
    checks = prove(
        tmp_path,
        run(),
        run(steps=range(5)),
        run(dp=4, tp=1, steps=range(4, 8)),
        run(dp=1, tp=2, steps=range(4, 8)),
    )
    assert len(checks) == 4 + 3 * 4
    assert failures(checks) == {}


def skip_lane(spoiled: SyntheticRun) -> None:
    for rank in (0, 1):
        del spoiled.row(rank, 5)["lanes"][1]


def skip_lane_on_one_tensor_rank(spoiled: SyntheticRun) -> None:
    del spoiled.row(1, 5)["lanes"][1]


def repeat_previous_lane(spoiled: SyntheticRun) -> None:
    for rank in (0, 1):
        spoiled.row(rank, 5)["lanes"][0]["samples"] = spoiled.row(rank, 4)["lanes"][0]["samples"]


def repeat_sample_in_lane(spoiled: SyntheticRun) -> None:
    for rank in (2, 3):
        samples = spoiled.row(rank, 6)["lanes"][1]["samples"]
        samples[1] = samples[0]


def lose_sample(spoiled: SyntheticRun) -> None:
    for rank in (2, 3):
        del spoiled.row(rank, 6)["lanes"][0]["samples"][0]


def swap_lanes(spoiled: SyntheticRun) -> None:
    for rank in (2, 3):
        first, second = spoiled.row(rank, 6)["lanes"]
        first["samples"], second["samples"] = second["samples"], first["samples"]


def move_to_other_pack(spoiled: SyntheticRun) -> None:
    for rank in (2, 3):
        spoiled.row(rank, 6)["lanes"][0]["samples"][0][0] += 1


def reorder_in_lane(spoiled: SyntheticRun) -> None:
    for rank in (2, 3):
        spoiled.row(rank, 6)["lanes"][0]["samples"].reverse()


def shift_token_range(spoiled: SyntheticRun) -> None:
    for rank in (2, 3):
        spoiled.row(rank, 6)["lanes"][0]["samples"][1][6] += 1


def other_epoch(spoiled: SyntheticRun) -> None:
    for rank in (2, 3):
        spoiled.row(rank, 6)["lanes"][0]["samples"][1][2] = 1


def loss_off(spoiled: SyntheticRun) -> None:
    for row in spoiled.rows_of(5):
        row["loss"] *= 1 + 1e-4


def loss_off_on_one_rank(spoiled: SyntheticRun) -> None:
    spoiled.row(3, 5)["loss"] *= 1 - 1e-4


def loss_not_a_number(spoiled: SyntheticRun) -> None:
    spoiled.row(2, 5)["loss"] = float("nan")


def loss_infinite(spoiled: SyntheticRun) -> None:
    for row in spoiled.rows_of(5):
        row["loss"] = float("inf")


def gradient_scaled(spoiled: SyntheticRun) -> None:
    for row in spoiled.rows_of(5):
        row["grad_norm"] *= 2


def miss_step(spoiled: SyntheticRun) -> None:
    for rank, rows in spoiled.rows.items():
        spoiled.rows[rank] = [row for row in rows if row["step"] != 6]


def miss_last_step(spoiled: SyntheticRun) -> None:
    for rows in spoiled.rows.values():
        rows.pop()


def miss_step_on_one_rank(spoiled: SyntheticRun) -> None:
    spoiled.rows[2] = [row for row in spoiled.rows[2] if row["step"] != 6]


def log_step_twice(spoiled: SyntheticRun) -> None:
    for rows in spoiled.rows.values():
        rows.append(copy.deepcopy(rows[-1]))


def log_extra_step(spoiled: SyntheticRun) -> None:
    for rows in spoiled.rows.values():
        rows.append({**copy.deepcopy(rows[-1]), "step": 8})


def miss_rank(spoiled: SyntheticRun) -> None:
    del spoiled.rows[3]


def miss_data_parallel_pair(spoiled: SyntheticRun) -> None:
    del spoiled.rows[2], spoiled.rows[3]


def extra_rank(spoiled: SyntheticRun) -> None:
    spoiled.rows[4] = copy.deepcopy(spoiled.rows[3])


def wrong_place_in_mesh(spoiled: SyntheticRun) -> None:
    for row in spoiled.rows[3]:
        row["tp_rank"] = 0


def run_lane_of_other_rank(spoiled: SyntheticRun) -> None:
    for rank in (0, 1):
        spoiled.row(rank, 5)["lanes"].append(copy.deepcopy(spoiled.row(2, 5)["lanes"][0]))


def run_lane_that_does_not_exist(spoiled: SyntheticRun) -> None:
    for rank in (2, 3):
        extra = {"lane": LANES, "cost": 0, "samples": []}
        spoiled.row(rank, 5)["lanes"].append(extra)


BATCHES = "same samples, packs, lanes"
FAULTS: list[tuple[Callable[[SyntheticRun], None], set[str]]] = [
    (skip_lane, {"log complete", BATCHES}),
    (skip_lane_on_one_tensor_rank, {"log complete"}),
    (repeat_previous_lane, {BATCHES}),
    (repeat_sample_in_lane, {BATCHES}),
    (lose_sample, {BATCHES}),
    (swap_lanes, {BATCHES}),
    (move_to_other_pack, {BATCHES}),
    (reorder_in_lane, {BATCHES}),
    (shift_token_range, {BATCHES}),
    (other_epoch, {BATCHES}),
    (loss_off, {"same loss"}),
    (loss_off_on_one_rank, {"same loss"}),
    (loss_not_a_number, {"same loss"}),
    (loss_infinite, {"same loss"}),
    (gradient_scaled, {"same gradient norm"}),
    (miss_step, {"log complete", BATCHES, "same loss", "same gradient norm"}),
    (miss_last_step, {"log complete", BATCHES, "same loss", "same gradient norm"}),
    (miss_step_on_one_rank, {"log complete"}),
    (log_step_twice, {"log complete"}),
    (log_extra_step, {"log complete"}),
    (miss_rank, {"log complete"}),
    (miss_data_parallel_pair, {"log complete", BATCHES}),
    (extra_rank, {"log complete"}),
    (wrong_place_in_mesh, {"log complete"}),
    (run_lane_of_other_rank, {"log complete"}),
    (run_lane_that_does_not_exist, {"log complete", BATCHES}),
]


@pytest.mark.parametrize(("spoil", "claims"), FAULTS, ids=[spoil.__name__ for spoil, _ in FAULTS])
def test_each_fault_fails_the_claims_it_breaks(
    tmp_path: Path, spoil: Callable[[SyntheticRun], None], claims: set[str]
) -> None:
    spoiled = run(steps=range(4, 8))
    spoil(spoiled)
    failed = failures(prove(tmp_path, run(), spoiled))
    assert failed.keys() == claims


def test_details_name_the_step_and_what_is_wrong(tmp_path: Path) -> None:
    spoiled = run(steps=range(4, 8))
    skip_lane(spoiled)
    loss_off(spoiled)
    failed = failures(prove(tmp_path, run(), spoiled))
    assert failed["log complete"] == "step 5: lane 1 run by 0 dp ranks"
    assert failed[BATCHES] == "step 5: lane 1 is missing"
    assert failed["same loss"] == "step 5: relative difference 1.00e-04, allowed 1e-05"


def test_a_step_missing_in_the_reference_fails_the_comparison(tmp_path: Path) -> None:
    reference = run()
    miss_step(reference)
    checks = prove(tmp_path, reference, run(dp=4, tp=1))
    assert [check.passed for check in checks if check.claim in {BATCHES, "same loss"}] == [False, False]


def test_a_token_delivered_twice_in_the_reference_fails(tmp_path: Path) -> None:
    """A reference that trains on a part of a document again fails by itself, whatever the others do."""
    reference = run()
    for rank in (0, 1):
        sample = reference.row(rank, 6)["lanes"][0]["samples"][0]
        sample[5] -= 1
        sample[6] -= 1
    failed = failures(prove(tmp_path, reference, copy.deepcopy(reference)))
    assert failed.keys() == {"no token twice"}
    assert f"token {6 * PACK_TOKENS - 1} of row 7" in failed["no token twice"]


def test_nothing_split_or_clipped_fails(tmp_path: Path) -> None:
    """Equality without the hard conditions is not accepted as proof."""
    easy = run()
    for rows in easy.rows.values():
        for row in rows:
            row["clipped"] = False
            for lane in row["lanes"]:
                for sample in lane["samples"]:
                    sample[4:] = [1000 * row["step"] + sample[4], 0, 24]
    failed = failures(prove(tmp_path, easy))
    assert failed.keys() == {"documents split and carried", "gradient clipping active"}


def test_ranks_that_disagree_on_clipping_fail(tmp_path: Path) -> None:
    reference = run()
    reference.row(2, 1)["clipped"] = False
    assert failures(prove(tmp_path, reference)) == {
        "gradient clipping active": "step 1: ranks disagree on clipping"
    }


def test_loss_difference_is_the_worst_over_ranks(tmp_path: Path) -> None:
    reference, other = run(steps=range(2)), run(dp=1, tp=2, steps=range(1, 2))
    other.row(1, 1)["loss"] = 4.0 * 1.25
    difference = loss_differences(reference.evidence(tmp_path / "a").log, other.evidence(tmp_path / "b").log)
    assert [(entry.step, entry.relative) for entry in difference] == [(1, 0.25)]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_single_changed_number_fails(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Whatever field of whatever sample of whatever rank deviates, the proof notices."""
    spoiled = run(steps=range(4, 8))
    rank = data.draw(st.integers(0, 3), label="rank")
    step = data.draw(st.sampled_from(spoiled.steps), label="step")
    lane = data.draw(st.sampled_from(spoiled.row(rank, step)["lanes"]), label="lane")
    sample = data.draw(st.sampled_from(lane["samples"]), label="sample")
    index = data.draw(st.sampled_from([0, 2, 4, 5, 6]), label="field")
    sample[index] += data.draw(st.sampled_from([-1, 1, 1000]), label="change")
    directory = tmp_path_factory.mktemp("proof")
    assert failures(prove(directory, run(), spoiled))
