"""An iterable torch dataset as a source of a mixture: read in sequence, resumed exactly, found out if it changes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from omniload import Chaos, DataLoader
from omniload.errors import MixtureError, SourceError
from omniload.mixture import Mixture, SourceSpec
from omniload.planner import StreamState
from omniload.sources import open_source
from omniload.sources.torch_rows import copy_of, digest_of, row_of
from omniload.sources.torch_stream import BLOCK_ROWS, KEPT_BYTES, MAX_STATES, Stream
from tests.omniload.mixtures import on_both_runtimes, on_both_runtimes_with
from tests.omniload.test_laws import assert_same_lane, lanes_of, plans_of

ROWS = 2 * BLOCK_ROWS + 100
"""Three blocks, so two windows of two blocks, the last of which has a part of one."""

FAT = 2 * KEPT_BYTES // ROWS
"""Bytes of a row of which not all that passed are kept."""


def tokens(epoch: int, i: int) -> list[int]:
    """The tokens of a row, which name it."""
    return [1 + epoch, 1 + i // 100, 1 + i % 100, *([7] * (i % 5))]


class Plain(IterableDataset[Any]):
    """The same rows every time. Counts those it gave."""

    def __init__(self, num_rows: int = ROWS, bad: int = -1, raises: int = -1, fat: int = 0) -> None:
        self.num_rows = num_rows
        self.fat = bytes(fat)
        self.bad = bad
        self.raises = raises
        self.epoch = 0
        self.given = 0

    def rows(self, start: int = 0) -> Iterator[Any]:
        for i in range(start, self.num_rows):
            if i == self.raises:
                raise ValueError("the line\nis cut")
            self.given += 1
            row = {"input_ids": torch.tensor(tokens(self.epoch, i)), "number": i, "fat": self.fat}
            yield None if i == self.bad else row

    def __iter__(self) -> Iterator[Any]:
        return self.rows()


class Epochs(Plain):
    """Other rows in every epoch."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Stateful(Epochs):
    """With a state, which the next iteration uses up."""

    def __init__(self, num_rows: int = ROWS, fat: int = 0) -> None:
        super().__init__(num_rows, fat=fat)
        self.start = self.next = self.restored = 0

    def __iter__(self) -> Iterator[Any]:
        start, self.start = self.start, 0
        for i, row in enumerate(self.rows(start), start):
            self.next = i + 1
            yield row

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["next"]
        self.restored += 1


class Sticky(Stateful):
    """As datasets of Hugging Face: every iteration of that epoch begins where the dataset was restored to."""

    def __iter__(self) -> Iterator[Any]:
        kept = self.start
        for row in super().__iter__():
            self.start = kept
            yield row


class Numbers(Iterator[Any]):
    """An iterator that has the state."""

    def __init__(self, dataset: Plain) -> None:
        self.dataset = dataset
        self.next = 0

    def __next__(self) -> Any:
        row = next(self.dataset.rows(self.next))
        self.next += 1
        return row

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


class OfIterator(Epochs):
    """Its iterator has the state, and not the dataset."""

    def __iter__(self) -> Iterator[Any]:
        return Numbers(self)


class Forgetful(Stateful):
    """As a dataset with a shuffle buffer that is no part of its state: restored, it has lost three rows."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({"next": state["next"] + 3})


class Broken(Stateful):
    """What it says of its place cannot be gone back to."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.restored += 1
        raise KeyError("next")


class Silent(Stateful):
    """Its base class has the methods of a state, and it has none."""

    def state_dict(self) -> dict[str, Any]:
        raise NotImplementedError


class Drifting(Plain):
    """Other rows in every iteration, without being told to."""

    def __iter__(self) -> Iterator[Any]:
        yield from self.rows()
        self.epoch += 1


KINDS: list[Callable[[], Plain]] = [Plain, Epochs, Stateful, Sticky, OfIterator]


def nothing() -> list[Any]:
    class Nothing(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            yield from ()

    return Nothing()  # type: ignore[return-value]


def mixture_of(dataset: str = "Epochs", *, args: dict[str, Any] | None = None, **keys: Any) -> dict[str, Any]:
    source = {"dataset": f"{__name__}:{dataset}", "args": args or {}, "weight": 1, "on_exhausted": "repeat"}
    return {
        "seq_len": 32,
        "packs": 6,
        "lanes": 6,
        "window_blocks": 2,
        "sources": {"a": {**source, **keys.pop("source", {})}},
        **keys,
    }


def served(mixture: dict[str, Any], **keywords: Any) -> tuple[list[tuple[int, int, list[int]]], Any]:
    """(epoch, row, tokens) of every sample of a stream in order, and what the ledger says of the source."""
    seen = []
    with DataLoader(mixture, **keywords) as loader:
        for lane in loader:
            ids, bounds = lane["input_ids"].flatten().tolist(), lane["cu_seqlens"].tolist()
            starts = [at for at in bounds[:-1] if lane["segment_ids"].flatten()[at]]
            for sample, at in zip(loader.samples(lane).to_pylist(), starts, strict=True):
                seen.append((sample["epoch"], sample["row"], ids[at : at + sample["end"]]))
        return seen, loader.ledger().sources["a"]


# The rows and their order


@pytest.mark.parametrize("shuffle", ["none", "window"])
@pytest.mark.parametrize("num_rows", [ROWS, 2 * BLOCK_ROWS, 4 * BLOCK_ROWS, BLOCK_ROWS + 1])
def test_every_row_of_every_epoch_is_read_once_and_served_as_it_is(shuffle: str, num_rows: int) -> None:
    """Also if the dataset ends where a window does."""
    source = {"repeat": 2, "on_exhausted": "stop"}
    seen, account = served(mixture_of(args={"num_rows": num_rows}, shuffle=shuffle, source=source))
    assert account.rows == 2 * num_rows
    places = [(epoch, row) for epoch, row, _ in seen]
    assert len(set(places)) == len(places)
    assert {row for epoch, row in places if epoch == 0} == set(range(num_rows))
    assert len(places) > 2 * num_rows - 100, "all but what does not fill a step"
    assert all(ids == tokens(epoch, row) for epoch, row, ids in seen)


@pytest.mark.parametrize("shuffle", ["none", "window"])
def test_rows_are_shuffled_in_windows_only(shuffle: str) -> None:
    source = open_source("a", SourceSpec(dataset=f"{__name__}:Plain", weight=1))
    assert source.read_block(0, 1).row_ids.tolist() == source.row_ids(0, 1).tolist()
    seen, _ = served(mixture_of("Plain", shuffle=shuffle, unit="samples", packing="none", lanes=1, steps=80))
    rows = [row for _, row, _ in seen]
    assert len(rows) == 480
    assert set(rows) < set(range(2 * BLOCK_ROWS)), "of the first window"
    assert (max(rows[:60]) < 80) == (shuffle == "none")


@on_both_runtimes
def test_only_the_columns_asked_for_are_kept_and_the_first_row_names_them() -> None:
    keys = {"read_columns": ["input_ids"], "transforms": [f"{__name__}:without_number"]}
    source = open_source("a", SourceSpec(dataset=f"{__name__}:Plain", weight=1))
    schema = source.schema(0)
    assert schema is not None
    assert schema.names == ["input_ids", "number", "fat"]
    seen, _ = served(mixture_of("Plain", source=keys, steps=3))
    assert len(seen) > 50


def without_number(row: dict[str, Any]) -> dict[str, Any]:
    """A transform that sees whether a column was left out."""
    assert "number" not in row
    return row


def test_what_a_transform_does_to_a_row_does_not_stay() -> None:
    source = {"transforms": [f"{__name__}:spoil"], "on_exhausted": "stop"}
    quiet, _ = served(mixture_of("Plain", source=source))
    often, _ = served(mixture_of("Plain", source=source), buffer_bytes=0)
    assert quiet == often
    assert all(ids == [9, *tokens(0, row)[1:]] for _, row, ids in quiet)


def spoil(row: dict[str, Any]) -> dict[str, Any]:
    """Changes what it was given."""
    assert row["input_ids"][0] == 1
    row["input_ids"][0] = 9
    return row


# Resume


@on_both_runtimes_with("dataset", ["Epochs", "Sticky"], on_ray=["Sticky"])
def test_a_run_resumes_at_every_step_on_other_ranks(execution: str, dataset: str) -> None:
    steps = 25
    mixture = mixture_of(dataset, args={"num_rows": BLOCK_ROWS + 40}, steps=steps)
    states, lanes = [], {}
    with DataLoader(mixture) as loader:
        states.append(loader.state_dict())
        for group in loader.steps():
            lanes |= {(lane["step"], lane["lane"]): lane for lane in group}
            states.append(json.loads(json.dumps(loader.state_dict())))
    streams = [StreamState.from_json(state["stream"], ["a"]) for state in states]
    assert streams[-2].sources[0].cursor.epoch > 1, "the epochs were not many"
    assert any(len(stream.carried) for stream in streams), "no state with carried pieces"
    epochs = [set(stream.carried["epoch"].tolist()) for stream in streams if len(stream.carried)]
    assert any(len(one) > 1 for one in epochs), "no state with pieces of the epoch before"
    for step, state in list(enumerate(states))[:: 1 if execution == "inline" else 7]:
        dp_size = [1, 3, 2, 6][step % 4]
        with DataLoader(mixture, dp_rank=step % dp_size, dp_size=dp_size) as resumed:
            resumed.load_state_dict(state)
            rest = [lane for group in itertools.islice(resumed.steps(), 4) for lane in group]
            assert len(rest) == min(4, steps - step) * 6 // dp_size
            for lane in rest:
                assert_same_lane(lane, lanes[lane["step"], lane["lane"]])


@pytest.mark.chaos
@pytest.mark.parametrize("dataset", ["Epochs", "Stateful"])
def test_plans_and_payload_do_not_depend_on_timing_evictions_or_loaders(dataset: str) -> None:
    """Several loaders skip over each other's windows, and what is evicted is iterated to again."""
    mixture = mixture_of(dataset, steps=25, args={"fat": FAT})
    quiet, _ = plans_of(Mixture.load(mixture), None, 25)
    assert max(int(plan.pieces["epoch"].max()) for plan in quiet) >= 1
    refused = 0
    for seed in range(2):
        chaos = Chaos(seed=seed, max_delay_s=0.0005, evict_probability=0.2)
        chaotic, stale = plans_of(Mixture.load(mixture), chaos, 25)
        assert [plan.hash for plan in chaotic] == [plan.hash for plan in quiet]
        refused += stale
    assert refused > 0, "no stale lease was ever refused: the disturbance was too weak"
    whole = lanes_of(DataLoader(mixture))
    disturbed = lanes_of(DataLoader(mixture, chaos=Chaos(seed=5, max_delay_s=0), buffer_bytes=2**10))
    for key, lane in whole.items():
        assert_same_lane(lane, disturbed[key])


def test_a_shorter_dataset_is_refused_at_a_resume() -> None:
    """Though all that names it is the same."""
    mixture = mixture_of("shrinking", steps=60)
    SIZES[:] = [ROWS, BLOCK_ROWS - 1]
    with DataLoader(mixture) as loader:
        groups = loader.steps()
        for _ in range(15):
            next(groups)
        state = loader.state_dict()
        assert StreamState.from_json(state["stream"], ["a"]).sources[0].cursor.block == 2
    with DataLoader(mixture) as loader:
        loader.load_state_dict(state)
        with pytest.raises(
            SourceError, match=r"source 'a': the dataset ends before row 256, .* row 512 of it"
        ):
            list(loader)


SIZES: list[int] = []


def shrinking() -> Plain:
    """A dataset of the size that is next."""
    return Plain(SIZES.pop(0))


# The ways back


def blocks(stream: Stream, epoch: int, *numbers: int) -> list[list[int]]:
    """The numbers of the rows of blocks."""
    return [[row["number"] for row in stream.read("a", epoch, n)[0]] for n in numbers]  # type: ignore[call-overload]


def whole_blocks(*numbers: int) -> list[list[int]]:
    return [list(range(n * BLOCK_ROWS, (n + 1) * BLOCK_ROWS)) for n in numbers]


@pytest.mark.parametrize("make", KINDS)
def test_blocks_are_the_same_in_whatever_order_they_are_read(make: Callable[[], Plain]) -> None:
    dataset = make()
    dataset.num_rows = 12 * BLOCK_ROWS
    stream = Stream(dataset, kept_bytes=0)
    for epoch, *numbers in [(0, 3, 4, 1, 2), (1, 0, 11, 5, 5), (0, 7, 0), (2, 11, 10, 9), (1, 6)]:
        assert blocks(stream, epoch, *numbers) == whole_blocks(*numbers)
        first: Any = stream.read("a", epoch, numbers[-1])[0][0]
        assert first["input_ids"][0] == 1 + (epoch if stream.has_epochs else 0)
        assert stream.read("a", epoch, 12)[0] == []
        assert stream.read("a", epoch, 14)[0] == []


@pytest.mark.parametrize("make", [Stateful, Sticky, OfIterator])
def test_states_shorten_the_way_back_and_forth(make: Callable[[], Plain]) -> None:
    dataset = make()
    dataset.num_rows = 40 * BLOCK_ROWS
    stream = Stream(dataset, kept_bytes=0)
    assert blocks(stream, 0, 30) == whole_blocks(30)
    for back, on in [(20, 31), (1, 32), (0, 33)]:
        dataset.given = 0
        assert blocks(stream, 0, back, on) == whole_blocks(back, on)
        assert dataset.given < 5 * BLOCK_ROWS


def test_without_a_state_the_way_back_is_from_the_start() -> None:
    dataset = Plain(40 * BLOCK_ROWS)
    stream = Stream(dataset, kept_bytes=0)
    assert blocks(stream, 0, 30, 20) == whole_blocks(30, 20)
    assert dataset.given == (31 + 21) * BLOCK_ROWS


def test_what_lies_right_before_the_place_of_a_resume_is_not_iterated_to_again() -> None:
    dataset = Plain(40 * BLOCK_ROWS)
    stream = Stream(dataset)
    assert blocks(stream, 0, 30, 28, 31, 29) == whole_blocks(30, 28, 31, 29)
    assert dataset.given == 32 * BLOCK_ROWS


def test_the_rows_kept_are_bounded() -> None:
    stream = Stream(Plain(40 * BLOCK_ROWS, fat=1000), kept_bytes=BLOCK_ROWS * 5500)
    stream.read("a", 0, 30)
    assert [block for _, block in stream._kept] == [27, 28, 29, 30]
    stream.close()
    assert not stream._kept


def test_the_states_kept_are_bounded_and_spread_over_the_epoch() -> None:
    dataset = Stateful(5 * MAX_STATES * BLOCK_ROWS)
    stream = Stream(dataset, kept_bytes=0)
    stream.read("a", 0, 5 * MAX_STATES - 1)
    kept = [block for block, _ in stream._passed.get(0).states]
    assert MAX_STATES // 2 <= len(kept) <= MAX_STATES
    assert {b - a for a, b in itertools.pairwise(kept)} == {8}


@pytest.mark.parametrize("make", [Forgetful, Broken])
@pytest.mark.parametrize("following", [5, 11, 19])
def test_a_state_that_leads_elsewhere_is_not_used(make: type[Stateful], following: int) -> None:
    """Also where nothing that lies after it has been read yet."""
    dataset = make(20 * BLOCK_ROWS)
    stream = Stream(dataset, kept_bytes=0)
    assert blocks(stream, 0, 10) == whole_blocks(10)
    stream.close()
    assert blocks(stream, 0, following, 2) == whole_blocks(following, 2)
    assert dataset.restored == 1, "it was not tried once and then left alone"


def test_a_state_that_cannot_be_had_is_done_without() -> None:
    dataset = Silent(4 * BLOCK_ROWS)
    stream = Stream(dataset, kept_bytes=0)
    assert blocks(stream, 0, 3, 1) == whole_blocks(3, 1)
    assert dataset.restored == 0


# What cannot be


@on_both_runtimes
def test_a_dataset_that_gives_other_rows_in_the_next_epoch_is_refused() -> None:
    mixture = mixture_of("Drifting", steps=60, args={"fat": FAT})
    with (
        DataLoader(mixture) as loader,
        pytest.raises(SourceError, match=r"source 'a': from row 0 on .* other rows .*set_epoch") as raised,
    ):
        list(loader)
    assert "\n" not in str(raised.value)


@on_both_runtimes
def test_an_error_of_the_dataset_ends_the_run_in_one_line_however_often_it_is_tried() -> None:
    """And is not taken for the end of the dataset, though a generator that raised says it has ended."""
    mixture = mixture_of("Plain", steps=60, args={"raises": 300})
    with DataLoader(mixture) as loader:
        for _ in range(2):
            with pytest.raises(
                SourceError, match=r"source 'a': .*cannot be read at row 300: ValueError: the line is cut"
            ):
                list(loader)


@on_both_runtimes
def test_a_sample_that_is_no_row_is_quarantined() -> None:
    with DataLoader(mixture_of("Plain", args={"bad": 300}, source={"on_exhausted": "stop"})) as loader:
        for _ in loader:
            pass
        (failure,) = loader.failures()
        assert loader.ledger().sources["a"].failures == 1
    assert (failure.row_id, failure.reason) == (300, "a NoneType is neither a dict, text nor token ids")


def test_a_tensor_that_is_no_array_is_a_bad_row() -> None:
    row = row_of({"input_ids": torch.ones(3, dtype=torch.bfloat16)})
    assert "BFloat16" in row.reason  # type: ignore[union-attr]


@on_both_runtimes
def test_an_empty_dataset_is_an_error_and_no_endless_loop() -> None:
    with (
        DataLoader(mixture_of("nothing")) as loader,
        pytest.raises(SourceError, match="no token in a whole pass"),
    ):
        list(loader)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"shuffle": "global"}, "shuffle: global reads single rows"),
        ({"source": {"rows": {"stop": 10}}}, "rows: an iterable dataset has no rows by number"),
        ({"held_out": 0.5}, "held_out: rows are known by their number, and .*Epochs has set_epoch"),
    ],
)
def test_what_takes_rows_by_number_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(MixtureError, match=message) as raised, DataLoader(mixture_of(**keys)) as loader:
        next(iter(loader))
    assert "\n" not in str(raised.value)


def test_rows_are_held_out_of_a_dataset_that_is_the_same_in_every_epoch() -> None:
    mixture = mixture_of("Plain", held_out=0.3, packs=1, lanes=1, source={"on_exhausted": "stop"})
    parts = [{row for _, row, _ in served(mixture, split=split)[0]} for split in ("train", "held_out")]
    assert not parts[0] & parts[1]
    assert ROWS - 30 < len(parts[0] | parts[1]) <= ROWS
    assert 0.2 * ROWS < len(parts[1]) < 0.4 * ROWS


# Digests and copies

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=10,
)


@given(st.lists(st.dictionaries(st.text(max_size=3), VALUES, max_size=3), min_size=2, max_size=2))
def test_a_digest_tells_rows_apart_and_a_copy_has_the_same(rows: list[dict[str, Any]]) -> None:
    one, other = rows
    assert digest_of([copy_of(one)]) == digest_of([one])
    assert copy_of(one) == one
    if json.dumps(one) != json.dumps(other):
        assert digest_of([one])[0] != digest_of([other])[0]


@pytest.mark.parametrize(
    "other",
    [
        {"x": np.array([1, 2, 3])},
        {"x": np.array([[1, 2]])},
        {"x": np.array([1, 2], np.int32)},
        {"x": [1, 2.0]},
        {"x": b"12"},
        {"x": "12"},
        {"x": np.array([1, None])},
        {"x": np.array([1, "a"], object)},
    ],
)
def test_a_digest_tells_arrays_from_others(other: dict[str, Any]) -> None:
    row = {"x": np.array([1, 2])}
    assert digest_of([row])[0] != digest_of([other])[0]
    assert digest_of([row, other])[0] == digest_of([copy_of(row), copy_of(other)])[0]


@pytest.mark.parametrize("kind", [np.int64, np.uint8, np.float32, np.bool_])
def test_a_digest_tells_numbers_of_numpy_apart(kind: Any) -> None:
    """As ``list(array)`` and ``array.argmax()`` give them."""
    rows: list[Any] = [{"x": kind(0)}, {"x": kind(1)}, {"x": [kind(0), kind(1)]}, {"x": [kind(0), kind(0)]}]
    assert len({digest_of([row])[0] for row in rows}) == len(rows)
    assert len({digest_of([{"x": ["a", *row["x"]]}])[0] for row in rows[2:]}) == 2


def test_a_copy_may_be_changed() -> None:
    row = {"a": [1, 2], "b": {"c": np.arange(3)}, "d": [{"e": 1}, {"f": [2]}], "g": [np.arange(2)]}
    before = json.dumps(row, default=np.ndarray.tolist)
    copied = copy_of(row)
    copied["a"][0] = copied["b"]["c"][0] = copied["d"][1]["f"][0] = copied["g"][0][0] = 9
    assert json.dumps(row, default=np.ndarray.tolist) == before
