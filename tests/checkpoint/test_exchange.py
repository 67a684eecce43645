"""What several ranks need is read by one of them and handed on: each byte of storage is read once."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from checkpoint.boxes import Box
from checkpoint.errors import CoordinationTimeout, CorruptCheckpoint, RanksFailed
from checkpoint.format.digest import PIECE_BYTES
from storage import Store
from storage.errors import Transient
from tests.checkpoint.counting_store import CountingStore, Range
from tests.checkpoint.simulation import (
    OPTIONS,
    Layout,
    Tensors,
    load_simulated,
    random_bits,
    resharded,
    save_simulated,
)

_numbers = itertools.count()

# Several pieces and bundles, a piece that is not full, and small ones that share a message.
_BIG = (5 * PIECE_BYTES // 1024 + 3, 256)  # float32, 20 MiB + 3 KiB
_TENSORS = {
    "big": random_bits(_BIG, torch.float32, seed=1),
    "bias": random_bits((77,), torch.float16, seed=2),
    "scale": random_bits((), torch.float64, seed=3),
}


def machines(apart: bool, world_size: int) -> list[bytes]:
    """Where ranks run: all on one machine, so that they share memory, or each on its own."""
    return [bytes([rank if apart else 0]) * 32 for rank in range(world_size)]


either_way = pytest.mark.parametrize("apart", [False, True], ids=["one machine", "a machine each"])


def whole(tensors: Tensors, world_size: int) -> dict[str, Layout]:
    """Plain replicas, as under DDP."""
    return {key: [[Box.whole(tensor.shape)]] * world_size for key, tensor in tensors.items()}


@either_way
@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_replicas_read_each_byte_once(tmp_path: Path, world_size: int, flat: bool, apart: bool) -> None:
    save_simulated(Store(tmp_path), 1, _TENSORS, whole(_TENSORS, 1))
    counting = CountingStore(tmp_path)
    reports = load_simulated(
        counting,
        world_size,
        _TENSORS,
        whole(_TENSORS, world_size),
        flat=flat,
        stores=[counting] * world_size,
        machines=machines(apart, world_size),
    )
    payload = list(tmp_path.glob("data/*/*.safetensors"))
    assert not counting.read_twice()
    # All of the file: the header once, and each byte of data once.
    assert counting.num_bytes() == sum(path.stat().st_size for path in payload)
    num_bytes = sum(tensor.nbytes for tensor in _TENSORS.values())
    assert sum(report.num_bytes_read for report in reports) == num_bytes
    for report in reports:
        assert report.num_bytes_read + report.num_bytes_received == num_bytes == report.num_bytes_wanted
        # By bytes: nobody reads more than a fair share and a piece.
        assert 0 < report.num_bytes_read <= num_bytes / world_size + PIECE_BYTES


@either_way
@pytest.mark.parametrize("verify", [True, False])
def test_compressed_pieces_are_read_once_and_travel_as_elements(
    tmp_path: Path, verify: bool, apart: bool
) -> None:
    tensors = {"big": random_bits((1 << 20, 3), torch.bfloat16, seed=5), "ones": torch.ones(1 << 20)}
    options = replace(OPTIONS, compression={"model": "zstd"})
    save_simulated(Store(tmp_path), 1, tensors, whole(tensors, 1), options=options)
    counting = CountingStore(tmp_path)
    columns = {
        "big": [[Box((0, rank), (1 << 20, 1))] for rank in range(3)],
        "ones": whole(tensors, 3)["ones"],
    }
    reports = load_simulated(
        counting,
        3,
        tensors,
        columns,
        verify=verify,
        stores=[counting] * 3,
        machines=machines(apart, 3),
    )
    assert not counting.read_twice()
    read = sum(report.num_bytes_read for report in reports)
    assert 0 < read < tensors["big"].nbytes + tensors["ones"].nbytes // 8  # the ones are next to nothing


@either_way
def test_a_cut_inside_of_pieces_reads_each_piece_once(tmp_path: Path, apart: bool) -> None:
    """Every rank wants a few columns of all rows, so all need every piece, and get only their part of it."""
    save_simulated(Store(tmp_path), 1, _TENSORS, whole(_TENSORS, 1))
    rows = _BIG[0]
    columns = {**whole(_TENSORS, 4), "big": [[Box((0, 64 * rank), (rows, 64))] for rank in range(4)]}
    counting = CountingStore(tmp_path)
    reports = load_simulated(
        counting, 4, _TENSORS, columns, stores=[counting] * 4, machines=machines(apart, 4)
    )
    assert not counting.read_twice()
    small = _TENSORS["bias"].nbytes + _TENSORS["scale"].nbytes
    for report in reports:
        assert report.num_bytes_received < report.num_bytes_wanted == _TENSORS["big"].nbytes // 4 + small


@either_way
def test_elements_of_16_bytes_travel_behind_odd_ones(tmp_path: Path, apart: bool) -> None:
    """A complex128 that is not aligned makes the processor fault."""
    tensors = {
        "a": random_bits((3,), torch.int8, seed=1),
        "b": random_bits((1000,), torch.complex128, seed=2),
    }
    save_simulated(Store(tmp_path), 1, tensors, whole(tensors, 1))
    strided = {**whole(tensors, 3), "b": [[Box((rank,), (998,))] for rank in range(3)]}
    reports = load_simulated(Store(tmp_path), 3, tensors, strided, flat=False, machines=machines(apart, 3))
    assert any(report.num_bytes_received for report in reports)


def test_counters_beside_shards_are_read_by_each_rank(tmp_path: Path) -> None:
    """Connecting the ranks for a few bytes would cost more than reading them again."""
    tensors = {"big": _TENSORS["big"], "step": torch.tensor(7.0)}
    rows = _BIG[0] // 2
    halves = [[Box((0, 0), (rows, _BIG[1]))], [Box((rows, 0), (_BIG[0] - rows, _BIG[1]))]]
    layout = {"big": halves, "step": whole(tensors, 2)["step"]}
    save_simulated(Store(tmp_path), 2, tensors, layout)
    counting = CountingStore(tmp_path)
    reports = load_simulated(counting, 2, tensors, layout, stores=[counting] * 2)
    assert [report.num_bytes_received for report in reports] == [0, 0]
    assert (
        sum(report.num_bytes_read for report in reports) == tensors["big"].nbytes + 2 * tensors["step"].nbytes
    )


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_no_byte_is_read_twice_whatever_the_layouts(data: st.DataObject) -> None:
    w, v = data.draw(st.integers(1, 4), label="w"), data.draw(st.integers(2, 4), label="v")
    tensors, saved, loaded = data.draw(resharded(w, v))
    url = f"memory://exchange/{next(_numbers)}"
    codec = data.draw(st.sampled_from(["none", "zstd"]))
    save_simulated(Store(url), w, tensors, saved, options=replace(OPTIONS, compression={"model": codec}))
    counting = CountingStore(url)
    verify = data.draw(st.booleans(), label="verify")
    reports = load_simulated(counting, v, tensors, loaded, verify=verify, stores=[counting] * v)
    event("exchanged" if any(report.num_bytes_received for report in reports) else "nothing shared")
    if verify and any(report.num_bytes_received for report in reports):
        assert not counting.read_twice()
    Store(url).delete_tree("data")


@either_way
@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_cannot_read_is_named_on_all_ranks(tmp_path: Path, rank: int, apart: bool) -> None:
    """Those that wait for what it should have read do not wait for the time-out, and do not blame each other."""
    save_simulated(Store(tmp_path), 1, _TENSORS, whole(_TENSORS, 1))
    stores = [CountingStore(tmp_path) for _ in range(3)]

    def fail(_: Sequence[Range]) -> None:
        raise Transient("somewhere", "connection reset")

    stores[rank].before = fail
    with pytest.raises(BaseExceptionGroup) as caught:
        # The threads of the ranks are joined long before this.
        load_simulated(
            stores[0],
            3,
            _TENSORS,
            whole(_TENSORS, 3),
            stores=stores,
            timeout_s=600,
            machines=machines(apart, 3),
        )
    assert len(caught.value.exceptions) == 3
    for error in caught.value.exceptions:
        assert isinstance(error, RanksFailed)
        assert [(one.rank, one.stage, one.kind) for one in error.members] == [(rank, "read", "Transient")]


@either_way
def test_damage_that_one_rank_finds_is_told_to_all(tmp_path: Path, apart: bool) -> None:
    save_simulated(Store(tmp_path), 1, _TENSORS, whole(_TENSORS, 1))
    (path,) = tmp_path.glob("data/*/*.safetensors")
    data = bytearray(path.read_bytes())
    data[-PIECE_BYTES] ^= 4
    path.write_bytes(data)
    with pytest.raises(BaseExceptionGroup) as caught:
        load_simulated(
            Store(tmp_path), 4, _TENSORS, whole(_TENSORS, 4), timeout_s=600, machines=machines(apart, 4)
        )
    for error in caught.value.exceptions:
        assert isinstance(error, RanksFailed)
        assert [one.kind for one in error.members] == [CorruptCheckpoint.__name__]
        assert f"{path.name}: bytes" in str(error.members[0])


@either_way
def test_a_rank_that_hangs_is_named_within_the_time_out(tmp_path: Path, apart: bool) -> None:
    save_simulated(Store(tmp_path), 1, _TENSORS, whole(_TENSORS, 1))
    over = threading.Event()
    stores = [CountingStore(tmp_path) for _ in range(3)]

    def hang(_: Sequence[Range]) -> None:
        over.wait(50)

    stores[1].before = hang
    errors: list[BaseException] = []

    def load() -> None:
        try:
            load_simulated(
                stores[0],
                3,
                _TENSORS,
                whole(_TENSORS, 3),
                stores=stores,
                timeout_s=1,
                machines=machines(apart, 3),
            )
        except BaseExceptionGroup as group:
            errors.extend(group.exceptions)

    thread = threading.Thread(target=load)
    thread.start()
    # Ranks 0 and 2 have given up on rank 1 long before it wakes up and finds out.
    thread.join(8)
    over.set()
    thread.join(60)
    assert len(errors) == 3
    for error in errors:
        assert isinstance(error, CoordinationTimeout | RanksFailed), error
        assert "rank 1" in str(error), error
