"""What goes where: missing and unexpected tensors, element types that differ, and the report of it all."""

from __future__ import annotations

import copy
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


class Counter:
    """A stateful object."""

    count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]


def fresh(path: Path) -> dict[str, Any]:
    """A state of which the checkpoint at a path has the model only."""
    save(path)
    module = zeroed(model())
    return {
        "model": module,
        "optimizer": torch.optim.SGD(module.parameters(), lr=0.5),
        "ema": {"w": torch.full((2,), 7.0), "step": 3},
        "loader": Counter(),
        "empty": {},
    }


@pytest.mark.parametrize(
    "options",
    [
        {"strict": False},
        {"allow_missing": ["ema", "optimizer", "loader", "empty"]},
        {"allow_missing": ["ema/w", "*/step", "optimizer/*", "l*/*", "empty/"]},
    ],
)
def test_groups_that_the_checkpoint_may_lack_stay_and_are_reported(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    state = fresh(tmp_path / "c")
    state["loader"].count = 5
    report = checkpoint.load(tmp_path / "c", state, **options)
    assert report.missing == ("ema", "empty", "loader", "optimizer")
    assert report.matched == ("model/0.bias", "model/0.weight")
    assert state["model"][0].weight.any()
    assert (state["ema"]["w"].tolist(), state["ema"]["step"], state["loader"].count) == ([7.0, 7.0], 3, 5)
    assert state["optimizer"].param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize(
    "allowed", [(), ("ema/w",), ("ema/step",)], ids=["nothing", "its tensor", "its value"]
)
def test_a_group_of_which_something_may_not_be_missing_is_refused_with_the_way_out(
    tmp_path: Path, allowed: tuple[str, ...]
) -> None:
    state = {"ema": fresh(tmp_path / "c")["ema"]}
    with pytest.raises(
        MismatchError, match=r"'ema' is not in .* name it in allow_missing, or pass strict=False"
    ):
        checkpoint.load(tmp_path / "c", state, allow_missing=allowed)


def test_plain_values_that_the_checkpoint_may_lack_stay_and_are_reported(tmp_path: Path) -> None:
    saved: dict[str, Any] = {"a": 1, "deep": [torch.ones(1), {}], "none": None}
    checkpoint.save(tmp_path / "c", {"extra": saved})
    live: dict[str, Any] = {
        "a": 0,
        "b": 2,
        "none": 3,
        "new": {"list": [1, 2], "w": torch.zeros(1), "empty": {}},
        "deep": [torch.zeros(1), {"c": 4}],
    }
    missing = ("extra/b", "extra/deep.1.c", "extra/new.empty", "extra/new.list", "extra/new.w")
    for options in ({"strict": False}, {"allow_missing": missing}, {"allow_missing": ["extra"]}):
        state = copy.deepcopy(live)
        report = checkpoint.load(tmp_path / "c", {"extra": state}, **options)  # type: ignore[arg-type]
        assert report.missing == missing
        assert (state["a"], state["b"], state["none"], state["deep"][1]) == (1, 2, None, {"c": 4})
        assert state["deep"][0].item() == 1.0
        assert state["new"]["list"] == [1, 2]
    for name in missing:
        others = [other for other in missing if other != name]
        with pytest.raises(MismatchError, match=rf"{name}\b.*(?=.*allow_missing)(?=.*strict=False)"):
            checkpoint.load(tmp_path / "c", {"extra": copy.deepcopy(live)}, allow_missing=others)


class WithExtra(nn.Linear):
    """A module with extra state."""

    def get_extra_state(self) -> int:
        return 5

    def set_extra_state(self, state: int) -> None:
        raise AssertionError("there is none")


def test_extra_state_that_the_checkpoint_may_lack_is_left_alone(tmp_path: Path) -> None:
    save(tmp_path / "c")
    live = nn.Sequential(WithExtra(3, 3))
    report = checkpoint.load(tmp_path / "c", {"model": live}, allow_missing=["model/*._extra_state"])
    assert report.missing == ("model/0._extra_state",)


def test_an_untied_tensor_that_the_checkpoint_may_lack_is_left_alone(tmp_path: Path) -> None:
    tied = model(layers=2)
    tied[1].weight = tied[0].weight
    checkpoint.save(tmp_path / "c", {"model": tied})
    untied = zeroed(model(layers=2))
    report = checkpoint.load(tmp_path / "c", {"model": untied}, allow_missing=["model/1.weight"])
    assert report.missing == ("model/1.weight",)
    assert not untied[1].weight.any()
