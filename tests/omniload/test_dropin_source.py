"""A torch dataset as a source of a mixture: its samples are rows, loaded like those of files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from torch.utils.data import Dataset

from omniload import DataLoader
from omniload.errors import MixtureError, SourceError, StateError
from omniload.mixture import SourceSpec
from omniload.sources import BadRow, open_source
from omniload.sources.torch_dataset import BLOCK_ROWS, DatasetSource
from tests.omniload.mixtures import on_both_runtimes

ROWS = 700


class Documents(Dataset[Any]):
    """Token ids, in one of the ways a dataset may give them."""

    def __init__(self, kind: str = "dict", num_samples: int = ROWS, bad: int = -1) -> None:
        self.kind = kind
        self.num_samples = num_samples
        self.bad = bad

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Any:
        if index == self.bad:
            raise ValueError("the disk\nis on fire")
        ids = [1 + (index * 7 + i) % 900 for i in range(1 + index % 40)]
        kinds = {"list": ids, "array": np.array(ids), "tensor": torch.tensor(ids), "none": None}
        return kinds[self.kind] if self.kind in kinds else {"input_ids": torch.tensor(ids), "index": index}


class Together(Documents):
    """With a way to get several samples at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Held(Documents):
    """Gives what it holds, not a copy of it."""

    def __init__(self, kind: str = "dict") -> None:
        super().__init__(kind)
        self.samples = [super(Held, self).__getitem__(i) for i in range(ROWS)]

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


class HeldTogether(Held):
    """The same, several at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Columns(Documents):
    """Takes samples together, and gives columns."""

    def __getitems__(self, indices: list[int]) -> Any:
        return {"input_ids": [self[i]["input_ids"] for i in indices], "index": indices}


class OneShort(Documents):
    """Gives a sample too few."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices[1:]]


class Nameless(Documents):
    """A length that fails in a way of its own."""

    def __len__(self) -> int:
        raise RuntimeError("the index\nis not there")


class Sized:
    """Neither by index nor without a length: what a torch DataLoader is, too."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[Any]:
        return iter([[1, 2], [3, 4], [5, 6]])


def texts() -> list[str]:
    return ["a b c " * (i % 5 + 1) for i in range(40)]


def bare() -> Any:
    """Not one sample after the other, and not by index."""
    return object()


def endless() -> Any:
    class Endless:
        def __getitem__(self, index: int) -> int:
            return index

    return Endless()


def without_length() -> Any:
    class WithoutLength(Documents):
        def __len__(self) -> int:
            raise NotImplementedError

    return WithoutLength()


def used_up() -> Any:
    return iter([[1, 2, 3]])


def mixture_of(dataset: str = "Documents", seq_len: int = 64, **args: Any) -> dict[str, Any]:
    source = {"dataset": f"{__name__}:{dataset}", "args": args, "weight": 1, "on_exhausted": "repeat"}
    return {"seq_len": seq_len, "packs": 4, "lanes": 2, "steps": 40, "sources": {"a": source}}


def lanes_of(mixture: dict[str, Any], **keywords: Any) -> list[Any]:
    with DataLoader(mixture, **keywords) as loader:
        return [lane["input_ids"].tolist() for lane in loader]


@pytest.mark.parametrize("kind", ["dict", "list", "array", "tensor"])
def test_samples_are_rows_whatever_they_are_made_of(kind: str) -> None:
    assert lanes_of(mixture_of(kind=kind)) == lanes_of(mixture_of("Together"))


@pytest.mark.parametrize("shuffle", ["none", "window", "global"])
def test_every_sample_comes_once_an_epoch_and_as_it_is(shuffle: str) -> None:
    mixture = {**mixture_of(), "shuffle": shuffle}
    mixture["sources"]["a"]["on_exhausted"] = "stop"
    del mixture["steps"]
    seen: list[int] = []
    with DataLoader(mixture) as loader:
        for lane in loader:
            samples = loader.samples(lane).to_pylist()
            ids = lane["input_ids"].flatten().tolist()
            bounds = lane["cu_seqlens"].tolist()
            starts = [at for at in bounds[:-1] if lane["segment_ids"].flatten()[at]]
            for sample, start in zip(samples, starts, strict=True):
                row = sample["row"]
                expected = Documents("list")[row]
                assert ids[start : start + sample["end"]] == expected
                seen.append(row)
        assert len(set(seen)) == len(seen)
        assert loader.ledger().sources["a"].rows == ROWS
    assert (seen == sorted(seen)) is False
    assert len(seen) > ROWS - 60, "all but what does not fill a step"


@on_both_runtimes
def test_a_run_resumes_on_other_ranks() -> None:
    expected = lanes_of(mixture_of(), execution="inline")
    with DataLoader(mixture_of()) as loader:
        steps = loader.steps()
        for _ in range(15):
            next(steps)
        state = json.loads(json.dumps(loader.state_dict()))
    rest: list[Any] = [None] * len(expected[30:])
    for rank in range(2):
        with DataLoader(mixture_of(), dp_rank=rank, dp_size=2) as loader:
            loader.load_state_dict(state)
            rest[rank::2] = [lane["input_ids"].tolist() for lane in loader]
    assert rest == expected[30:]


@pytest.mark.parametrize("args", [{"num_samples": ROWS + 1}, {"kind": "list"}])
def test_another_dataset_is_refused_at_a_resume(args: dict[str, Any]) -> None:
    with DataLoader(mixture_of()) as loader:
        state = loader.state_dict()
    with DataLoader(mixture_of(**args)) as loader, pytest.raises(StateError, match="source 'a'"):
        loader.load_state_dict(state)


def test_text_is_tokenised(tmp_path: Path) -> None:
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"a": 0, "b": 1, "c": 2, "[UNK]": 3}, "[UNK]")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()  # type: ignore[assignment]
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    mixture = {**mixture_of("texts", 8), "tokenizer": str(tmp_path / "tokenizer.json")}
    ids = torch.tensor(lanes_of(mixture))
    assert set(ids.flatten().tolist()) == {0, 1, 2}


def test_a_sample_that_is_no_row_is_quarantined() -> None:
    block = DatasetSource("s", Documents("none")).read_block(0, 0)
    (row,) = block.rows(np.array([3]))
    assert isinstance(row, BadRow)
    assert row.reason == "a NoneType is neither a dict, text nor token ids"


def test_blocks_cover_the_dataset() -> None:
    source = DatasetSource("s", Documents("list"))
    ids = [source.row_ids(0, block) for block in range(source.num_blocks(0))]
    assert [len(one) for one in ids] == [BLOCK_ROWS, ROWS - BLOCK_ROWS]
    assert np.concatenate(ids).tolist() == list(range(ROWS))
    assert source.num_blocks(0) == len(ids)
    assert DatasetSource("s", Documents(num_samples=0)).num_blocks(0) == 0
    assert DatasetSource("s", Documents(num_samples=0)).schema(0) is None


@pytest.mark.parametrize("dataset", ["Documents", "Together"])
def test_an_error_of_the_dataset_ends_the_run_in_one_line_that_names_it(dataset: str) -> None:
    with pytest.raises(
        SourceError, match=r"source 'a'.*dataset cannot be read: ValueError: the disk is on fire"
    ):
        lanes_of(mixture_of(dataset, bad=300))


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ("nobody", "cannot be imported"),
        ("bare", "a object is no dataset; give it __getitem__ and __len__, or __iter__"),
        ("endless", "a Endless is no dataset"),
        ("without_length", "without a length"),
        ("Nameless", "without a length .RuntimeError: the index is not there"),
        ("used_up", "a list_iterator can be gone through only once"),
        ("Documents", r"cannot be made: TypeError: .*unexpected keyword argument 'nonsense'"),
    ],
)
def test_what_is_no_dataset_is_refused_in_one_line(dataset: str, message: str) -> None:
    args = {"nonsense": 1} if dataset == "Documents" else {}
    with pytest.raises(MixtureError, match=rf"source 'a': .*{message}") as raised:
        open_source("a", SourceSpec(dataset=f"{__name__}:{dataset}", args=args, weight=1))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("kind", ["dict", "list", "array", "tensor"])
@pytest.mark.parametrize("make", [Held, HeldTogether])
def test_rows_may_be_changed_without_changing_what_the_dataset_holds(make: type[Held], kind: str) -> None:
    dataset = make(kind)
    block: Any = DatasetSource("s", dataset).read_block(0, 0)
    before = [list(row["input_ids"]) for row in block.rows(np.arange(5))]
    for row in block.rows(np.arange(5)):
        row["input_ids"][0] = 0
    assert [list(row["input_ids"]) for row in block.rows(np.arange(5))] == before


@pytest.mark.parametrize(("dataset", "given"), [("Columns", "a dict"), ("OneShort", r"\d+ samples")])
def test_samples_taken_together_are_one_for_each_index(dataset: str, given: str) -> None:
    with pytest.raises(SourceError, match=rf"source 'a': __getitems__ .* gave {given} for \d+ indices; "):
        lanes_of(mixture_of(dataset))


def test_what_has_a_length_but_no_access_by_index_is_read_in_sequence() -> None:
    source = open_source("a", SourceSpec(dataset=f"{__name__}:Sized", weight=1))
    rows: list[Any] = source.read_block(0, 0).rows(np.arange(3))
    assert [row["input_ids"] for row in rows] == [[1, 2], [3, 4], [5, 6]]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "either path: or dataset:"),
        ({"path": []}, "either path: or dataset:"),
        ({"path": "x.parquet", "dataset": "a:b"}, "either path: or dataset:"),
        ({"path": "x.parquet", "args": {"a": 1}}, "args: are of a dataset"),
        ({"dataset": "module"}, r"'module' is not of the form package\.module:function"),
        ({"dataset": "a:b", "format": "parquet"}, "format: is of files"),
        ({"dataset": "a:b", "storage_options": {"x": 1}}, "storage_options: is of files"),
    ],
)
def test_a_source_is_files_or_a_dataset(keys: dict[str, Any], message: str) -> None:
    mixture = {"seq_len": 8, "packs": 1, "sources": {"a": {**keys, "weight": 1}}}
    with pytest.raises(MixtureError, match=message) as raised:
        DataLoader(mixture)
    assert "\n" not in str(raised.value)
