"""Tensors, and parts of them, read without a state and without torch.distributed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import checkpoint
from checkpoint.errors import CorruptCheckpoint, MismatchError, NotACheckpoint
from checkpoint.format.digest import PIECE_BYTES
from storage import Store
from tests.checkpoint.counting_store import CountingStore
from tests.checkpoint.simulation import bits, random_bits

_BIG = random_bits((64, 1 << 16), torch.float32, seed=1)  # 16 MiB: rows of 256 KiB
_STATE: dict[str, Any] = {
    "model": {"big": _BIG, "norm.weight": random_bits((5, 3), torch.bfloat16, seed=2)},
    "other": {"scalar": torch.tensor(7), "empty": torch.zeros(0, 3), "norm.x": torch.arange(4)},
}


@pytest.fixture(scope="module", params=[None, {"model": "zstd"}], ids=["plain", "zstd"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lazy") / "c"
    checkpoint.save(path, _STATE, step=5, compression=request.param)
    return path


def test_it_is_a_mapping_of_names_to_tensors_not_yet_read(place: Path) -> None:
    counting = CountingStore(place)
    saved = checkpoint.open_checkpoint(counting)
    assert list(saved) == ["model/big", "model/norm.weight", "other/empty", "other/norm.x", "other/scalar"]
    assert len(saved) == 5
    assert saved.step == 5
    assert saved["model/big"].shape == (64, 1 << 16)
    assert saved["model/norm.weight"].dtype == torch.bfloat16
    assert "other/nothing" not in saved
    assert saved.objects["other"] == {"kind": "tree", "value": {}}
    assert not counting.ranges
    assert not dist.is_initialized()


def test_patterns_choose_what_is_read(place: Path) -> None:
    saved = checkpoint.open_checkpoint(place)
    found = saved.read("*/norm*", "other/scalar")
    assert list(found) == ["model/norm.weight", "other/norm.x", "other/scalar"]
    assert bits(found["model/norm.weight"]) == bits(_STATE["model"]["norm.weight"])
    assert found["other/scalar"] == 7
    everything = saved.read("model", "other")
    assert all(bits(everything[f"model/{key}"]) == bits(value) for key, value in _STATE["model"].items())
    assert everything["other/empty"].shape == (0, 3)
    with pytest.raises(MismatchError, match="'modle' names no tensor"):
        saved.read("modle")


def test_a_slice_reads_the_pieces_that_hold_it(place: Path) -> None:
    counting = CountingStore(place)
    part = checkpoint.open_checkpoint(counting)["model/big"][17, 100:200]
    assert bits(part) == bits(_BIG[17, 100:200])
    assert 0 < counting.num_bytes() <= PIECE_BYTES + 4096  # with the header, if the first piece is read
    exact = CountingStore(place)
    part = checkpoint.open_checkpoint(exact, verify=False)["model/big"][17, 100:200]
    assert bits(part) == bits(_BIG[17, 100:200])
    assert exact.num_bytes() <= counting.num_bytes()


indices = st.lists(
    st.one_of(
        st.integers(-6, 6),
        st.builds(
            slice,
            st.none() | st.integers(-7, 7),
            st.none() | st.integers(-7, 7),
            st.none() | st.integers(1, 3),
        ),
        st.just(...),
    ),
    max_size=3,
)


@given(indices)
@settings(max_examples=100, deadline=None)
def test_an_index_means_what_it_means_to_torch(index: list[Any]) -> None:
    value = _STATE["model"]["norm.weight"]
    if not Store("memory://lazy").exists("manifest.json"):
        checkpoint.save("memory://lazy", {"model": {"norm.weight": value}})
    tensor = checkpoint.open_checkpoint("memory://lazy")["model/norm.weight"]
    if index.count(...) > 1:
        with pytest.raises(IndexError):
            tensor[tuple(index)]
        return
    try:
        expected = value[tuple(index)]
    except IndexError:
        with pytest.raises(IndexError):
            tensor[tuple(index)]
        return
    found = tensor[tuple(index)]
    assert found.shape == expected.shape
    assert bits(found) == bits(expected)


@pytest.mark.parametrize("index", [slice(None, None, -1), [1, 2], None, True, "x"])
def test_other_indices_are_refused(place: Path, index: Any) -> None:
    with pytest.raises(IndexError):
        checkpoint.open_checkpoint(place)["model/big"][index]


def test_damage_is_found_where_it_is_read(place: Path, tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "c", _STATE)
    (path,) = (tmp_path / "c").glob("data/*/model-*.safetensors")
    data = bytearray(path.read_bytes())
    data[4096 + _BIG.nbytes - 1] ^= 1
    path.write_bytes(data)
    saved = checkpoint.open_checkpoint(tmp_path / "c")
    assert bits(saved["model/big"][0]) == bits(_BIG[0])
    with pytest.raises(CorruptCheckpoint, match=r"of tensor model/big do not match"):
        saved["model/big"][-1]


def test_a_place_without_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(NotACheckpoint):
        checkpoint.open_checkpoint(tmp_path)
