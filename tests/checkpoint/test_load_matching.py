"""What goes where: missing and unexpected tensors, element types that differ, and the report of it all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import checkpoint
from checkpoint.engine.match import DtypePolicy
from checkpoint.errors import MismatchError


def model(*, layers: int = 1, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Linear(3, 3) for _ in range(layers))).to(dtype)


def save(path: Path, **options: Any) -> nn.Module:
    saved = model(**options)
    checkpoint.save(path, {"model": saved})
    return saved


def zeroed(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
    return module


def test_allowed_missing_tensors_stay_and_are_reported(tmp_path: Path) -> None:
    save(tmp_path / "c")
    longer = zeroed(model(layers=2))
    with pytest.raises(MismatchError, match=r"has no model/1\.bias, model/1\.weight; .* allow_missing"):
        checkpoint.load(tmp_path / "c", {"model": longer}, allow_missing=["model/1.b*s.x"])
    with pytest.raises(MismatchError, match=r"has no model/1\.weight;"):
        checkpoint.load(tmp_path / "c", {"model": longer}, allow_missing=["model/*bias"])
    report = checkpoint.load(tmp_path / "c", {"model": longer}, allow_missing=["model/1.*"])
    assert report.missing == ("model/1.bias", "model/1.weight")
    assert report.matched == ("model/0.bias", "model/0.weight")
    assert report.num_tensors == 2
    assert torch.equal(longer[0].weight, model()[0].weight)
    assert not longer[1].weight.any()


def test_allowed_unexpected_tensors_are_left_out_and_reported(tmp_path: Path) -> None:
    save(tmp_path / "c", layers=2)
    shorter = zeroed(model())
    with pytest.raises(MismatchError, match=r"model/1\.weight have no place .* allow_unexpected"):
        checkpoint.load(tmp_path / "c", {"model": shorter}, allow_unexpected=["model/*.bias"])
    report = checkpoint.load(tmp_path / "c", {"model": shorter}, allow_unexpected=["model"])
    assert report.unexpected == ("model/1.bias", "model/1.weight")
    assert torch.equal(shorter[0].bias, model(layers=2)[0].bias)


@pytest.mark.parametrize(
    ("stored", "live", "policy", "allowed"),
    [
        (torch.float32, torch.float32, "same", True),
        (torch.bfloat16, torch.float32, "same", False),
        (torch.bfloat16, torch.float32, "widen", True),
        (torch.float16, torch.float32, "widen", True),
        (torch.float16, torch.bfloat16, "widen", False),
        (torch.bfloat16, torch.float16, "widen", False),
        (torch.float32, torch.bfloat16, "widen", False),
        (torch.float32, torch.bfloat16, "convert", True),
        (torch.float32, torch.float64, "convert", True),
    ],
)
def test_element_types_change_only_where_the_policy_says_so(
    tmp_path: Path, stored: torch.dtype, live: torch.dtype, policy: DtypePolicy, allowed: bool
) -> None:
    saved = save(tmp_path / "c", dtype=stored)
    target = zeroed(model(dtype=live))
    state = {"model": target}
    if not allowed:
        with pytest.raises(MismatchError, match=rf"model/0\.bias is {live}, stored {stored}.*dtype_policy"):
            checkpoint.load(tmp_path / "c", state, dtype_policy=policy)
        assert not target[0].weight.any()
        return
    report = checkpoint.load(tmp_path / "c", state, dtype_policy=policy)
    assert report.converted == (() if stored == live else report.matched)
    for name, parameter in target.named_parameters():
        # Rounded to nearest once, which is what torch does.
        assert torch.equal(parameter, saved.get_parameter(name).to(live))


def test_whole_numbers_are_never_converted(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "c", {"x": {"a": torch.arange(4)}})
    with pytest.raises(MismatchError, match=r"x/a is torch\.float32, stored torch\.int64"):
        checkpoint.load(tmp_path / "c", {"x": {"a": torch.zeros(4)}}, dtype_policy="convert")


def test_an_unknown_policy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dtype_policy is 'cast': it is one of same, widen, convert"):
        checkpoint.load(tmp_path, {"x": {}}, dtype_policy="cast")  # type: ignore[arg-type]


def test_tensors_that_share_memory_are_refused_where_they_differ_in_the_checkpoint(tmp_path: Path) -> None:
    """Else one would be found damaged while the other is read, or be overwritten by it."""
    weight = torch.arange(3.0)
    checkpoint.save(tmp_path / "equal", {"extra": {"a": weight, "b": weight, "head": weight[:2]}})
    checkpoint.save(tmp_path / "differ", {"extra": {"a": weight, "b": weight + 1, "head": weight[:2]}})
    live = torch.zeros(3)
    shared = {"a": live, "b": live.view(3), "head": live[:2]}
    with pytest.raises(MismatchError, match=r"extra/a and extra/b share memory in the state, but differ"):
        checkpoint.load(tmp_path / "differ", {"extra": shared})
    assert not live.any()
    checkpoint.load(tmp_path / "equal", {"extra": shared})
    assert torch.equal(live, weight)
