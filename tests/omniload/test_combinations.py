"""Features together: what each does alone must hold when others, other threads or other processes come in."""

from __future__ import annotations

import copy
import json
import pickle
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch.utils.data

import storage
from omniload import DataLoader, MixtureLoader
from omniload.errors import (
    ColumnMissing,
    LoaderStopped,
    MixtureError,
    PlaceError,
    QuarantineError,
    SampleError,
    StateError,
)
from omniload.quarantine import Quarantine
from omniload.sources.listing import Listing
from omniload.sources.protocol import FileEntry
from tests.omniload.mixtures import on_both_runtimes, token_rows, write_parquet
from tests.omniload.quarantining import failure
from tests.omniload.test_laws import assert_same_lane
from tests.omniload.token_files import put_mds, put_megatron


def mixture(folder: Path, **keys: Any) -> dict[str, Any]:
    write_parquet(folder / "data.parquet", token_rows(0, 200, 20))
    return of_path(folder / "data.parquet", **keys)


def of_path(path: Path, **keys: Any) -> dict[str, Any]:
    source = {"path": str(path), "weight": 1, "on_exhausted": "repeat"}
    return {"seq_len": 32, "packs": 4, "lanes": 2, "steps": 6, "sources": {"a": source}, **keys}


# Other threads


def test_closing_wakes_a_thread_that_waits_for_a_step_and_loses_none(tmp_path: Path) -> None:
    made = mixture(tmp_path, steps=30)
    made["sources"]["a"]["transforms"] = ["tests.omniload.test_combinations:after_the_gate"]
    GATE.set()
    with DataLoader(made) as loader:
        whole = list(loader)
    loader = DataLoader(made, prefetch_steps=1)
    lanes = iter(loader)
    seen = [next(lanes), next(lanes)]
    GATE.clear()
    ended: list[BaseException] = []
    waits = threading.Event()

    def rest() -> None:
        try:
            for lane in loader:
                seen.append(lane)
                waits.set()
        except LoaderStopped as error:
            ended.append(error)

    thread = threading.Thread(target=rest)
    thread.start()
    waits.wait(1)  # what was prefetched is taken; the next step waits at the gate
    opener = threading.Timer(1, GATE.set)  # close() waits for the read that is under way
    opener.start()
    loader.close()
    thread.join(60)
    assert not thread.is_alive()
    assert len(ended) == 1, "no step was waited for"
    seen += loader
    assert len(seen) == len(whole)
    for lane, expected in zip(seen, whole, strict=True):
        assert_same_lane(lane, expected)
    loader.close()


GATE = threading.Event()


def after_the_gate(row: dict[str, Any]) -> dict[str, Any]:
    """A row, when reading is let go on."""
    assert GATE.wait(60)
    return row


@on_both_runtimes
def test_a_state_taken_in_another_thread_is_one_of_those_between_lanes(tmp_path: Path) -> None:
    """The thread that takes it stops at every line for the loop to go on, as far as that is let."""
    with DataLoader(mixture(tmp_path, steps=60)) as loader:
        between = {json.dumps(loader.state_dict(), sort_keys=True) for _ in loader}
    with DataLoader(mixture(tmp_path, steps=60)) as loader:
        lanes = iter(loader)
        next(lanes)
        loader.state_dict()
        go_on, went_on = threading.Semaphore(0), threading.Semaphore(0)

        def consume() -> None:
            while go_on.acquire() and next(lanes, None) is not None:
                went_on.release()

        def trace(frame: FrameType, event: str, argument: object) -> Any:
            if not frame.f_code.co_filename.endswith("client.py"):
                return None
            go_on.release()
            went_on.acquire(timeout=0.05)
            return trace

        states: list[str] = []

        def take() -> None:
            sys.settrace(trace)
            try:
                states.extend(json.dumps(loader.state_dict(), sort_keys=True) for _ in range(6))
            finally:
                sys.settrace(None)

        consumer, taker = threading.Thread(target=consume, daemon=True), threading.Thread(target=take)
        consumer.start()
        taker.start()
        taker.join(60)
        assert not taker.is_alive()
        go_on.release(1000)  # to the end
        consumer.join(60)
    assert len(set(states)) > 1, "the loop never went on"
    assert set(states) <= between


# Other processes


class Around(torch.utils.data.IterableDataset[Any]):
    """A user's dataset around a loader."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        yield from self.loader


def in_workers(loader: Any, num_workers: int) -> list[Any]:
    around = torch.utils.data.DataLoader(
        Around(loader), batch_size=None, num_workers=num_workers, multiprocessing_context="fork", timeout=60
    )
    return list(around)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_one_worker_of_torch_gets_the_stream_and_several_never_get_it_several_times(tmp_path: Path) -> None:
    made = mixture(tmp_path)
    with DataLoader(made) as loader:
        whole = list(loader)
    assert len(in_workers(DataLoader(made), 1)) == len(whole)
    with pytest.raises(
        PlaceError, match="each of the 2 workers of a torch DataLoader would give the whole stream"
    ):
        in_workers(DataLoader(made), 2)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_loader_that_was_started_before_a_fork_is_refused_in_the_child_at_once(tmp_path: Path) -> None:
    with DataLoader(mixture(tmp_path)) as loader:
        next(iter(loader))
        with pytest.raises(LoaderStopped, match="before this process was forked"):
            in_workers(loader, 1)
        assert len(list(loader)) == len(loader) - 1


def test_a_loader_of_a_mixture_is_never_copied(tmp_path: Path) -> None:
    loader = DataLoader(mixture(tmp_path))
    for duplicate in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="cannot be copied or pickled; pass the mixture"):
            duplicate(loader)


# Arguments


@pytest.mark.parametrize("timeout_s", [float("nan"), float("inf"), 1e300, 0])
def test_a_limit_that_is_no_time_is_refused_at_the_start(tmp_path: Path, timeout_s: float) -> None:
    with pytest.raises(ValueError, match=r"timeout_s: .* must be positive and at most"):
        DataLoader(mixture(tmp_path), timeout_s=timeout_s)


@pytest.mark.parametrize(
    ("labels", "asked", "told"), [("shifted", "labels", "targets"), ("hf", "targets", "labels")]
)
def test_an_array_that_lanes_will_not_have_is_refused(
    tmp_path: Path, labels: str, asked: str, told: str
) -> None:
    made = mixture(tmp_path, labels=labels)
    with pytest.raises(ValueError, match=f"lanes have no '{asked}'; ask for {told}"):
        DataLoader(made, derived=[asked])
    with DataLoader(made) as all_of_them, DataLoader(made, derived=[told, "segment_ids"]) as some:
        for lane, part in zip(all_of_them, some, strict=True):
            assert {told, "segment_ids"} <= part.keys()
            assert {asked, "position_ids"}.isdisjoint(part.keys())
            assert_same_lane(part, lane)


@pytest.mark.parametrize("state", [None, [], "state", 3])
def test_a_state_that_is_no_mapping_is_refused(tmp_path: Path, state: Any) -> None:
    with pytest.raises(StateError, match="a loader state is a mapping"):
        DataLoader(mixture(tmp_path)).load_state_dict(state)


@pytest.mark.parametrize("value", [None, "1", 1.5, float("nan"), [], {}, -1, 2**70])
@pytest.mark.parametrize(
    "place", [["step"], *(["sources", "a", i] for i in (2, 3, 7)), ["sources", "a", 1, 4]]
)
def test_a_state_with_something_else_for_a_count_is_refused_and_changes_nothing(
    tmp_path: Path, place: list[Any], value: Any
) -> None:
    with DataLoader(mixture(tmp_path)) as loader:
        next(loader.steps())
        state = loader.state_dict()
        damaged = copy.deepcopy(state)
        inner = damaged["stream"]
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = value
        with pytest.raises(StateError, match="the loader state is damaged"):
            loader.load_state_dict(damaged)
        assert loader.state_dict() == state


def test_a_users_loader_of_datasets_refuses_a_mixture_and_one_of_mixtures_takes_it(tmp_path: Path) -> None:
    class OfDatasets(DataLoader):
        pass

    class OfMixtures(MixtureLoader):
        def __init__(self, *args: Any, **keys: Any) -> None:
            super().__init__(*args, **keys)

    with pytest.raises(TypeError, match="OfDatasets: is for datasets, and this is a mixture"):
        OfDatasets("mixture.yaml")
    assert len(list(OfDatasets([1, 2, 3]))) == 3
    with OfMixtures(mixture(tmp_path)) as loader:
        assert len(list(loader)) == len(loader)


# shuffle: global over files that differ


def put_of_two_types(folder: Path, format_name: str) -> None:
    """The same number of documents in two files, whose tokens are of different types."""
    store = storage.Store(folder)
    for file, dtype in enumerate(("uint16", "int32")):
        documents = [[100 * file + i + 1] * 5 for i in range(60)]
        if format_name == "megatron":
            put_megatron(store, f"{file}", documents, dtype=dtype)
        else:
            encoded = [
                np.asarray(document, np.dtype(dtype).newbyteorder("<")).tobytes() for document in documents
            ]
            samples = [[b"\x04\x05" + one] for one in encoded]
            put_mds(store, f"{file}", {"input_ids": (f"ndarray:{dtype}", None)}, samples)


@pytest.mark.parametrize("format_name", ["megatron", "mds"])
def test_files_whose_tokens_differ_in_type_are_shuffled_together(tmp_path: Path, format_name: str) -> None:
    put_of_two_types(tmp_path, format_name)
    seen: set[tuple[int, str]] = set()
    mixed = 0
    with DataLoader(of_path(tmp_path, shuffle="global", steps=12)) as loader:
        for lane in loader:
            files = loader.samples(lane)["file"].to_pylist()
            mixed += len(set(files)) > 1
            tokens = lane["input_ids"][lane["input_ids"] > 0].tolist()
            assert tokens[::5] == tokens[4::5]
            seen.update(zip(tokens[::5], files, strict=True))
    assert mixed
    assert {token for token, _ in seen} == {*range(1, 61), *range(101, 161)}
    assert len(seen) == 120


def test_files_with_other_columns_are_not_shuffled_together(tmp_path: Path) -> None:
    """Labels that only the second file has would else be read of neither."""
    store, ids = storage.Store(tmp_path), b"\x04\x02\x01\x00\x02\x00"
    column = ("ndarray:uint16", None)
    put_mds(store, "0", {"input_ids": column}, [[ids]] * 20)
    put_mds(store, "1", {"input_ids": column, "labels": column}, [[ids, ids]] * 20)
    with pytest.raises(
        ColumnMissing, match=r"1/index\.json: has the columns input_ids, labels, not input_ids as"
    ):
        DataLoader(of_path(tmp_path, shuffle="global"))


@on_both_runtimes
def test_a_sample_that_is_too_long_is_named_by_its_own_file_in_a_global_shuffle(tmp_path: Path) -> None:
    store = storage.Store(tmp_path)
    put_megatron(store, "a", [[1]] * 20)
    put_megatron(store, "b", [[1], [1], [1] * 99])
    made = of_path(tmp_path, shuffle="global")
    made["sources"]["a"]["overflow"] = "error"
    with (
        DataLoader(made) as loader,
        pytest.raises(SampleError, match=r"b\.idx, row 2: a sample of 99 tokens"),
    ):
        list(loader)


# The quarantine file


@pytest.mark.parametrize("content", [b"notes of mine", b'{"a": 1}\n{"b": 2}', bytes(range(256)) * 9000])
def test_a_quarantine_file_that_is_something_else_is_refused_and_left_as_it_is(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "notes"
    path.write_bytes(content)
    with pytest.raises(QuarantineError, match="its last line does not end"):
        Quarantine(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("torn", [1, 11, 30])
def test_a_line_that_a_crash_tore_anywhere_is_cut_off(tmp_path: Path, torn: int) -> None:
    path = tmp_path / "bad.jsonl"
    Quarantine(path).add([failure(1)], step=0)
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:torn])
    Quarantine(path).add([failure(1), failure(2)], step=1)
    assert [json.loads(line)["row"] for line in path.read_text().splitlines()] == [1, 2]


def test_bad_rows_are_never_appended_to_the_data(tmp_path: Path) -> None:
    data = tmp_path / "data/rows.jsonl"
    data.parent.mkdir()
    data.write_text('oops\n{"input_ids": [1, 2, 3]}\n')
    before = data.read_bytes()
    given = tmp_path / "data/../data/rows.jsonl"
    with pytest.raises(MixtureError, match="is a file of source 'a'; give one that no source reads"):
        DataLoader(of_path(data.parent, quarantine=str(given)), dp_rank=0, dp_size=2)
    assert data.read_bytes() == before


# Rows as other code makes them


def scalar(row: dict[str, Any]) -> dict[str, Any]:
    """Some rows become a number that is an array."""
    return row if row["input_ids"][0] > 3 else {"input_ids": np.array(row["input_ids"][0])}


@on_both_runtimes
def test_a_transform_that_gives_a_number_for_tokens_gives_a_bad_row(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("".join(f'{{"input_ids": [{i}, 1, 2]}}\n' for i in range(1, 9)))
    made = of_path(tmp_path, shuffle="none")
    made["sources"]["a"]["transforms"] = ["tests.omniload.test_combinations:scalar"]
    with DataLoader(made) as loader:
        next(loader.steps())
        reasons = {failure.reason for failure in loader.failures()}
    assert reasons == {"'input_ids' is of type ndarray and not what its name says"}


def classified() -> list[dict[str, torch.Tensor]]:
    """Samples with a class, as a tensor of no dimension."""
    return [{"input_ids": torch.arange(1, 6), "labels": torch.tensor(i % 2)} for i in range(40)]


def numbers() -> list[torch.Tensor]:
    """Samples of which some are numbers."""
    return [torch.arange(1, 6) if i % 2 else torch.tensor(i) for i in range(40)]


@pytest.mark.parametrize(("dataset", "bad"), [("classified", 0), ("numbers", 20)])
def test_tensors_of_no_dimension_in_a_dataset_are_classes_or_bad_rows(dataset: str, bad: int) -> None:
    source = {"dataset": f"tests.omniload.test_combinations:{dataset}", "weight": 1}
    made = {"seq_len": 20, "packs": 1, "sources": {"a": source}}
    with DataLoader(made) as loader:
        lanes = list(loader)
        account = loader.ledger().sources["a"]
    assert account.failures == bad
    assert account.rows == 40
    assert all((lane["targets"] > 0).sum() == 16 for lane in lanes)
    assert len(lanes) == (40 - bad) // 4


# What is found when it is asked for, in several threads at once


def test_a_source_is_read_while_the_digests_of_others_are_being_found(tmp_path: Path) -> None:
    """A loader finds its identity in a thread of its own, beside those that read."""
    asked, found = threading.Event(), threading.Event()

    def slow() -> str:
        asked.set()
        assert found.wait(60)
        return "digest"

    entry = FileEntry(path="slow", url="slow", size=1, find_digest=slow)
    listing = Listing(store=storage.Store(tmp_path), files=(entry,), companions={})
    identity = threading.Thread(target=lambda: listing.fingerprint)
    identity.start()
    try:
        assert asked.wait(60)
        put_of_two_types(tmp_path, "megatron")
        write_parquet(tmp_path / "data.parquet", token_rows(0, 200, 20))
        for keys in ({"shuffle": "global"}, {"shuffle": "global", "held_out": 0.3}, {"held_out": 0.3}):
            path = tmp_path / "data.parquet" if "shuffle" not in keys else tmp_path / "*.idx"
            with DataLoader(of_path(path, **keys), timeout_s=20) as loader:
                assert len(list(loader)) == len(loader)
                loader.state_dict()
        assert identity.is_alive()
    finally:
        found.set()
        identity.join(60)
