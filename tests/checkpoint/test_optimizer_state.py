"""State of optimizers that is not a tensor of a parameter, or that ``optimizer.state`` does not show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.optim import SGD, Adafactor, AdamW, NAdam, Optimizer

import checkpoint
from checkpoint.engine.match import DtypePolicy
from checkpoint.errors import StateError
from checkpoint.frameworks.state import capture
from tests.distributed import run_distributed


class Counting(SGD):
    """Keeps state of its own beside that of the parameters."""

    def step(self, closure: Any = None) -> Any:
        self.state["calls"] = self.state.get("calls", 0) + 1
        self.state[3] = {"seen": [self.state["calls"]]}
        return super().step(closure)


class Wrapper(Optimizer):
    """Looks like the optimizer that it wraps, as that of Accelerate does."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner

    @property
    def state(self) -> Any:
        return self.inner.state

    @property
    def param_groups(self) -> Any:
        return self.inner.param_groups

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict)


class Container(SGD):
    """Several optimizers in one, each with its own state."""

    def __init__(self, model: nn.Linear) -> None:
        super().__init__(model.parameters())
        self.optimizers = [AdamW([model.weight]), AdamW([model.bias])]

    def state_dict(self) -> Any:
        return {"state": [one.state_dict() for one in self.optimizers]}


class Flat(SGD):
    """Keeps its state in attributes."""

    def state_dict(self) -> Any:
        return {"state": {0: {"moment": 1.0}}, "param_groups": []}


def with_steps(optimizer: Optimizer, model: nn.Module, steps: int = 1) -> dict[str, Any]:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


def test_state_that_belongs_to_no_parameter_is_restored(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = Counting(model.parameters(), momentum=0.9)
    checkpoint.save(tmp_path / "c", with_steps(optimizer, model, steps=2))
    resumed = Counting(model.parameters(), momentum=0.9)
    checkpoint.load(tmp_path / "c", {"model": model, "optimizer": resumed})
    assert (resumed.state["calls"], resumed.state[3]) == (2, {"seen": [2]})


def test_state_that_belongs_to_no_parameter_goes_if_the_stored_optimizer_had_none(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = Counting(model.parameters())
    checkpoint.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    checkpoint.load(tmp_path / "c", with_steps(optimizer, model))
    assert not optimizer.state


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("k", torch.zeros(1), r"optimizer\.state\['k'\]: cannot save a Tensor here"),
        ("k", {"deep": {1, 2}}, r"optimizer\.state\['k'\]\.deep: cannot save a set here"),
        (
            frozenset({1}),
            1,
            r"optimizer\.state\[frozenset\(\{1\}\)\] \(its key\): cannot save a frozenset here",
        ),
        (torch.zeros(3), {}, r"optimizer: there is state of a tensor of shape \[3\] that is in no parameter"),
    ],
)
def test_state_that_could_not_be_restored_is_refused_by_its_key(
    key: Any, value: object, message: str
) -> None:
    model = nn.Linear(2, 2)
    optimizer = SGD(model.parameters())
    optimizer.state[key] = value
    with pytest.raises(StateError, match=message):
        capture({"model": model, "optimizer": optimizer})


def test_a_wrapper_that_shares_the_state_of_its_optimizer_is_saved_and_loaded(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    state = with_steps(AdamW(model.parameters()), model)
    checkpoint.save(tmp_path / "c", {"model": model, "optimizer": Wrapper(Wrapper(state["optimizer"]))})
    inner = AdamW(model.parameters())
    checkpoint.load(tmp_path / "c", {"model": model, "optimizer": Wrapper(inner)})
    assert inner.state[model.weight]["step"] == 1.0


def test_an_optimizer_whose_state_is_in_others_is_refused() -> None:
    model = nn.Linear(2, 2)
    for optimizer in (Container(model), Wrapper(Container(model))):
        with pytest.raises(StateError, match="Container keeps state in another optimizer, its 'optimizers'"):
            capture({"model": model, "optimizer": optimizer})


def test_an_optimizer_whose_state_dict_holds_what_its_state_does_not_is_refused() -> None:
    model = nn.Linear(2, 2)
    averaging = PostLocalSGDOptimizer(
        SGD(model.parameters()), PeriodicModelAverager(period=2, process_group=1)
    )
    for optimizer, key in ((Flat(model.parameters()), "state"), (averaging, "step")):
        with pytest.raises(StateError, match=rf"{type(optimizer).__name__}\.state_dict\(\) gives '{key}'"):
            capture({"model": model, "optimizer": optimizer})


def refused_zero(rank: int, world_size: int) -> str:
    model = nn.Linear(2, 2)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=AdamW)
    state = with_steps(optimizer, model)
    with pytest.raises(StateError) as raised:
        capture(state)
    return str(raised.value)


def test_the_state_that_zero_redundancy_optimizer_shards_is_refused_with_what_to_do() -> None:
    for message in run_distributed(refused_zero, 2):
        assert "ZeroRedundancyOptimizer keeps state in another optimizer, its 'optim'" in message
        assert "fully_shard" in message
        assert "flat_shards()" in message


def stepped(cls: type[Optimizer], dtype: torch.dtype, steps: int = 1) -> dict[str, Any]:
    model = nn.Linear(2, 2, dtype=dtype)
    optimizer = cls(model.parameters())  # type: ignore[call-arg]
    for _ in range(steps):
        model(torch.ones(1, 2, dtype=dtype)).sum().backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


@pytest.mark.parametrize("cls", [AdamW, NAdam, Adafactor])
@pytest.mark.parametrize(
    ("stored", "live", "policy"),
    [
        (torch.float32, torch.bfloat16, "convert"),
        (torch.bfloat16, torch.float32, "convert"),
        (torch.bfloat16, torch.float32, "widen"),
    ],
)
def test_new_state_is_converted_as_torch_does_where_the_policy_allows_it(
    tmp_path: Path, cls: type[Optimizer], stored: torch.dtype, live: torch.dtype, policy: DtypePolicy
) -> None:
    saved = stepped(cls, stored)
    checkpoint.save(tmp_path / "c", saved)
    resumed = stepped(cls, live, steps=0)
    report = checkpoint.load(tmp_path / "c", resumed, dtype_policy=policy)
    expected = cls(nn.Linear(2, 2, dtype=live).parameters())  # type: ignore[call-arg]
    expected.load_state_dict(saved["optimizer"].state_dict())
    for one, other in zip(resumed["optimizer"].state.values(), expected.state.values(), strict=True):
        for key, value in one.items():
            if value.ndim:
                assert value.dtype == live
                assert torch.equal(value, other[key])
                assert any(name.endswith(f".{key}") for name in report.converted)
            else:  # torch rounds `mu_product` of NAdam, too, which new optimizers have as float32
                assert value.dtype == torch.float32
    resumed["model"](torch.ones(1, 2, dtype=live)).sum().backward()
    resumed["optimizer"].step()


def test_new_state_keeps_the_stored_type_where_the_policy_allows_no_other(tmp_path: Path) -> None:
    saved = stepped(AdamW, torch.bfloat16)
    for state in saved["optimizer"].state.values():
        state["exp_avg"] = state["exp_avg"].float()
    checkpoint.save(tmp_path / "c", saved)
    for policy in ("same", "widen"):
        resumed = stepped(AdamW, torch.bfloat16, steps=0)
        report = checkpoint.load(tmp_path / "c", resumed, dtype_policy=policy)  # type: ignore[arg-type]
        assert not report.converted
        assert resumed["optimizer"].state[resumed["model"].weight]["exp_avg"].dtype == torch.float32


def grouped(model: nn.Linear, *groups: tuple[list[str], float]) -> AdamW:
    """An optimizer whose groups have these parameters and this learning rate, as a tensor, and weight decay."""
    named = dict(model.named_parameters())
    return AdamW(
        [
            {"params": [named[name] for name in names], "lr": torch.tensor(rate), "weight_decay": rate}
            for names, rate in groups
        ]
    )


def rates(optimizer: AdamW) -> list[tuple[float, float]]:
    return [(round(float(one["lr"]), 3), one["weight_decay"]) for one in optimizer.param_groups]


@pytest.mark.parametrize(
    ("saved", "live", "expected"),
    [
        ([(["weight"], 0.1), (["bias"], 0.2)], [(["bias"], 0.5), (["weight"], 0.5)], [0.2, 0.1]),
        ([(["weight", "bias"], 0.1)], [(["bias"], 0.5), (["weight"], 0.6)], [0.1, 0.1]),
        ([(["weight"], 0.1), (["bias"], 0.2)], [(["bias", "weight"], 0.5)], [0.2]),
        ([(["weight"], 0.1)], [(["bias"], 0.5), (["weight"], 0.6)], [0.5, 0.1]),
    ],
    ids=["reordered", "split", "joined", "new"],
)
def test_hyperparameters_go_to_the_groups_of_their_parameters(
    saved: Any, live: Any, expected: list[float], tmp_path: Path
) -> None:
    model = nn.Linear(2, 2)
    checkpoint.save(tmp_path / "c", with_steps(grouped(model, *saved), model))
    optimizer = grouped(model, *live)
    held = [group["lr"] for group in optimizer.param_groups]
    checkpoint.load(tmp_path / "c", {"model": model, "optimizer": optimizer}, strict=False)
    assert rates(optimizer) == [(rate, rate) for rate in expected]
    for group, rate in zip(optimizer.param_groups, held, strict=True):
        assert group["lr"] is rate, "filled in place"
