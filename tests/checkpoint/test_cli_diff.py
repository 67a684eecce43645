"""`omniload ckpt diff`: whether two checkpoints hold the same state."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

import checkpoint
from checkpoint.boxes import Box
from checkpoint.cli import app
from checkpoint.cli_compare import Kind, compare
from checkpoint.cli_read import PART_BYTES
from checkpoint.format.digest import PIECE_BYTES
from checkpoint.stored import StoredCheckpoint
from storage import Store
from tests.checkpoint.simulation import DTYPES, Layout, layouts, random_bits, save_simulated, shapes

_numbers = itertools.count()


def diff(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["diff", *map(str, arguments)])


def document(*arguments: object) -> dict[str, Any]:
    done = diff(*arguments, "--json")
    assert done.exit_code in (0, 1), done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert (done.exit_code == 0) == found["equal"]
    return found


def state() -> dict[str, Any]:
    return {
        "t": {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)},
        "extra": {"step": 3, "lr": [0.1, 0.2]},
    }


def test_the_same_state_saved_twice_is_equal_and_nothing_is_read(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a", state(), step=1)
    checkpoint.save(tmp_path / "b", state(), step=2, user_metadata={"note": "other"})
    found = document(tmp_path / "a", tmp_path / "b")
    assert found["counts"]["equal"] > 4
    assert found["num_bytes_read"] == 0
    done = diff(tmp_path / "a", tmp_path / "b")
    assert done.exit_code == 0
    assert "equal:" in done.stdout


def test_every_kind_of_difference_is_told_by_key(tmp_path: Path) -> None:
    one, other = state(), state()
    one["t"]["gone"] = torch.zeros(1)
    one["t"]["cast"] = torch.zeros(3)
    other["t"]["cast"] = torch.zeros(3, dtype=torch.float64)
    one["t"]["cut"] = torch.zeros(2, 2)
    other["t"]["cut"] = torch.zeros(4)
    other["t"]["a"][1, 2] = -5
    other["extra"] = {"step": 3, "lr": [0.1, 0.3], "new": 1}
    checkpoint.save(tmp_path / "a", one)
    checkpoint.save(tmp_path / "b", other)
    found = document(tmp_path / "a", tmp_path / "b")
    assert found["only_in_a"] == ["t/gone"]
    assert found["only_in_b"] == ["extra/value.new"]
    assert found["other_form"] == {
        "t/cast": {"a": "float32 [3]", "b": "float64 [3]"},
        "t/cut": {"a": "float32 [2, 2]", "b": "float32 [4]"},
    }
    assert found["other_values"] == ["t/a", "extra/value.lr[1]"]
    assert found["counts"] | {"equal": 0} == {
        "only_in_a": 1,
        "only_in_b": 1,
        "other_form": 2,
        "other_values": 2,
        "equal": 0,
    }
    done = diff(tmp_path / "a", tmp_path / "b")
    assert done.exit_code == 1
    for words in ("only in A: 1\n  t/gone", "t/cast  float32 [3] in A, float64 [3] in B", "  t/a\n"):
        assert words in done.stdout


def test_only_the_first_keys_are_shown_but_all_are_counted(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a", {"t": {f"k{index:02d}": torch.zeros(1) for index in range(25)}})
    checkpoint.save(tmp_path / "b", {"t": {f"k{index:02d}": torch.ones(1) for index in range(25)}})
    shown = diff(tmp_path / "a", tmp_path / "b").stdout
    assert "other values: 25" in shown
    assert "t/k09" in shown
    assert "t/k10" not in shown
    assert "and 15 more" in shown
    assert len(document(tmp_path / "a", tmp_path / "b")["other_values"]) == 25


def test_bits_are_compared_not_numbers(tmp_path: Path) -> None:
    nan = torch.tensor([float("nan")])
    checkpoint.save(tmp_path / "a", {"t": {"zero": torch.tensor([0.0]), "nan": nan}})
    checkpoint.save(tmp_path / "b", {"t": {"zero": torch.tensor([-0.0]), "nan": nan.clone()}})
    assert document(tmp_path / "a", tmp_path / "b")["other_values"] == ["t/zero"]


@settings(max_examples=30, deadline=None)
@given(data=st.data(), shape=shapes, dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99))
def test_any_two_layouts_of_a_tensor_are_equal_until_a_bit_differs(
    data: st.DataObject,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    seed: int,
) -> None:
    tensor = random_bits(shape, dtype, seed)
    stores = []
    for _ in range(2):
        world_size = data.draw(st.integers(1, 3))
        store = Store(f"memory://cli_diff/{next(_numbers)}")
        save_simulated(store, world_size, {"t": tensor}, {"t": data.draw(layouts(shape, world_size))})
        stores.append(store)
    assert compare(*map(StoredCheckpoint.open, stores)).equal
    if tensor.numel():
        changed = tensor.clone()
        raw = changed.view(-1)[data.draw(st.integers(0, tensor.numel() - 1))].view(1).view(torch.uint8)
        raw[0] ^= 1
        world_size = data.draw(st.integers(1, 3))
        store = Store(f"memory://cli_diff/{next(_numbers)}")
        save_simulated(store, world_size, {"t": changed}, {"t": data.draw(layouts(shape, world_size))})
        found = compare(StoredCheckpoint.open(stores[0]), StoredCheckpoint.open(store))
        assert [one.key for one in found.findings[Kind.OTHER_VALUES]] == ["model/t"]


def test_only_boxes_that_the_other_lacks_are_read(tmp_path: Path) -> None:
    tensor = random_bits((8, 4), torch.float32, 1)
    halves = [Box((0, 0), (4, 4)), Box((4, 0), (4, 4))]
    quarters = [halves[0], Box((4, 0), (2, 4)), Box((6, 0), (2, 4))]
    save_simulated(Store(tmp_path / "a"), 2, {"t": tensor}, {"t": [[box] for box in halves]})
    save_simulated(Store(tmp_path / "b"), 3, {"t": tensor}, {"t": [[box] for box in quarters]})
    changed = torch.cat([random_bits((4, 4), torch.float32, 2), tensor[4:]])
    save_simulated(Store(tmp_path / "c"), 3, {"t": changed}, {"t": [[box] for box in quarters]})
    next((tmp_path / "a" / "data").rglob("model-00000-*")).unlink()  # the shared half: never opened
    found = document(tmp_path / "a", tmp_path / "b")
    assert found["equal"]
    assert found["num_bytes_read"] == 2 * 64
    assert not found["rank_local_compared"]
    found = document(tmp_path / "a", tmp_path / "c")
    assert found["other_values"] == ["model/t"]
    assert found["num_bytes_read"] == 0  # the digests of the shared half tell


def test_tensors_larger_than_what_is_read_at_a_time(tmp_path: Path) -> None:
    """Of one the last byte differs; of another the first, after which the rest of it is not read."""
    num, cut = PART_BYTES + (1 << 20), PIECE_BYTES
    tensors = {key: torch.zeros(num, dtype=torch.uint8) for key in ("early", "equal", "late")}
    whole: dict[str, Layout] = {key: [[Box.whole((num,))]] for key in tensors}
    halves: dict[str, Layout] = {key: [[Box((0,), (cut,)), Box((cut,), (num - cut,))]] for key in tensors}
    save_simulated(Store(tmp_path / "a"), 1, tensors, whole)
    tensors["early"][0] = 1
    tensors["late"][-1] = 1
    save_simulated(Store(tmp_path / "b"), 1, tensors, halves)
    found = document(tmp_path / "a", tmp_path / "b")
    assert found["other_values"] == ["model/early", "model/late"]
    assert found["num_bytes_read"] == 2 * (2 * num + PART_BYTES)


def test_rank_local_values_count_on_equally_many_ranks_only(tmp_path: Path) -> None:
    tensor = torch.zeros(2, 2)
    rows = [[Box((0, 0), (1, 2))], [Box((1, 0), (1, 2))]]
    for name, ranks in (("a", 2), ("b", 2), ("c", 1)):
        save_simulated(
            Store(tmp_path / name), ranks, {"t": tensor}, {"t": [rows[0] + rows[1]] if ranks == 1 else rows}
        )
    assert document(tmp_path / "a", tmp_path / "b")["rank_local_compared"]
    assert document(tmp_path / "a", tmp_path / "c")["equal"]
    assert "written by 2 and 1 ranks" in diff(tmp_path / "a", tmp_path / "c").stdout
    torch.manual_seed(1)
    checkpoint.save(tmp_path / "d", {"t": {}})
    torch.manual_seed(2)
    checkpoint.save(tmp_path / "e", {"t": {}})
    assert document(tmp_path / "d", tmp_path / "e")["other_values"] == ["rank 0/rng/torch"]


def test_names_that_are_no_utf8_are_escaped(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a", {"extra": {"\ud800": 1}})
    checkpoint.save(tmp_path / "b", {"extra": {}})
    assert "  extra/value.\\ud800\n" in diff(tmp_path / "a", tmp_path / "b").stdout
    assert document(tmp_path / "a", tmp_path / "b")["only_in_a"] == ["extra/value.\ud800"]


def test_what_cannot_be_compared_ends_in_one_line_and_code_2(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a", state())
    missing = diff(tmp_path / "a", tmp_path / "nothing")
    assert (missing.exit_code, missing.stdout, missing.stderr.count("\n")) == (2, "", 1)
    assert "no manifest.json" in missing.stderr
    checkpoint.save(tmp_path / "b", state())
    table = next((tmp_path / "b" / "data").rglob("stored.parquet"))
    table.write_bytes(table.read_bytes()[:-7])
    damaged = diff(tmp_path / "a", tmp_path / "b")
    assert (damaged.exit_code, damaged.stdout, damaged.stderr.count("\n")) == (2, "", 1)
    assert "stored.parquet" in damaged.stderr


def test_damage_that_reading_meets_is_no_difference(tmp_path: Path) -> None:
    tensor = random_bits((4, 4), torch.float32, 3)
    save_simulated(Store(tmp_path / "a"), 1, {"t": tensor}, {"t": [[Box.whole((4, 4))]]})
    save_simulated(
        Store(tmp_path / "b"), 1, {"t": tensor}, {"t": [[Box((0, 0), (2, 4)), Box((2, 0), (2, 4))]]}
    )
    path = next((tmp_path / "b" / "data").rglob("model-*"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    damaged = diff(tmp_path / "a", tmp_path / "b")
    assert (damaged.exit_code, damaged.stdout, damaged.stderr.count("\n")) == (2, "", 1)
    assert "model/t" in damaged.stderr
