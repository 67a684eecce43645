"""One name for two loaders: what it chooses, what code that looks for torch's loader finds, and wrong arguments."""

from __future__ import annotations

import copy
import inspect
import itertools
import pickle
import subprocess
import sys
import typing
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data
import yaml

from omniload import DataLoader, Mixture
from omniload.client import MixtureLoader
from omniload.torch_loader.loader import DatasetLoader
from tests.omniload.dropin import SAMPLES, Numbers, Reversed, Stream, ids
from tests.omniload.mixtures import token_rows, write_parquet


def mixture_of(folder: Path) -> dict[str, Any]:
    write_parquet(folder / "data.parquet", token_rows(0, 100, 30))
    source = {"path": str(folder / "data.parquet"), "weight": 1, "on_exhausted": "repeat"}
    return {"seq_len": 64, "packs": 4, "lanes": 2, "steps": 3, "sources": {"a": source}}


def test_both_are_torchs_loader_and_ours(tmp_path: Path) -> None:
    mixture = mixture_of(tmp_path)
    path = tmp_path / "mixture.yaml"
    path.write_text(yaml.safe_dump(mixture))
    for given in (mixture, path, str(path), Mixture.load(mixture)):
        with DataLoader(given, dp_rank=1, dp_size=2) as loader:
            assert type(loader) is MixtureLoader
            assert isinstance(loader, torch.utils.data.DataLoader)
            assert isinstance(loader, DataLoader)
            assert [lane["lane"] for lane in loader] == [1, 1, 1]
    for dataset in (
        Numbers(),
        Stream(),
        list(range(SAMPLES)),
        torch.utils.data.TensorDataset(torch.arange(3)),
    ):
        of_dataset = DataLoader(dataset, 4)
        assert type(of_dataset) is DataLoader
        assert isinstance(of_dataset, torch.utils.data.DataLoader)
        assert len(list(of_dataset)) == len(list(torch.utils.data.DataLoader(dataset, 4)))


def test_what_torchs_loader_has_is_there(tmp_path: Path) -> None:
    sampler = Reversed()
    loader = DataLoader(Numbers(), 4, sampler=sampler, num_workers=1, collate_fn=len, drop_last=True)
    plain = torch.utils.data.DataLoader(
        Numbers(), 4, sampler=sampler, num_workers=1, collate_fn=len, drop_last=True
    )
    for name in vars(plain):
        if name.strip("_").startswith("DataLoader"):
            continue
        ours, theirs = getattr(loader, name), getattr(plain, name)
        assert type(ours) is type(theirs)
        assert name in ("dataset", "batch_sampler") or ours == theirs
    with DataLoader(mixture_of(tmp_path)) as of_mixture:
        assert of_mixture.batch_size is None
        assert (of_mixture.num_workers, of_mixture.pin_memory, of_mixture.drop_last) == (0, False, False)
        assert of_mixture.collate_fn("lane") == "lane"
        assert isinstance(of_mixture.dataset, torch.utils.data.IterableDataset)
        lanes = [(lane["step"], lane["lane"]) for lane in of_mixture.dataset]
        assert lanes == [(step, lane) for step in range(3) for lane in range(2)]


@pytest.mark.parametrize(
    ("keywords", "key"),
    [
        ({"batch_size": 4}, "batch_size"),
        ({"shuffle": True}, "shuffle"),
        ({"num_workers": 2, "seq_len": 8}, "num_workers"),
        ({"collate_fn": len}, "collate_fn"),
    ],
)
def test_arguments_of_a_dataset_are_refused_with_a_mixture(
    tmp_path: Path, keywords: dict[str, Any], key: str
) -> None:
    with pytest.raises(TypeError, match=rf"^{key}: is for datasets.*set seq_len, packs and lanes") as raised:
        DataLoader(mixture_of(tmp_path), **keywords)
    assert "\n" not in str(raised.value)


def test_a_second_positional_argument_is_refused_with_a_mixture(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"^batch_size: is for datasets"):
        DataLoader(mixture_of(tmp_path), 4)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"^dataset: is a mixture"):
        DataLoader(dataset=mixture_of(tmp_path))  # type: ignore[call-overload]


@pytest.mark.parametrize("key", ["seq_len", "packs", "steps", "prefetch_steps", "chaos"])
def test_arguments_of_a_mixture_are_refused_with_a_dataset(key: str) -> None:
    with pytest.raises(TypeError, match=rf"^{key}: is for mixtures .* and this is a Numbers"):
        DataLoader(Numbers(), **{key: 4})


def test_arguments_of_neither_are_refused_as_python_does(tmp_path: Path) -> None:
    for data in (Numbers(), mixture_of(tmp_path)):
        with pytest.raises(TypeError, match="unexpected keyword argument 'bach_size'"):
            DataLoader(data, bach_size=4)


def test_the_declared_arguments_are_the_real_ones() -> None:
    """The overloads that type checkers see have the parameters of the two classes, with their defaults."""
    of_mixture, of_dataset = typing.get_overloads(DataLoader.__new__)
    for declared, real in ((of_mixture, MixtureLoader.__init__), (of_dataset, DatasetLoader.__init__)):
        one, other = (
            list(inspect.signature(function).parameters.values())[1:] for function in (declared, real)
        )
        assert [(p.name, p.kind) for p in one] == [(p.name, p.kind) for p in other]
        for p, q in zip(one, other, strict=True):
            assert p.default in (q.default, ...)
    torch_parameters = list(inspect.signature(torch.utils.data.DataLoader.__init__).parameters.items())
    ours = inspect.signature(DatasetLoader.__init__).parameters
    for name, parameter in torch_parameters:
        assert (ours[name].kind, ours[name].default) == (parameter.kind, parameter.default)


class Doubled(DataLoader[int]):
    """A user's subclass."""

    def __iter__(self) -> Any:
        return (2 * batch for batch in super().__iter__())


def test_a_subclass_is_for_datasets_and_has_the_state() -> None:
    loader = Doubled(Numbers(), 4)
    iterator = iter(loader)
    assert next(iterator).tolist() == [0, 2, 4, 6]
    other = Doubled(Numbers(), 4)
    other.load_state_dict(loader.state_dict())
    assert ids(other)[0] == [8, 10, 12, 14]


def test_a_loader_can_be_copied() -> None:
    loader = DataLoader(Numbers(), 4)
    assert ids(copy.deepcopy(loader)) == ids(loader)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
@pytest.mark.parametrize("dataset", [Numbers, Stream])
def test_a_copy_of_a_loader_goes_on_from_where_it_stood(copied: Any, dataset: Any) -> None:
    def make() -> DataLoader[int]:
        torch.manual_seed(3)
        return DataLoader(dataset(), 4, shuffle=None if dataset is Stream else True)

    loader = make()
    expected = [ids(loader) for _ in range(3)]
    loader = make()
    assert ids(loader) == expected[0]
    assert ids(copied(loader)) == expected[1]
    epoch = iter(loader)
    begun = ids(itertools.islice(epoch, 2))
    other = copied(loader)
    assert begun + ids(other) == expected[1]
    assert begun + ids(epoch) == expected[1]
    assert ids(other) == ids(loader) == expected[2]


class Columns(MutableMapping[str, torch.Tensor]):
    """As a TensorDict: names for keys, and rows by number."""

    def __init__(self) -> None:
        self.rows = torch.arange(8)

    def __getitem__(self, key: Any) -> torch.Tensor:
        return self.rows[key]

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[str]:
        return iter(["rows"])

    def __setitem__(self, key: str, value: object) -> None:
        raise NotImplementedError

    def __delitem__(self, key: str) -> None:
        raise NotImplementedError


class Keyed(dict[Any, int], torch.utils.data.Dataset[int]):
    """A dataset that is a dict."""


@pytest.mark.parametrize("dataset", [dict(enumerate(range(8))), Columns(), Keyed(enumerate(range(8)))])
def test_a_dataset_may_be_a_mapping(dataset: Any) -> None:
    assert ids(DataLoader(dataset, batch_size=4)) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_data_pipe_is_iterated_as_torch_does_and_has_no_state() -> None:
    from torch.utils.data.datapipes.iter import IterableWrapper

    loader = DataLoader(IterableWrapper(range(8)), 4)
    assert ids(loader) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(ValueError, match="DataPipe has no place"):
        loader.state_dict()


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, omniload; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
