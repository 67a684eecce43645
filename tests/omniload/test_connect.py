"""Connected loaders in real jobs: one rank of each circle loads, and all get what they would have loaded."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from omniload import DataLoader, MixtureLoader
from omniload.errors import (
    DecisionError,
    LoaderStopped,
    LoaderTimeout,
    MixtureError,
    PlaceError,
    SourceError,
    StateError,
)
from omniload.placing import ClientPlaceTree
from omniload.placing.slicing import SLICINGS
from omniload.planner import Plan
from omniload.planner.graph import DGraph
from tests.distributed import run_distributed
from tests.omniload.mixtures import hard_mixture, token_rows, write_parquet

WORLD = 4
STEPS = 6
TIMEOUT_S = 60.0
TOKEN_WISE = ("input_ids", "targets", "position_ids", "segment_ids")
Lane = dict[str, Any]

rows_read = 0
"""Rows that the mixtures of `counted` read in this process."""


def counted(row: dict[str, Any]) -> dict[str, Any]:
    """Counts what this process reads."""
    global rows_read
    rows_read += 1
    return row


def bad_after_a_while(row: dict[str, Any]) -> dict[str, Any]:
    """A transform that works for the first rows, and on the first data-parallel rank only reads them at all."""
    counted(row)
    if rows_read > 200:
        raise OSError(5, "Input/output error")
    return row


def broadcast_over_cp(graph: DGraph) -> Plan:
    """A strategy that marks an axis."""
    graph.mix().cost().pack().balance()
    return graph.distribute("dp").broadcast_at("cp").plan()


def simple_mixture(folder: Path, **keys: Any) -> dict[str, Any]:
    write_parquet(folder / "data.parquet", token_rows(0, 300, 30))
    source = {
        "path": str(folder / "data.parquet"),
        "weight": 1,
        "on_exhausted": "repeat",
        "transforms": ["tests.omniload.test_connect:counted"],
    }
    return {"seq_len": 64, "packs": 4, "lanes": 4, "steps": STEPS, "sources": {"a": source}, **keys}


def connected(
    mixture: Mapping[str, Any],
    mesh: str,
    *,
    timeout_s: float = TIMEOUT_S,
    own: Mapping[str, Any] = {},
    **keys: Any,
) -> MixtureLoader:
    """A loader for this rank's place in a mesh, connected; ``own`` are keywords of the loader."""
    tree = ClientPlaceTree.parse(mesh)
    place = tree.place(dist.get_rank())
    loader = DataLoader(
        mixture, dp_rank=place.dp_rank, dp_size=place.dp_size, timeout_s=timeout_s, execution="inline", **own
    )
    loader.connect(mesh, timeout_s=timeout_s, **keys)
    return loader


def plain(lane: Lane) -> Lane:
    """A lane that can go from process to process, and be compared to the byte."""
    return {
        key: (value.numpy().copy() if isinstance(value, torch.Tensor) else value)
        for key, value in lane.items()
    }


def same(one: Lane, other: Lane) -> bool:
    return one.keys() == other.keys() and all(
        (value.dtype, value.shape, value.tobytes())
        == (other[key].dtype, other[key].shape, other[key].tobytes())
        if isinstance(value, np.ndarray)
        else value == other[key]
        for key, value in one.items()
    )


def known(loader: MixtureLoader, lanes: Iterable[Lane]) -> tuple[str, list[Any]]:
    """What the ranks of a circle have to agree on: state, ledger, and plans and origins of some lanes."""
    samples = [loader.samples(lane).to_pylist() for lane in lanes]
    return json.dumps(loader.state_dict()), [
        loader.ledger(),
        [loader.plan(lane["step"]).hash for lane in lanes],
        hashlib.blake2b(json.dumps(samples).encode()).hexdigest(),
    ]


def _all_of_it(
    mixture: Mapping[str, Any], mesh: str, keys: Mapping[str, Any]
) -> tuple[list[Lane], list[Any], int, int, list[str]]:
    """A run that is cut inside a step, resumed by another loader, and goes on to the end of the stream."""
    before = rows_read
    with connected(mixture, mesh, **keys) as loader:
        opened = rows_read
        iterator = iter(loader)
        num_lanes = len(loader) // STEPS
        first = list(islice(iterator, 2 * num_lanes + 1))
        state = loader.state_dict()
        threads = sorted(
            {thread.name.split("_")[0] for thread in threading.enumerate() if "omniload" in thread.name}
        )
        agreed = [known(loader, first[-1:])]
    with connected(mixture, mesh, **keys) as loader:
        loader.load_state_dict(json.loads(json.dumps(state)))
        rest = list(loader)
        agreed.append(known(loader, rest[-1:]))
        assert list(loader) == []
        loader.close()
        assert list(loader) == []
    return [plain(lane) for lane in first + rest], agreed, opened - before, rows_read - opened, threads


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "tensor parallel": ("dp=2,tp=2", {}),
    "only some axes": ("dp=2,tp=2", {"broadcast": ["cp"]}),
    "slices, zig-zag": ("cp=4", {}),
    "slices by document": ("dp=2,cp=2", {"context_parallel": "per_document"}),
    "slices that every rank cuts itself": (
        "dp=2,cp=2",
        {"context_parallel": "contiguous", "broadcast": ["tp"]},
    ),
    "whole lanes over cp": ("cp=2,tp=2", {"context_parallel": None}),
    "pipeline": ("pp=4", {}),
    "pipeline there and back": ("pp=2,dp=2", {"stage_order": "v"}),
    "stages and slices": ("pp=2,cp=2", {"context_parallel": "contiguous"}),
}


def _cases(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    mixture = hard_mixture(Path(folder), steps=STEPS)
    mixture["sources"]["filtered"]["transforms"].append("tests.omniload.test_connect:counted")
    dist.barrier()
    return {name: _all_of_it(mixture, mesh, keys) for name, (mesh, keys) in CASES.items()}


@pytest.mark.slow
def test_peers_get_slices_of_the_lanes_that_a_rank_by_itself_gets(tmp_path: Path) -> None:
    by_rank = run_distributed(_cases, WORLD, str(tmp_path))
    with DataLoader(hard_mixture(tmp_path, steps=STEPS), execution="inline") as loader:
        whole = {(lane["step"], lane["lane"]): plain(lane) for lane in loader}
    for name, (mesh, keys) in CASES.items():
        tree = ClientPlaceTree.parse(mesh)
        runs = [by_rank[rank][name] for rank in range(WORLD)]
        sources = set(tree.fetchers(keys.get("broadcast", ("pp", "cp", "tp"))).tolist())
        for rank, (lanes, agreed, opened, read, threads) in enumerate(runs):
            assert agreed == runs[0][1] or tree.bucket_of(rank) != tree.bucket_of(0), name
            assert [state for state, _ in agreed][-1] == runs[0][1][-1][0], (
                "at a boundary it is the same on all"
            )
            assert opened == 0, name
            loads = rank in sources
            assert (read > 0) == loads, (name, rank)
            assert loads or "omniload-plan" not in threads, (name, rank)
            assert [(lane["step"], lane["lane"]) for lane in lanes] == sorted(
                key for key in whole if key[1] % tree.dp_size == tree.bucket_of(rank)
            )
            needs = tree.needs(rank)
            for lane in lanes:
                other = whole[lane["step"], lane["lane"]]
                if "stage_order" in keys:
                    expected = set(other) if tree.coordinate_of(rank, "pp") == 0 else set(lane) & set(other)
                else:
                    expected = {key for key in other if needs.holds(key)}
                assert set(lane) == expected, (name, rank)
                if tree.num_buckets("cp") == 1 or keys.get("context_parallel", "zigzag") is None:
                    part = {key: other[key] for key in lane if key != "is_last_in_step"}
                    assert same({key: lane[key] for key in part}, part), (name, rank)
        _check_slices(name, tree, runs, whole, keys.get("context_parallel", "zigzag"))


def _check_slices(
    name: str, tree: ClientPlaceTree, runs: list[Any], whole: dict[Any, Lane], slicing: Any
) -> None:
    """Put together, the parts of the ranks along cp are the whole lanes."""
    cp = tree.num_buckets("cp")
    if cp == 1 or slicing is None:
        return
    ranks = [rank for rank in range(WORLD) if tree.coordinate_of(rank, "tp") == 0]
    joined: dict[tuple[int, int, str], np.ndarray] = {}
    for rank in ranks:
        part = tree.coordinate_of(rank, "cp")
        for lane in runs[rank][0]:
            other = whole[lane["step"], lane["lane"]]
            width = other["input_ids"].shape[1]
            bounds = other["cu_seqlens"].astype(np.int64)
            assert np.array_equal(lane["cu_seqlens"], other["cu_seqlens"])
            for key in lane.keys() & set(TOKEN_WISE):
                assert lane[key].dtype == other[key].dtype
                place = joined.setdefault((lane["step"], lane["lane"], key), np.full_like(other[key], -7))
                for row in range(len(place)):
                    here = bounds[(bounds >= row * width) & (bounds <= (row + 1) * width)] - row * width
                    place[row, SLICINGS[slicing](here, cp).of(part)] = lane[key][row]
    assert {(step, lane) for step, lane, _ in joined} == whole.keys(), name
    for (step, lane, key), value in joined.items():
        assert np.array_equal(value, whole[step, lane][key]), (name, step, lane, key)


def _with_a_device_mesh(rank: int, world_size: int, folder: str) -> list[str]:
    mixture = simple_mixture(Path(folder))
    dist.barrier()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    said = []
    with DataLoader(mixture, mesh=mesh, execution="inline", timeout_s=TIMEOUT_S) as loader:
        loader.connect(mesh)
        lanes = list(loader)
        assert len(lanes) == STEPS * 2
        assert all(lane["input_ids"].dtype == torch.int64 for lane in lanes)
        with pytest.raises(PlaceError) as raised:
            loader.connect(mesh)
        said.append(str(raised.value))
    with DataLoader(mixture, execution="inline") as loader:
        for bad, kind in (({"mesh": mesh}, PlaceError), ({"mesh": "tp=4", "timeout_s": 0.0}, ValueError)):
            with pytest.raises(kind) as raised:
                loader.connect(bad.pop("mesh"), **bad)  # type: ignore[arg-type]
            said.append(str(raised.value))
    with pytest.raises(MixtureError) as other:
        connected({**mixture, "seed": 1 if rank == 2 else 0}, "tp=4")
    said.append(str(other.value))
    with (
        DataLoader(mixture, execution="inline") as loader,
        pytest.raises(PlaceError) as alone,  # an error that one rank meets before they do anything together
    ):
        loader.connect("tp=4" if rank != 1 else "tp=3")
    said.append(str(alone.value))
    return said


def _errors(rank: int, world_size: int, folder: str) -> list[tuple[str, str]]:
    """An error at the source, twice, on every rank; ranks that stand at different steps, or decide differently."""
    mixture = simple_mixture(Path(folder))
    dist.barrier()
    said: list[tuple[str, str]] = []

    def caught(act: Callable[[], object], kind: type[Exception]) -> None:
        with pytest.raises(kind) as raised:
            act()
        said.append((type(raised.value).__name__, str(raised.value)))

    broken = json.loads(json.dumps(mixture))
    broken["sources"]["a"]["transforms"] = ["tests.omniload.test_connect:bad_after_a_while"]
    with connected(broken, "tp=4", own={"steps": 1000}) as loader:
        for _ in range(2):
            caught(lambda: list(loader), (SourceError, OSError))  # type: ignore[arg-type]
        loader.close()
    with connected(mixture, "tp=4") as loader:
        state = loader.state_dict()
        group = next(iter(loader.steps()))
        if rank == 3:
            loader.load_state_dict(state)
        else:
            loader.close()
        caught(lambda: next(iter(loader)), StateError)
        loader.load_state_dict(state)
        again = next(iter(loader.steps()))
        assert [plain(lane)["input_ids"].tolist() for lane in again] == [
            plain(lane)["input_ids"].tolist() for lane in group
        ]
    with connected(mixture, "tp=4", own={"steps": 1000}) as loader:
        if rank == 2:
            loader.control.set_weights({"a": 1.0}, 2)
        caught(lambda: list(loader), StateError)
        loader.load_state_dict(state)
        next(iter(loader.steps()))
        if rank == 2:
            loader.control.set_weights({"a": 1.0}, 9)
        caught(lambda: list(loader), (DecisionError, LoaderStopped))  # type: ignore[arg-type]
    return said


def _decisions(rank: int, world_size: int, folder: str) -> tuple[str, list[str], list[int], str]:
    """Steps that are left out by a decision that all ranks make while they run."""
    mixture = simple_mixture(Path(folder), steps=14)
    dist.barrier()
    hashes, earliest = [], []
    with connected(mixture, "dp=2,tp=2") as loader:
        for lanes in loader.steps():
            step = lanes[0]["step"]
            earliest.append(loader.control.earliest_step)
            if step == 1:
                loader.control.skip_steps(3, step + loader.control.delay_steps)
                state = json.dumps(loader.state_dict())
            hashes.append(loader.plan(step).hash)
    return loader.control.digest, hashes, earliest, state


def _closing(rank: int, world_size: int, folder: str) -> list[int]:
    """Closed and iterated again, at a pace that differs from rank to rank."""
    mixture = simple_mixture(Path(folder), steps=12)
    dist.barrier()
    seen = []
    with connected(mixture, "pp=2,tp=2") as loader:
        for again in range(3):
            for lanes in islice(loader.steps(), 3):
                seen.append(lanes[0]["step"])
                time.sleep(0.05 * ((rank + again) % 3))
            loader.close()
    return seen


def _strategy(rank: int, world_size: int, folder: str) -> tuple[list[int], int]:
    """The strategy marks cp, so along tp every rank loads by itself."""
    mixture = simple_mixture(Path(folder), strategy="tests.omniload.test_connect:broadcast_over_cp")
    dist.barrier()
    before = rows_read
    with connected(mixture, "cp=2,tp=2", context_parallel=None) as loader:
        tokens = [int(lane["input_ids"].sum()) for lane in loader]
    return tokens, rows_read - before


def _missing(rank: int, world_size: int, folder: str) -> str:
    """A rank does not come, and the others say which."""
    mixture = simple_mixture(Path(folder))
    dist.barrier()
    said = ""
    if rank != 2:
        with DataLoader(mixture, execution="inline", timeout_s=0.5) as loader:
            with pytest.raises(LoaderTimeout) as raised:
                loader.connect("tp=4", timeout_s=0.5)
            said = str(raised.value)
    dist.barrier()
    return said


def _without(rank: int, world_size: int, folder: str) -> int:
    """Unless it is told to connect, a loader of one rank needs no other."""
    mixture = simple_mixture(Path(folder))
    dist.barrier()
    if rank != 0:
        return 0
    with DataLoader(mixture, dp_rank=0, dp_size=2, execution="inline") as loader:
        return len(list(loader))


def _behaviours(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    tests = (_without, _with_a_device_mesh, _errors, _decisions, _closing, _strategy, _missing)
    return {test.__name__: test(rank, world_size, f"{folder}/{test.__name__}") for test in tests}


@pytest.mark.slow
def test_connected_loaders_end_fail_decide_and_close_together(tmp_path: Path) -> None:
    by_rank = run_distributed(_behaviours, WORLD, str(tmp_path))

    assert by_rank[0]["_without"] == STEPS * 2

    twice, misplaced, no_time, other, alone = by_rank[0]["_with_a_device_mesh"]
    assert "tp=3" in alone or "3 ranks" in alone, alone
    assert twice == "connect: this loader is connected already; make another one to connect it otherwise"
    assert "rank 0 is data-parallel rank 0 of 2 in it, and 0 of 1 by what the loader was told" in misplaced
    assert no_time == "timeout_s: 0.0 must be positive and finite"
    for one in by_rank:
        assert one["_with_a_device_mesh"][3:] == [other, alone]
    for one in (by_rank[0], by_rank[1], by_rank[3]):
        assert one["_missing"].startswith(
            "connect: rank 2 did not come within 1 s; call connect on every rank"
        )
    assert other.startswith("connect: rank 2 has another mixture than rank 0")

    for one in by_rank:
        first, second, apart, before, _ = one["_errors"]
        assert first == by_rank[0]["_errors"][0]
        assert "Input/output error" in first[1]
        assert second[0] == first[0]
        assert apart == by_rank[0]["_errors"][2]
        assert apart[1].startswith(
            "rank 0 stands before step 1 and rank 3 before step 0; load the same state"
        )
        assert before[1].endswith(
            "and rank 2 before step 0 too, with other pieces or decisions; load the same state,"
            " and make the same decisions, on all ranks"
        )
    after = [one["_errors"][4] for one in by_rank]
    assert [kind for kind, _ in after] == ["LoaderStopped", "LoaderStopped", "DecisionError", "LoaderStopped"]
    assert after[2][1].startswith(
        "step 9: rank 0, which plans it, and this rank have decided on it differently"
    )
    assert "rank 2 closed its loader, or failed, and this rank shares lanes with it" in after[0][1]

    whole = by_rank[0]["_decisions"]
    assert len(whole[1]) == 14
    for one in by_rank:
        assert one["_decisions"] == whole
    with DataLoader(simple_mixture(tmp_path / "_decisions", steps=14), execution="inline") as loader:
        loader.control.skip_steps(3, 1 + 2 + 2 + 2)  # delay_steps of a connected loader
        for lanes in loader.steps():
            assert loader.plan(lanes[0]["step"]).hash == whole[1][lanes[0]["step"]]

    for one in by_rank:
        assert one["_closing"] == list(range(9))

    tokens, _ = by_rank[0]["_strategy"]
    for rank, one in enumerate(by_rank):
        assert one["_strategy"][0] == tokens
        assert (one["_strategy"][1] > 0) == (rank in (0, 1))  # cp=2 is outermost


def _deaths(rank: int, world_size: int, folder: str) -> None:
    """In one circle the source is stopped, in the other a receiver is killed."""
    mixture = simple_mixture(Path(folder), steps=10**6)
    dist.barrier()
    pids = [None] * world_size
    dist.all_gather_object(pids, os.getpid())
    loader = connected(mixture, "dp=2,tp=3", timeout_s=2.0)
    iterator = iter(loader)
    for _ in range(4):
        next(iterator)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 3:
        os.kill(os.getpid(), signal.SIGSTOP)
    with pytest.raises(LoaderTimeout) as raised:
        for _ in iterator:
            pass
    loader.close()
    with pytest.raises(LoaderTimeout) as again:
        next(iter(loader))
    (Path(folder) / f"{rank}.txt").write_text(json.dumps([str(raised.value), str(again.value)]))
    if rank == 4:
        while not all((Path(folder) / f"{other}.txt").exists() for other in (0, 2, 5)):
            time.sleep(0.05)
        os.kill(int(str(pids[3])), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.chaos
def test_a_rank_that_dies_or_hangs_is_named_with_the_step_by_the_others(tmp_path: Path) -> None:
    with pytest.raises((RuntimeError, ExceptionGroup, TimeoutError)):
        run_distributed(_deaths, 6, str(tmp_path))
    for rank, lost in ((0, 1), (2, 1), (4, 3), (5, 3)):
        text, after = json.loads((tmp_path / f"{rank}.txt").read_text())
        assert text.startswith("step ")
        assert f": rank {lost} is gone, or did not answer within 4 s" in text
        assert "\n" not in text
        assert after == text
