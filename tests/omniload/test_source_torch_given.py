"""Datasets of the running process in a mixture: objects where a file can only give a name."""

from __future__ import annotations

import gc
import itertools
import json
import multiprocessing
import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import Dataset

from omniload import Chaos, DataLoader
from omniload.errors import MixtureError, StateError
from omniload.given import Given
from omniload.mixture import Mixture
from omniload.mixture_schema import json_schema
from omniload.sources.torch_open import open_dataset
from omniload.sources.torch_stream import BLOCK_ROWS
from tests.omniload.mixtures import on_both_runtimes_with
from tests.omniload.test_dropin_source import Documents
from tests.omniload.test_source_torch_iterable import FAT, ROWS, Epochs, Plain, Stateful

OBJECTS = [Documents, Epochs, Stateful]


def mixture_of(dataset: Any, **keys: Any) -> dict[str, Any]:
    source = {"dataset": dataset, "weight": 1, "on_exhausted": "repeat"}
    return {"seq_len": 64, "packs": 4, "lanes": 2, "steps": 20, "sources": {"a": source}, **keys}


def lanes_of(mixture: Any, **keywords: Any) -> list[Any]:
    with DataLoader(mixture, **keywords) as loader:
        return [lane["input_ids"].tolist() for lane in loader]


def named(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


@on_both_runtimes_with("kind", OBJECTS, on_ray=[Stateful])
def test_an_object_gives_what_a_function_that_makes_it_gives(execution: str, kind: type) -> None:
    assert lanes_of(mixture_of(kind())) == lanes_of(mixture_of(named(kind)))


def test_a_mixture_with_an_object_is_a_mixture_like_any_other(tmp_path: Path) -> None:
    """Groups, includes, overrides, printing, dumping and loading again."""
    file = tmp_path / "m.yaml"
    file.write_text("seq_len: 64\npacks: 4\nlanes: 2\nsteps: 20\n")
    group = {"weight": 1, "sources": {"a": {"dataset": Plain(), "weight": 2, "on_exhausted": "repeat"}}}
    mixture = Mixture.load({"include": str(file), "groups": {"g": group}}, overrides=["steps=10"])
    assert mixture.steps == 10
    assert "test_source_torch_iterable.Plain" in repr(mixture)
    text = json.dumps(mixture.model_dump(mode="json"))
    again = Mixture.load(mixture, steps=20)
    assert json.dumps(again.model_dump(mode="json")) == text.replace('"steps": 10', '"steps": 20')
    assert lanes_of(again) == lanes_of(mixture_of(Plain()))
    with pytest.raises(MixtureError, match="is not of the form package"):
        Mixture.load(json.loads(text))


@on_both_runtimes_with("kind", OBJECTS, on_ray=[Stateful])
def test_a_state_loads_with_another_object_of_the_kind_and_on_other_ranks(execution: str, kind: type) -> None:
    expected = lanes_of(mixture_of(kind()))
    with DataLoader(mixture_of(kind())) as loader:
        steps = loader.steps()
        for _ in range(7):
            next(steps)
        state = json.loads(json.dumps(loader.state_dict()))
    rest: list[Any] = [None] * len(expected[14:])
    for rank in range(2):
        with DataLoader(mixture_of(kind()), dp_rank=rank, dp_size=2) as loader:
            loader.load_state_dict(state)
            rest[rank::2] = [lane["input_ids"].tolist() for lane in loader]
    assert rest == expected[14:]


class Marked(Documents):
    """Says what it holds."""

    def __init__(self, mark: str, **keys: Any) -> None:
        super().__init__(**keys)
        self._fingerprint = mark


class MarkedRows(Plain):
    """Says what it holds, as a method that is none of ours."""

    def __init__(self, mark: str) -> None:
        super().__init__()
        self._fingerprint = mark

    def fingerprint(self) -> str:
        raise AssertionError("not asked for")


OTHERS = [
    (Documents(), Documents(num_samples=701)),
    (Documents(), Plain()),
    (Plain(), Epochs()),
    (Marked("x"), Marked("y")),
    (MarkedRows("x"), MarkedRows("y")),
]


@on_both_runtimes_with("datasets", OTHERS, on_ray=[OTHERS[0]])
def test_another_dataset_is_refused_at_a_resume(execution: str, datasets: tuple[Any, Any]) -> None:
    one, other = datasets
    with DataLoader(mixture_of(one)) as loader:
        state = loader.state_dict()
    with DataLoader(mixture_of(other)) as loader, pytest.raises(StateError, match="source 'a'"):
        loader.load_state_dict(state)


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("kind", "keys"), [(Documents, {}), (Epochs, {"fat": FAT}), (Stateful, {"fat": FAT})]
)
def test_loaders_that_share_an_object_do_not_disturb_each_other(kind: type, keys: dict[str, int]) -> None:
    """Two streams of it at once, in different epochs, each read by several loaders."""
    expected = lanes_of(mixture_of(kind(), window_blocks=1))
    shared, chaos = kind(**keys), Chaos(seed=1, max_delay_s=0.0005)
    assert chaos.source("a").num_loaders() > 1
    with (
        DataLoader(mixture_of(shared, window_blocks=1), chaos=chaos) as one,
        DataLoader(mixture_of(shared, window_blocks=1), chaos=chaos) as other,
    ):
        ahead = [lane["input_ids"].tolist() for lane in itertools.islice(one, 16)]
        seen: list[Any] = []
        for lane in other:
            seen.append(lane["input_ids"].tolist())
            ahead += [lane["input_ids"].tolist() for lane in itertools.islice(one, 1)]
    assert seen == ahead == expected


class Halting(Plain):
    """Comes to a halt in the process that made it, until it is let go on."""

    def __init__(self) -> None:
        super().__init__(BLOCK_ROWS)
        self.process = os.getpid()
        self.halted, self.go_on = threading.Event(), threading.Event()

    def rows(self, start: int = 0) -> Iterator[Any]:
        if os.getpid() == self.process:
            self.halted.set()
            assert self.go_on.wait(60)
        return super().rows(start)


def read_all(dataset: Any) -> None:
    assert open_dataset("a", Given(dataset), {}).read_block(0, 0).num_rows == BLOCK_ROWS


def test_a_forked_process_reads_what_a_thread_of_its_parent_is_reading() -> None:
    """The lock that the thread holds is never let go of there."""
    dataset = Halting()
    thread = threading.Thread(target=read_all, args=(dataset,))
    thread.start()
    assert dataset.halted.wait(60)
    forked = multiprocessing.get_context("fork").Process(target=read_all, args=(dataset,))
    forked.start()
    forked.join(60)
    dataset.go_on.set()
    thread.join(60)
    hangs = forked.is_alive()
    forked.kill()
    assert not hangs
    assert forked.exitcode == 0


def test_an_object_is_kept_only_as_long_as_it_is_used() -> None:
    dataset: Dataset[Any] = Stateful(ROWS)
    gone = weakref.ref(dataset)
    with DataLoader(mixture_of(dataset)) as loader:
        next(iter(loader))
    del loader, dataset
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("value", ["[1, 2]", "{a: 1}", "3", "true"])
def test_a_file_can_only_name_a_dataset(tmp_path: Path, value: str) -> None:
    file = tmp_path / "m.yaml"
    file.write_text(f"seq_len: 8\npacks: 1\nsources:\n  a: {{dataset: {value}, weight: 1}}\n")
    with pytest.raises(
        MixtureError, match=r"sources\.a\.dataset: a \w+ is no dataset; give package"
    ) as raised:
        DataLoader(file)
    assert "\n" not in str(raised.value)


def test_args_are_of_a_function() -> None:
    mixture = mixture_of(Documents())
    mixture["sources"]["a"]["args"] = {"x": 1}
    with pytest.raises(MixtureError, match="args: are of a function, and here is a dataset that is made"):
        DataLoader(mixture)


@pytest.mark.parametrize(
    "thing", [object(), Plain, Documents, len, {"a"}, iter([[1]]), (i for i in range(3))]
)
def test_what_is_no_dataset_is_refused_in_one_line(thing: Any) -> None:
    with pytest.raises(
        MixtureError, match=r"source 'a': .* (is no dataset; give|can be gone through only once)"
    ) as raised:
        DataLoader(mixture_of(thing))
    assert "\n" not in str(raised.value)


def test_the_schema_of_the_file_knows_names_only() -> None:
    dataset = json_schema()["$defs"]["SourceSpec"]["properties"]["dataset"]
    assert [one["type"] for one in dataset["anyOf"]] == ["string", "null"]
