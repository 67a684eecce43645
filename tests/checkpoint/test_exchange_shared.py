"""What one rank reads for several reaches those of its machine through shared memory, and others as before."""

from __future__ import annotations

import ctypes
import gc
import itertools
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import event, given, settings
from hypothesis import strategies as st

import checkpoint
from checkpoint.boxes import Box
from checkpoint.engine.coordination import Coordinator
from checkpoint.engine.load import Loader
from checkpoint.engine.match import LoadOptions
from checkpoint.errors import CoordinationTimeout, CorruptCheckpoint, RanksFailed
from checkpoint.format.digest import PIECE_BYTES
from checkpoint.frameworks.values import Found
from storage import Store
from storage.spans import Span, add_listener, remove_listener
from tests.checkpoint.counting_store import CountingStore
from tests.checkpoint.simulation import (
    OPTIONS,
    held,
    load_simulated,
    raised_by_ranks,
    random_bits,
    resharded,
    save_simulated,
)
from tests.distributed import run_distributed

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="anonymous files are of Linux")

_numbers = itertools.count()
_NAME = "omniload-checkpoint"  # of shared memory, in the maps of a process

# More bundles than there is room for in shared memory, whoever reads them, and odd sizes.
_BIG = random_bits((40 * PIECE_BYTES // 1024 + 3, 256), torch.float32, seed=1)  # 160 MiB + 3 KiB
_ODD = random_bits((77,), torch.uint8, seed=2)


def machine(number: int) -> bytes:
    """The name of a machine."""
    return bytes([number]) * 32


@contextmanager
def messages() -> Iterator[Counter[bool]]:
    """How many bundles were received in this process, by whether it was through shared memory."""
    found: Counter[bool] = Counter()
    lock = threading.Lock()

    def listen(span: Span) -> None:
        if span.name == "checkpoint.exchange":
            with lock:
                found[bool(span.attributes["shared"])] += 1

    add_listener(listen)
    try:
        yield found
    finally:
        remove_listener(listen)


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_any_ranks_on_any_machines_load_the_same_bits(data: st.DataObject) -> None:
    """All on one, each on its own, and all that lies between; the simulation compares every box bit for bit."""
    w, v = data.draw(st.integers(1, 4), label="w"), data.draw(st.integers(1, 8), label="v")
    tensors, saved, loaded = data.draw(resharded(w, v))
    url = f"memory://exchange_shared/{next(_numbers)}"
    codec = data.draw(st.sampled_from(["none", "zstd"]))
    save_simulated(Store(url), w, tensors, saved, options=replace(OPTIONS, compression={"model": codec}))
    mixed = [machine(data.draw(st.integers(1, 3))) for _ in range(v)]
    found = {}
    flat = data.draw(st.booleans(), label="flat")
    for name, machines in {
        "one machine": [machine(1)] * v,
        "a machine each": [machine(rank) for rank in range(v)],
        "some": mixed,
    }.items():
        counting = CountingStore(url)
        with messages() as found[name]:
            reports = load_simulated(
                counting, v, tensors, loaded, flat=flat, stores=[counting] * v, machines=machines
            )
        if any(report.num_bytes_received for report in reports):
            assert not counting.read_twice()
    total = sum(found["one machine"].values())
    assert found["one machine"] == Counter({True: total})
    assert found["a machine each"] == Counter({False: total})
    assert sum(found["some"].values()) == total
    event("exchanged" if total else "nothing shared")
    event("both ways at once" if len(found["some"]) == 2 else "one way")
    Store(url).delete_tree("data")


@pytest.mark.parametrize("numbers", [(1, 1, 1), (1, 2, 1)])
def test_shared_memory_is_used_again_only_when_it_has_been_copied(
    tmp_path: Path, numbers: tuple[int, ...]
) -> None:
    """Each rank reads more bundles than have room, and one of them copies late."""
    machines = [machine(number) for number in numbers]
    tensors = {"big": _BIG, "odd": _ODD}
    whole = {key: [[Box.whole(tensor.shape)]] * 3 for key, tensor in tensors.items()}
    save_simulated(Store(tmp_path), 1, tensors, {key: layout[:1] for key, layout in whole.items()})
    late = threading.Event()

    def listen(span: Span) -> None:
        # The first bundle that anybody hears of: that rank is held up while the others read on.
        if span.name == "checkpoint.exchange" and not late.is_set():
            late.set()
            time.sleep(0.5)

    add_listener(listen)
    try:
        with messages() as found:
            load_simulated(Store(tmp_path), 3, tensors, whole, machines=machines)
    finally:
        remove_listener(listen)
    assert late.is_set()
    assert found[True] > 10 * numbers.count(1), "each reads more than ten bundles, of which three have room"
    assert bool(found[False]) == (2 in numbers)


def test_damage_reaches_no_rank(tmp_path: Path) -> None:
    """Digests are checked before it is told where a bundle lies; the one who read it does not copy it either."""
    whole = [Box.whole(_BIG.shape)]
    save_simulated(Store(tmp_path), 1, {"big": _BIG}, {"big": [whole]})
    (path,) = tmp_path.glob("data/*/*.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 4
    path.write_bytes(content)
    filled = [torch.zeros_like(_BIG) for _ in range(3)]

    def load(coordinator: Coordinator) -> None:
        mine = [held("big", filled[coordinator.rank], whole)]
        options = LoadOptions(timeout_s=600)
        Loader(coordinator).load(
            Store(tmp_path), ["model"], lambda _: Found(tensors=mine), lambda *_: None, options
        )

    with messages() as found:
        errors = raised_by_ranks(3, load)
    assert found[True]
    for error in errors:
        assert isinstance(error, RanksFailed)
        assert [one.kind for one in error.members] == [CorruptCheckpoint.__name__]
        assert f"{path.name}: bytes" in str(error.members[0])
        assert "model/big" in str(error.members[0])
    for tensor in filled:
        assert tensor[:1000].any(), "other bundles arrived"
        assert not tensor[-3:].any()


def _limited(rank: int, world_size: int, path: Path) -> list[tuple[Counter[bool], bool]]:
    """Loads of a rank: as usual, while rank 1 may make no shared memory, and while rank 2 may see nobody's."""
    found = []

    def load() -> None:
        state = {"big": torch.zeros_like(_BIG), "odd": torch.zeros_like(_ODD)}
        with messages() as counts:
            checkpoint.load(path, {"x": state}, timeout_s=60)
        assert _NAME not in Path("/proc/self/maps").read_text()
        same = torch.equal(state["big"].view(torch.uint8), _BIG.view(torch.uint8)) and torch.equal(
            state["odd"], _ODD
        )
        found.append((counts, same))

    checkpoint.save(path, {"x": {"big": _BIG, "odd": _ODD}}, timeout_s=60)
    load()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    load()
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    if rank == 2:
        _drop_ptrace()
    else:
        set_dumpable = 4
        assert ctypes.CDLL(None).prctl(set_dumpable, 0, 0, 0, 0) == 0
    dist.barrier()
    load()
    return found


def _drop_ptrace() -> None:
    """Give up the right to look into processes that do not want it, which root has."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    data = (ctypes.c_uint32 * 6)()
    assert libc.capget(header, data) == 0
    for index in (0, 1):  # effective, permitted
        data[index] &= ~(1 << 19)
    assert libc.capset(header, data) == 0


def test_ranks_that_cannot_share_memory_exchange_over_connections(tmp_path: Path) -> None:
    """One that gets no memory, and one that may not see that of others."""
    usual, none_made, none_seen = zip(*run_distributed(_limited, 3, tmp_path / "c"), strict=True)
    assert all(same for _, same in (*usual, *none_made, *none_seen))
    for counts, _ in usual:
        assert counts[True] > 4
        assert not counts[False]
    for rank, (counts, _) in enumerate(none_made):
        assert counts[True] > 2
        assert bool(counts[False]) == (rank != 1), "what rank 1 reads goes to the others over connections"
    for rank, (counts, _) in enumerate(none_seen):
        assert bool(counts[True]) == (rank != 2)
        # Ranks 0 and 1 do not want to be looked into, not even by each other: but as root they still may.
        assert bool(counts[False]) == (rank == 2 or os.geteuid() != 0)


def _killed(rank: int, port: int, path: Path, results: Any) -> None:
    """A load of which rank 1 dies while it copies from shared memory."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    num_copied = itertools.count(1)
    seen_s = [time.monotonic()]  # of a rank that had not come so far when the other died, the time from here

    def listen(span: Span) -> None:
        if span.name == "checkpoint.exchange" and span.attributes["shared"] and next(num_copied) == 3:
            assert _NAME in Path("/proc/self/maps").read_text()
            seen_s[0] = time.monotonic()
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    add_listener(listen)
    mine = [held("big", torch.zeros_like(_BIG), [Box.whole(_BIG.shape)])]
    try:
        Loader(Coordinator(store, rank, 3)).load(
            Store(path), ["model"], lambda _: Found(tensors=mine), lambda *_: None, LoadOptions(timeout_s=3)
        )
        message, kind = "", ""
    except Exception as error:
        message, kind = str(error), type(error).__name__
    took_s = time.monotonic() - seen_s[0]
    gc.collect()  # errors and the frames that they came through hold each other
    results.put((rank, kind, message, took_s, _NAME in Path("/proc/self/maps").read_text()))


def test_a_rank_that_is_killed_while_it_copies_is_named_and_leaves_no_memory_behind(tmp_path: Path) -> None:
    save_simulated(Store(tmp_path), 1, {"big": _BIG}, {"big": [[Box.whole(_BIG.shape)]]})
    names = set(Path("/dev/shm").iterdir())
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [
        context.Process(target=_killed, args=(rank, server.port, tmp_path, results)) for rank in range(3)
    ]
    for process in ranks:
        process.start()
    told = sorted(results.get(timeout=100) for _ in range(2))
    for process in ranks:
        process.join(60)
    assert [process.exitcode for process in ranks] == [0, -signal.SIGKILL, 0]
    for (rank, kind, message, took_s, holds_memory), expected in zip(told, (0, 2), strict=True):
        assert rank == expected
        assert kind == CoordinationTimeout.__name__, message
        assert "rank 1 did not finish stage 'read' within 3 s" in message
        assert took_s < 60, "the time-out, and a machine that is busy"
        assert not holds_memory
    assert not {name for name in set(Path("/dev/shm").iterdir()) - names if "omniload" in name.name}
