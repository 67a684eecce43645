"""The DataLoader as its users meet it: iteration, length, keywords, provenance, changed mixtures, errors."""

from __future__ import annotations

import gc
import json
import sys
import threading
import time
import weakref
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
import torch

import omniload.client
from omniload import Chaos, DataLoader
from omniload.errors import ColumnMissing, LoaderTimeout, MixtureError, PlaceError, SourceError, StateError
from tests.omniload.mixtures import hard_mixture, on_both_runtimes, token_rows, write_parquet


def simple_mixture(folder: Path, **keys: Any) -> dict[str, Any]:
    write_parquet(folder / "data.parquet", token_rows(0, 200, 30))
    source = {"path": str(folder / "data.parquet"), "weight": 1, "on_exhausted": "repeat"}
    return {"seq_len": 64, "packs": 4, "lanes": 4, "steps": 5, "sources": {"a": source}, **keys}


@on_both_runtimes
def test_the_length_is_the_iterations_of_the_run(tmp_path: Path) -> None:
    with DataLoader(simple_mixture(tmp_path), dp_rank=0, dp_size=2) as loader:
        assert len(loader) == 10
        assert len(list(loader)) == 10
        assert list(loader) == []


def test_without_steps_there_is_no_length(tmp_path: Path) -> None:
    mixture = simple_mixture(tmp_path)
    del mixture["steps"]
    with DataLoader(mixture) as loader, pytest.raises(TypeError, match="no 'steps'"):
        len(loader)


def test_a_state_taken_by_a_signal_handler_is_never_half_of_a_move(tmp_path: Path) -> None:
    """A handler runs between any two lines of the thread that iterates, and holds its locks."""
    seen: set[tuple[int, int]] = set()

    def look(frame: Any, event: str, arg: object) -> Any:
        if frame.f_code.co_filename != omniload.client.__file__:
            return None
        state = loader.state_dict()
        seen.add((state["stream"]["step"], state.get("lanes_yielded", 0)))
        return look

    with DataLoader(simple_mixture(tmp_path)) as loader:
        loader.state_dict()
        stops = [(step, lane) for step in range(5) for lane in range(4)]
        iterator = iter(loader)
        for before, after in zip(stops, [*stops[1:], (5, 0)], strict=True):
            seen.clear()
            sys.settrace(look)
            next(iterator)
            sys.settrace(None)
            assert seen == {before, after}


@on_both_runtimes
def test_iteration_goes_on_after_a_break(tmp_path: Path) -> None:
    mixture = simple_mixture(tmp_path)
    with DataLoader(mixture) as loader:
        expected = [(lane["step"], lane["lane"]) for lane in loader]
    with DataLoader(mixture) as loader:
        seen = []
        for lane in loader:
            seen.append((lane["step"], lane["lane"]))
            if len(seen) == 6:
                break
        loader.close()
        seen += [(lane["step"], lane["lane"]) for lane in loader]
    assert seen == expected


@on_both_runtimes
def test_steps_groups_the_lanes_of_a_rank(tmp_path: Path) -> None:
    with DataLoader(simple_mixture(tmp_path), dp_rank=1, dp_size=2) as loader:
        groups = list(loader.steps())
    assert [[lane["lane"] for lane in group] for group in groups] == [[1, 3]] * 5
    assert [[lane["is_last_in_step"] for lane in group] for group in groups] == [[False, True]] * 5


@on_both_runtimes
def test_keywords_override_the_mixture(tmp_path: Path) -> None:
    with DataLoader(simple_mixture(tmp_path), seq_len=32, packs=6, lanes=3, steps=2) as loader:
        lanes = list(loader)
    assert len(lanes) == 6
    assert lanes[0]["input_ids"].shape == (2, 32)


def test_ranks_that_differ_on_other_axes_get_the_same_lanes(tmp_path: Path) -> None:
    class Mesh:
        """The part of a DeviceMesh that places a rank."""

        mesh_dim_names = ("dp_replicate", "dp_shard", "tp")

        def __init__(self, tp: int) -> None:
            self.coordinate = {"dp_replicate": 1, "dp_shard": 0, "tp": tp}

        def size(self, dim: int) -> int:
            return 2

        def get_local_rank(self, axis: str) -> int:
            return self.coordinate[axis]

    mixture = simple_mixture(tmp_path)
    for tp in (0, 1):
        with DataLoader(mixture, mesh=Mesh(tp)) as loader:  # type: ignore[arg-type]
            assert {lane["lane"] for lane in loader} == {2}


def test_unshifted_labels_are_there_on_request(tmp_path: Path) -> None:
    with DataLoader(simple_mixture(tmp_path, labels="hf", steps=1)) as loader:
        for lane in loader:
            assert "targets" not in lane
            kept = lane["labels"] >= 0
            assert torch.equal(lane["labels"][kept], lane["input_ids"][kept])
            assert not kept[lane["position_ids"] == 0].any()
    with DataLoader(simple_mixture(tmp_path, labels="hf", steps=1)) as loader:
        assert sum(int((lane["labels"] >= 0).sum()) for lane in loader) == loader.plan(0).num_target_tokens


@on_both_runtimes
def test_threads_end_with_the_loader(tmp_path: Path) -> None:
    def ours() -> list[str]:
        names = [thread.name for thread in threading.enumerate()]
        return [
            name for name in names if name.startswith(("omniload-plan", "omniload-fetch", "omniload-alive"))
        ]

    loader = DataLoader(simple_mixture(tmp_path, steps=10**6))
    next(iter(loader))
    assert ours()
    loader.close()
    assert not ours()
    next(iter(loader))
    assert ours()
    del loader
    gc.collect()
    # Garbage may be collected in any thread, so this only tells the threads to end, and they do so by themselves.
    limit = time.monotonic() + 60
    while ours() and time.monotonic() < limit:
        time.sleep(0.01)
    assert not ours()


@on_both_runtimes
def test_an_error_in_a_thread_reaches_the_training_loop_every_time(tmp_path: Path) -> None:
    mixture = simple_mixture(tmp_path)
    mixture["sources"]["a"]["transforms"] = ["tests.omniload.test_client:none_of_it"]
    with DataLoader(mixture) as loader:
        for _ in range(2):
            with pytest.raises(SourceError, match="source 'a' gave no token"):
                next(iter(loader))


def none_of_it(row: dict[str, Any]) -> None:
    """A filter that lets nothing through."""


def slow_to_read(row: dict[str, Any]) -> dict[str, Any]:
    """A transform that takes longer than the time-out."""
    time.sleep(1.0)
    return row


def test_a_wait_ends_at_its_limit_and_names_what_it_waited_for(tmp_path: Path) -> None:
    mixture = simple_mixture(tmp_path)
    write_parquet(tmp_path / "data.parquet", token_rows(0, 3, 30))
    mixture["sources"]["a"]["transforms"] = ["tests.omniload.test_client:slow_to_read"]
    with (
        DataLoader(mixture, timeout_s=0.3) as loader,
        pytest.raises(LoaderTimeout, match=r"step 0|source 'a'"),
    ):
        next(iter(loader))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 8}, "'seed' changed from 7 to 8"),
        ({"seq_len": 32}, "'seq_len' changed from 64 to 32"),
        ({"lanes": 6}, "'lanes' changed from 12 to 6"),
        ({"schedule": [{"step": 0}]}, "'schedule' changed since"),
        ({"sources": {"long": {"weight": 0.5}}}, "source 'long' is defined differently"),
        ({"sources": {"short": None}}, "source 'short' was removed"),
    ],
)
def test_a_mixture_changed_between_save_and_resume_is_refused_by_name(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    mixture = hard_mixture(tmp_path, steps=2)
    with DataLoader(mixture) as loader:
        next(iter(loader.steps()))
        state = loader.state_dict()
    sources = dict(mixture["sources"])
    for name, changes in change.pop("sources", {}).items():
        if changes is None:
            del sources[name]
        else:
            sources[name] = {**sources[name], **changes}
    changed = {**mixture, "sources": sources, **change}
    with DataLoader(changed) as loader:
        before = json.dumps(loader.state_dict())
        with pytest.raises(StateError, match=message):
            loader.load_state_dict(state)
        assert json.dumps(loader.state_dict()) == before


@on_both_runtimes
def test_data_changed_between_save_and_resume_is_refused_and_moved_data_is_not(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    with DataLoader(hard_mixture(here, steps=2)) as loader:
        state = loader.state_dict()
    moved = hard_mixture(there, steps=2)
    with DataLoader(moved) as loader:
        loader.load_state_dict(state)
    write_parquet(there / "filtered/1.parquet", token_rows(99, 40, 20))
    with DataLoader(moved) as loader, pytest.raises(StateError, match="source 'filtered': its files changed"):
        loader.load_state_dict(state)
    write_parquet(there / "filtered/3.parquet", token_rows(98, 40, 20))
    with (
        DataLoader(moved) as loader,
        pytest.raises(
            StateError, match="source 'filtered': it has 4 files, not 3, since the state was saved"
        ),
    ):
        loader.load_state_dict(state)


@pytest.mark.parametrize("damage", [{}, {"version": 2}, {"version": 1}, {"version": 1, "identity": {}}])
def test_a_state_of_something_else_is_refused(tmp_path: Path, damage: dict[str, Any]) -> None:
    with DataLoader(simple_mixture(tmp_path)) as loader, pytest.raises(StateError):
        loader.load_state_dict(damage)


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        (
            {"dp_rank": 0, "dp_size": 5},
            PlaceError,
            r"lanes: 12 cannot be shared by dp_size 5.*\[3, 4, 6\].*multiple of 5",
        ),
        ({"dp_rank": 3, "dp_size": 3}, PlaceError, r"dp_rank: 3 is not in 0\.\.2"),
        ({"dp_rank": 3}, PlaceError, "go together"),
        ({"lanes": 5}, MixtureError, "lanes: 5 does not divide packs: 12"),
        ({"split": "test"}, ValueError, "'test' is neither"),
        ({"split": "held_out"}, MixtureError, "held_out: is 0"),
        ({"timeout_s": 0}, ValueError, "timeout_s: 0 must be positive"),
        ({"buffer_bytes": -1}, ValueError, "buffer_bytes: -1 must not be negative"),
        ({"prefetch_steps": 0}, ValueError, "prefetch_steps: 0"),
    ],
)
def test_bad_keywords_are_one_clear_line(
    tmp_path: Path, keys: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as raised:
        DataLoader(hard_mixture(tmp_path), **keys)
    assert "\n" not in str(raised.value)


@on_both_runtimes
def test_samples_of_a_step_long_past_are_refused(tmp_path: Path) -> None:
    with DataLoader(simple_mixture(tmp_path)) as loader:
        lane = next(iter(loader))
        assert loader.samples({"step": lane["step"], "lane": lane["lane"]}).num_rows > 0
        with pytest.raises(LookupError, match="step 99"):
            loader.samples({"step": 99, "lane": 0})


def test_the_ledger_compares_the_realised_mixture_with_the_declared_one(tmp_path: Path) -> None:
    with DataLoader(hard_mixture(tmp_path, steps=100)) as loader:
        for _ in loader:
            pass
        ledger = loader.ledger()
    assert ledger.step == 100
    assert ledger.sources["short"].exhausted
    for name in ("filtered", "long", "tripled"):
        source = ledger.sources[name]
        assert source.read_tokens == source.emitted_tokens + source.truncated_tokens + source.dropped_tokens
        # The exhausted source's share goes to the others in proportion.
        assert source.share == pytest.approx(source.weight / 0.9, rel=0.05)


@on_both_runtimes
def test_rows_left_out_are_listed_with_path_row_and_reason(
    execution: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"input_ids": [1, 2, 3]}\nnot json\n' * 20)
    source = {"path": str(path), "weight": 1, "on_exhausted": "repeat"}
    with DataLoader({"seq_len": 8, "packs": 1, "steps": 3, "sources": {"a": source}}) as loader:
        assert len(list(loader)) == 3
        failures = loader.failures()
        assert failures
        assert {failure.row_id for failure in failures} <= {25 + 34 * i for i in range(20)}
        assert failures[0].path == str(path)
        assert "not JSON" in failures[0].reason
        assert loader.ledger().sources["a"].failures > 0
    assert execution == "ray" or "is left out: not JSON" in caplog.text, "an actor logs where it runs"


@on_both_runtimes
def test_a_loader_that_failed_is_collected_like_any_other(tmp_path: Path) -> None:
    mixture = simple_mixture(tmp_path)
    mixture["sources"]["a"]["transforms"] = ["tests.omniload.test_client:none_of_it"]
    loader = DataLoader(mixture)
    with pytest.raises(SourceError):
        next(iter(loader))
    gone = weakref.ref(loader)
    del loader
    gc.collect()
    assert gone() is None


@on_both_runtimes
def test_the_end_of_the_data_counts_what_was_not_served(tmp_path: Path) -> None:
    write_parquet(tmp_path / "data.parquet", token_rows(0, 50, 30))
    source = {"path": str(tmp_path / "data.parquet"), "weight": 1}
    with DataLoader({"seq_len": 64, "packs": 4, "lanes": 4, "sources": {"a": source}}) as loader:
        served = sum(int((lane["segment_ids"] > 0).sum()) for lane in loader)
        ledger = loader.ledger().sources["a"]
        assert ledger.exhausted
        assert ledger.rows == 50
        assert ledger.read_tokens == sum(map(len, token_rows(0, 50, 30))) == served + ledger.carried_tokens
        state = loader.state_dict()
        loader.load_state_dict(state)
        assert list(loader) == []
        assert loader.state_dict() == state


@on_both_runtimes
def test_a_row_that_two_sources_share_is_held_out_of_both(tmp_path: Path) -> None:
    write_parquet(tmp_path / "data/x.parquet", token_rows(0, 200, 30))
    sources = {
        "one": {"path": str(tmp_path / "data/*.parquet"), "weight": 1},
        "two": {"path": str(tmp_path / "data/x.parquet"), "weight": 1},
    }
    seen: dict[str, set[int]] = {}
    for split in ("train", "held_out"):
        mixture = {"seq_len": 64, "packs": 1, "held_out": 0.3, "sources": sources}
        with DataLoader(mixture, split=split) as loader:
            seen[split] = {row for lane in loader for row in loader.samples(lane)["row"].to_pylist()}
    assert len(seen["held_out"]) > 30
    assert not seen["train"] & seen["held_out"]


@on_both_runtimes
def test_a_later_file_without_the_column_is_named(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"messages": [[{"role": "assistant", "content": "a"}]] * 9}), tmp_path / "0.parquet"
    )
    pq.write_table(pa.table({"text": ["a"] * 9}), tmp_path / "1.parquet")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    mixture = {
        "seq_len": 8,
        "packs": 1,
        "tokenizer": str(tmp_path / "tokenizer.json"),
        "sources": {"a": {"path": str(tmp_path / "*.parquet"), "weight": 1, "on_exhausted": "repeat"}},
    }
    with (
        DataLoader(mixture) as loader,
        pytest.raises(ColumnMissing, match=r"1\.parquet: no column 'messages'"),
    ):
        list(loader)


@pytest.mark.parametrize("yielded", [-1, 4, 99, "x"])
def test_a_state_with_impossible_lanes_is_refused(tmp_path: Path, yielded: object) -> None:
    with DataLoader(simple_mixture(tmp_path)) as loader:
        state = {**loader.state_dict(), "lanes_yielded": yielded, "dp_size": 1}
        with pytest.raises(StateError, match="damaged"):
            loader.load_state_dict(state)


def test_closing_does_not_wait_for_a_read_that_was_never_begun(tmp_path: Path) -> None:
    """Many sources and few readers: the read that the planner waits for may still be queued when it is told to stop."""
    sources = {}
    for i in range(12):
        write_parquet(tmp_path / f"{i}.parquet", token_rows(i, 40, 30))
        sources[f"s{i}"] = {"path": str(tmp_path / f"{i}.parquet"), "weight": 1, "on_exhausted": "repeat"}
    mixture = {"seq_len": 64, "packs": 4, "sources": sources}
    chaos = Chaos(max_delay_s=0.01, max_chunk_samples=2)
    for steps in range(8):
        loader = DataLoader(mixture, chaos=chaos, timeout_s=600)
        list(islice(loader, steps))
        closer = threading.Thread(target=loader.close)
        closer.start()
        closer.join(60)
        assert not closer.is_alive(), "close waits for a read that will never run"
