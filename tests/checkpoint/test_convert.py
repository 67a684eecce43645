"""Conversion to Hugging Face safetensors, and the other commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner, Result

import checkpoint
from checkpoint.boxes import Box
from checkpoint.cli import app
from storage import Store
from tests.checkpoint.simulation import bits, random_bits, save_simulated


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(one) for one in arguments])


class Tied(nn.Module):
    """A model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    config = {"hidden_size": 4, "torch_dtype": "float32"}
    checkpoint.save(tmp_path / "c", {"model": Tied(), "hf_config": config}, step=3)
    return tmp_path / "c"


def test_every_tensor_bit_for_bit_whatever_the_layout(tmp_path: Path) -> None:
    tensors = {
        "a.weight": random_bits((6, 5), torch.bfloat16, 1),
        "b": random_bits((4,), torch.float8_e4m3fn, 2),
        "c": torch.tensor(3),
        "empty": torch.zeros(0, 2),
    }
    layouts = {
        "a.weight": [[Box((0, 0), (6, 2))], [Box((0, 2), (2, 3)), Box((2, 2), (4, 3))]],
        "b": [[Box((0,), (1,))], [Box((1,), (3,))]],
        "c": [[Box((), ())]] * 2,
        "empty": [[], []],
    }
    save_simulated(Store(tmp_path / "c"), 2, tensors, layouts)
    done = run("convert", tmp_path / "c", tmp_path / "hf")
    assert done.exit_code == 0, done.stderr
    assert [path.name for path in (tmp_path / "hf").iterdir()] == ["model.safetensors"]
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert {key: (value.dtype, value.shape) for key, value in found.items()} == {
        key: (value.dtype, value.shape) for key, value in tensors.items()
    }
    assert all(bits(found[key]) == bits(value) for key, value in tensors.items())


def test_files_of_bounded_size_with_an_index(saved: Path, tmp_path: Path) -> None:
    done = run("convert", saved, tmp_path / "hf", "--max-shard-size", "0.13KB", "--dtype", "float64")
    assert done.exit_code == 0, done.stderr
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    names = sorted(path.name for path in (tmp_path / "hf").glob("*.safetensors"))
    assert names == [f"model-{index:05d}-of-00003.safetensors" for index in (1, 2, 3)]
    found = {}
    for name in names:
        tensors = load_file(tmp_path / "hf" / name)
        assert {key for key, file in index["weight_map"].items() if file == name} == set(tensors)
        found |= tensors
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    assert all(tensor.dtype == torch.float64 for tensor in found.values())
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config == {"hidden_size": 4, "torch_dtype": "float64"}


@pytest.mark.parametrize("tied", [True, False])
def test_tied_parameters_are_written_twice_unless_the_config_ties_them(tmp_path: Path, tied: bool) -> None:
    model = Tied()
    checkpoint.save(tmp_path / "c", {"model": model, "hf_config": {"tie_word_embeddings": tied}})
    assert run("convert", tmp_path / "c", tmp_path / "hf").exit_code == 0
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert ("head.weight" in found) is not tied
    assert torch.equal(found["embed.weight"], model.embed.weight)
    assert tied or torch.equal(found["head.weight"], model.embed.weight)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--group", "nodel"), "no tensors in group 'nodel'; --group is one of model"),
        (("--max-shard-size", "5 bananas"), "'5 bananas' is not a size"),
    ],
)
def test_wrong_options_write_nothing(
    saved: Path, tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    done = run("convert", saved, tmp_path / "hf", *arguments)
    assert done.exit_code == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "hf").exists()


def test_a_destination_that_is_not_empty_is_refused(saved: Path) -> None:
    done = run("convert", saved, saved)
    assert done.exit_code == 2
    assert "is not empty" in done.stderr


def test_damage_found_on_the_way_leaves_nothing(saved: Path, tmp_path: Path) -> None:
    (path,) = saved.glob("data/*/model-*.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    done = run("convert", saved, tmp_path / "hf", "--max-shard-size", "20B")
    assert done.exit_code == 2
    assert "do not match their digest" in done.stderr
    assert [one for one in (tmp_path / "hf").rglob("*") if one.is_file()] == []


def test_ls_shows_what_is_committed(tmp_path: Path) -> None:
    manager = checkpoint.CheckpointManager(tmp_path)
    manager.save(1, {"model": Tied()})
    manager.save(2, {"model": Tied()})
    (tmp_path / "step-00000001" / "manifest.json").unlink()
    done = run("ls", tmp_path)
    assert "step-00000002" in done.stdout
    assert "step-00000001" not in done.stdout
    empty = run("ls", tmp_path / "none")
    assert (empty.exit_code, empty.stderr.count("\n")) == (2, 1)


def test_inspect_shows_tensors_with_shape_dtype_layout_and_size(tmp_path: Path) -> None:
    boxes = [[Box((0, 0), (2, 3)), Box((0, 3), (2, 1))], [Box((2, 0), (2, 3)), Box((2, 3), (2, 1))]]
    save_simulated(Store(tmp_path), 2, {"layers.0.w": torch.ones(4, 4)}, {"layers.0.w": boxes})
    done = run("inspect", tmp_path)
    assert done.exit_code == 0, done.stderr
    assert "w  float32 [4, 4]  64 B  2x2 boxes" in done.stdout
    assert "step 7" in done.stdout


def test_verify_counts_what_it_checked(saved: Path) -> None:
    done = run("verify", saved)
    assert done.exit_code == 0, done.stderr
    assert "3 tensors, 144 B in 1 files verified" in done.stdout
