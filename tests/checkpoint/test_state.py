"""Training state as tensors and objects, and back, in one process."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from checkpoint.boxes import Box, slices_within
from checkpoint.errors import MismatchError, StateError, UnsupportedLayout
from checkpoint.frameworks.rng import derive_rng
from checkpoint.frameworks.state import Leeway, capture, finish, targets


class Memory:
    """A checkpoint held as full tensors, from what each rank captured."""

    def __init__(self, *captured):
        self.objects = copy.deepcopy(captured[0].objects)
        self.rank_objects = [copy.deepcopy(one.rank_objects) for one in captured]
        self.full = {}
        for one in captured:
            for local in one.tensors:
                full = self.full.setdefault(
                    (local.group, local.key), torch.empty(local.shape, dtype=local.dtype)
                )
                for box, view in zip(local.boxes, local.views, strict=True):
                    full[slices_within(box, Box.whole(local.shape))] = view

    @property
    def tensors(self):
        return {name: (full.dtype, tuple(full.shape)) for name, full in self.full.items()}

    def keys(self, group):
        return sorted(key for name, key in self.full if name == group)

    def read(self, found):
        """What the engine does: refuse differences, then copy into the views."""
        assert [(target.group, target.key) for target in found] == sorted(self.full)
        for target in found:
            full = self.full[target.group, target.key]
            assert (target.dtype, target.shape) == (full.dtype, tuple(full.shape))
            for box, view in zip(target.boxes, target.views, strict=True):
                assert tuple(view.shape) == box.lengths
                view.copy_(full[slices_within(box, Box.whole(target.shape))])

    def load(self, state, **leeway):
        found = targets(state, self, Leeway(**leeway)).tensors
        self.read(found)
        finish(state, self, found)


def save(state):
    return Memory(capture(state))


class Net(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.inner = nn.Linear(3, 5)
        self.norm = nn.BatchNorm1d(5)
        self.outer = nn.Linear(5, 2, bias=False)
        self.unused = nn.Parameter(torch.randn(4))
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, x):
        return self.outer(torch.tanh(self.norm(self.inner(x))))


def train(model, optimizer, steps, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(6, 3, generator=generator)).square().sum().backward()
        optimizer.step()


def two_groups(cls, **options):
    def make(model):
        weights = [param for param in model.parameters() if param.ndim > 1]
        rest = [param for param in model.parameters() if param.ndim <= 1]
        return cls([{"params": weights, "weight_decay": 0.1}, {"params": rest, "lr": 0.03}], **options)

    return make


OPTIMIZERS = {
    "adamw": two_groups(torch.optim.AdamW, lr=0.01),
    "adamw-amsgrad": two_groups(torch.optim.AdamW, lr=0.01, amsgrad=True, betas=(0.8, 0.9)),
    "adamw-tensor-lr": lambda model: torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01)),
    "adamw-foreach": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True),
    "adamw-fused": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=True),
    "sgd": two_groups(torch.optim.SGD, lr=0.01),
    "sgd-momentum": two_groups(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True),
    "rmsprop": two_groups(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "adagrad": two_groups(torch.optim.Adagrad, lr=0.01),
    "adafactor": two_groups(torch.optim.Adafactor, lr=0.01),
}


def assert_same_state(left, right):
    """Same parameters, buffers, optimizer state and hyperparameters, to the bit and to the type."""
    for one, other in zip(
        left["model"].state_dict().items(), right["model"].state_dict().items(), strict=True
    ):
        assert one[0] == other[0]
        assert torch.equal(one[1], other[1])
    one, other = left["optimizer"].state_dict(), right["optimizer"].state_dict()
    assert one["param_groups"] == other["param_groups"]
    assert one["state"].keys() == other["state"].keys()
    for index, values in one["state"].items():
        assert values.keys() == other["state"][index].keys()
        for key, value in values.items():
            restored = other["state"][index][key]
            assert type(value) is type(restored)
            if isinstance(value, torch.Tensor):
                assert (value.dtype, value.device) == (restored.dtype, restored.device)
                assert torch.equal(value, restored)
            else:
                assert value == restored


@pytest.mark.parametrize("warm", [False, True], ids=["fresh", "stepped"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_restored_optimizer_steps_exactly_like_the_uninterrupted_one(name, warm):
    model = Net(seed=1)
    state = {"model": model, "optimizer": OPTIMIZERS[name](model)}
    train(model, state["optimizer"], steps=3)
    for group in state["optimizer"].param_groups:  # a schedule's doing
        group["lr"] = group["lr"] * 0.5
    stored = save(state)

    other = Net(seed=2)
    resumed = {"model": other, "optimizer": OPTIMIZERS[name](other)}
    if warm:
        train(other, resumed["optimizer"], steps=1, seed=5)
    stored.load(resumed)
    assert_same_state(state, resumed)
    train(model, state["optimizer"], steps=3, seed=2)
    train(other, resumed["optimizer"], steps=3, seed=2)
    assert_same_state(state, resumed)
    assert id(other.unused) not in {id(param) for param in resumed["optimizer"].state} or name == "adagrad"


def test_finding_targets_changes_nothing_live():
    model = Net(seed=1)
    state = {"model": model, "optimizer": OPTIMIZERS["adamw"](model), "extra": {"step": 1}}
    train(model, state["optimizer"], steps=1)
    stored = save(state)
    other = Net(seed=2)
    resumed = {"model": other, "optimizer": OPTIMIZERS["adamw"](other), "extra": {"step": 0}}
    before = copy.deepcopy(other.state_dict())
    targets(resumed, stored)
    assert not resumed["optimizer"].state
    assert resumed["extra"] == {"step": 0}
    assert all(torch.equal(before[key], value) for key, value in other.state_dict().items())


def test_keys_dtypes_and_boxes_of_a_captured_state():
    model = Net(seed=1)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, steps=1)
    captured = capture({"optimizer": optimizer, "model": model})
    names = [(local.group, local.key) for local in captured.tensors]
    assert names == sorted(names)
    by_name = {(local.group, local.key): local for local in captured.tensors}
    assert ("model", "scratch") not in by_name
    step = by_name["optimizer", "state.inner.weight.step"]
    assert (step.shape, step.boxes, step.views[0].item()) == ((), (Box((), ()),), 1.0)
    moment = by_name["optimizer", "state.inner.weight.exp_avg"]
    assert moment.boxes == (Box((0, 0), (5, 3)),)
    assert moment.views[0].data_ptr() == optimizer.state[model.inner.weight]["exp_avg"].data_ptr()
    assert by_name["model", "norm.num_batches_tracked"].dtype == torch.int64
    assert not [key for group, key in names if group == "optimizer" and "unused" in key]


def test_state_that_the_stored_parameter_had_not_is_dropped():
    model = Net(seed=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    stored = save({"model": model, "optimizer": optimizer})
    train(model, optimizer, steps=1)
    assert optimizer.state
    stored.load({"model": model, "optimizer": optimizer})
    assert not optimizer.state


def test_parameters_are_matched_by_name_whatever_their_order():
    model = Net(seed=1)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, steps=2)
    stored = save({"model": model, "optimizer": optimizer})
    other = Net(seed=2)
    shuffled = torch.optim.AdamW(list(reversed(list(other.parameters()))))
    stored.load({"model": other, "optimizer": shuffled})
    for (name, param), twin in zip(other.named_parameters(), model.parameters(), strict=True):
        if name != "unused":
            assert torch.equal(shuffled.state[param]["exp_avg"], optimizer.state[twin]["exp_avg"])


class Tied(nn.Module):
    def __init__(self, tie=True, head_first=False):
        super().__init__()
        names = ["head", "embed"] if head_first else ["embed", "head"]
        for name in names:
            self.add_module(name, nn.Linear(3, 3, bias=False))
        if tie:
            self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.embed(x))


def test_tied_parameters_are_stored_once_and_their_other_names_recorded():
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, steps=2)
    stored = save({"model": model, "optimizer": optimizer})
    assert stored.keys("model") == ["embed.weight"]
    assert stored.objects["model"]["aliases"] == {"head.weight": "embed.weight"}
    # The other module meets the names in another order.
    other = Tied(head_first=True)
    resumed = torch.optim.AdamW(other.parameters())
    stored.load({"model": other, "optimizer": resumed})
    assert other.head.weight is other.embed.weight
    assert torch.equal(other.head.weight, model.embed.weight)
    train(model, optimizer, steps=2)
    train(other, resumed, steps=2)
    assert torch.equal(other.head.weight, model.embed.weight)


def test_an_untied_module_refuses_weights_that_are_stored_tied():
    stored = save({"model": Tied()})
    with pytest.raises(MismatchError, match=r"model: head.weight is tied to embed.weight .* tie them"):
        targets({"model": Tied(tie=False)}, stored)


def test_wrappers_leave_no_trace_in_names():
    plain = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    expected = save({"model": plain}).keys("model")
    wrapped = torch.compile(
        nn.Sequential(torch.compile(nn.Linear(2, 2)), checkpoint_wrapper(nn.Sequential(nn.Linear(2, 2))))
    )
    assert save({"model": wrapped}).keys("model") == expected
    save({"model": plain}).load({"model": wrapped})
    assert torch.equal(plain[1][0].weight, wrapped.get_submodule("_orig_mod.1.0").weight)


def test_a_child_that_is_called_module_keeps_its_name():
    model = nn.Sequential()
    model.add_module("module", nn.Linear(2, 2, bias=False))
    assert save({"model": model}).keys("model") == ["module.weight"]


def test_parameters_of_several_modules_carry_the_module():
    actor, critic = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD([*actor.parameters(), *critic.parameters()], lr=0.1, momentum=0.9)
    (actor(torch.ones(2)) + 2 * critic(torch.ones(2))).sum().backward()
    optimizer.step()
    state = {"actor": actor, "critic": critic, "optimizer": optimizer}
    stored = save(state)
    assert stored.keys("optimizer") == [
        "state.actor.weight.momentum_buffer",
        "state.critic.weight.momentum_buffer",
    ]
    optimizer.state.clear()
    stored.load(state)
    assert optimizer.state[critic.weight]["momentum_buffer"].tolist() == [[2.0, 2.0]]


class Counted(nn.Linear):
    """A module with extra state."""

    calls = 0

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]


def test_extra_state_of_modules_is_restored():
    model, other = nn.Sequential(Counted(2, 2)), nn.Sequential(Counted(2, 2))
    model[0].calls = 7
    save({"model": model}).load({"model": other})
    assert other[0].calls == 7
    with pytest.raises(MismatchError, match=r"'model/0\._extra_state' is not in the checkpoint"):
        targets({"model": other}, save({"model": nn.Sequential(nn.Linear(2, 2))}))


def test_a_tree_is_loaded_in_place():
    def tree(fill):
        weights = [torch.full((2,), fill), {"deep": torch.full((), fill)}]
        return {
            "w": weights,
            "step": int(fill),
            "pair": (int(fill), "x"),
            "log": [1] * int(fill),
            5: {"none": None},
        }

    live = tree(1.0)
    tensor, log = live["w"][0], live["log"]
    saved = tree(3.0) | {"added": [1, {"b": b"\x00"}]}
    stored = save({"extra": saved})
    assert stored.keys("extra") == ["w.0", "w.1.deep"]
    assert stored.objects["extra"]["value"] == {
        "w": [None, {}],
        "step": 3,
        "pair": (3, "x"),
        "log": [1, 1, 1],
        5: {"none": None},
        "added": [1, {"b": b"\x00"}],
    }
    stored.load({"extra": live})
    assert live["w"][0] is tensor
    assert tensor.tolist() == [3.0, 3.0]
    assert live["w"][1]["deep"].item() == 3.0
    assert live["log"] is log
    assert {key: value for key, value in live.items() if key != "w"} == {
        key: value for key, value in saved.items() if key != "w"
    }


def test_a_tensor_hyperparameter_needs_no_live_tensor():
    model = nn.Linear(2, 2)
    stored = save({"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=torch.tensor(0.25))})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stored.load({"model": model, "optimizer": optimizer})
    assert torch.equal(optimizer.param_groups[0]["lr"], torch.tensor(0.25))


class Counter:
    """A stateful object that refuses negative counts."""

    def __init__(self, count):
        self.count = count

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state_dict):
        if state_dict["count"] < 0:
            raise ValueError("negative")
        self.count = state_dict["count"]


def test_a_stateful_object_that_refuses_leaves_the_others_as_they_were():
    stored = save({"a": Counter(5), "b": Counter(-1), "extra": {"step": 9}})
    live = {"a": Counter(1), "b": Counter(2), "extra": {"step": 0}}
    with pytest.raises(ValueError, match="negative"):
        stored.load(live)
    assert (live["a"].count, live["b"].count, live["extra"]) == (1, 2, {"step": 0})


def test_captured_objects_are_private_copies():
    extra = {"log": [1]}
    captured = capture({"extra": extra})
    extra["log"].append(2)
    assert captured.objects["extra"]["value"] == {"log": [1]}


def draws():
    return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(3).tolist()


def test_random_generators_continue_where_they_were():
    random.gauss(0, 1)  # leaves a second value cached, as randn does
    np.random.randn()
    stored = save({"extra": {}})
    expected = draws()
    found = targets({"extra": {}}, stored).tensors
    finish({"extra": {}}, stored, found, rank_objects=stored.rank_objects[0])
    assert draws() == expected
    finish({"extra": {}}, stored, found)
    assert draws() != expected


def test_derived_generators_differ_by_rank_and_step_and_repeat():
    seen = []
    for place in [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)]:
        derive_rng(*place)
        first = draws()
        derive_rng(*place)
        assert draws() == first
        seen.append(str(first))
    assert len(set(seen)) == 4


def hooked():
    model = nn.Linear(2, 2)
    model.register_state_dict_post_hook(
        lambda module, state, prefix, meta: state.update(weight=state["weight"] * 1)
    )
    return model


def foreign_optimizer():
    return {"model": nn.Linear(2, 2), "optimizer": torch.optim.SGD(nn.Linear(2, 2).parameters())}


def dotted_state():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state[model.weight]["a.b"] = torch.zeros(1)
    return {"model": model, "optimizer": optimizer}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            {"step": 3},
            r'step: a int cannot be loaded in place; put it in a dict, e.g. {"extra": {"step": ...}}',
        ),
        ({"w": torch.zeros(2)}, "w: a Tensor cannot be loaded in place"),
        ({"extra": {"a": {"b": {1, 2}}}}, r"extra\.a\.b: cannot save a set here"),
        ({"extra": {"a.b": torch.zeros(1), "a": {"b": torch.zeros(1)}}}, "two tensors are called 'a.b'"),
        ({"loader": Counter(torch.zeros(1))}, "loader.count: cannot save a Tensor here"),
        ({"model": hooked()}, "state_dict.* gives 'weight' as a Tensor that is not a parameter"),
        ({"model": nn.LazyLinear(2)}, "model: weight has no shape yet"),
        ({"model": nn.Linear(2, 2, device="meta")}, "model: weight: is on the meta device"),
        (foreign_optimizer(), r"optimizer: parameter 0 of group 0 \(shape \[2, 2\]\) is in no module"),
        ({"optimizer": foreign_optimizer()["optimizer"]}, "add the module"),
        (dotted_state(), "state 'a.b' of weight must be a name without a dot"),
    ],
)
def test_what_cannot_be_saved_is_refused_by_name(state, message):
    with pytest.raises(StateError, match=message):
        capture(state)


def optimized(cls=torch.optim.SGD, groups=None):
    model = nn.Linear(2, 2)
    return {"model": model, "optimizer": cls([model.weight, model.bias] if groups is None else groups(model))}


@pytest.mark.parametrize(
    ("saved", "live", "message"),
    [
        (optimized(), optimized(torch.optim.AdamW), "holds the state of SGD, the optimizer is AdamW"),
        (
            optimized(),
            optimized(groups=lambda m: [{"params": [m.weight]}, {"params": [m.bias]}]),
            "2 parameter groups, 1 in the checkpoint",
        ),
        (optimized(), optimized(groups=lambda m: [m.weight]), "bias of group 0 is only in the checkpoint"),
        (optimized(groups=lambda m: [m.weight]), optimized(), "bias of group 0 is not in the checkpoint"),
        (
            {"a": {}},
            {"b": {}},
            "'b' is not in the checkpoint, which holds a; .* allow_missing, or pass strict=False",
        ),
        ({"a": {}}, {"a": Counter(1)}, "'a' is a stateful in the state but a tree in the checkpoint"),
        (
            {"a": {"x": 1}},
            {"a": {"y": {"z": 1}}},
            r"'a/y\.z' is not in the checkpoint; .* allow_missing, or pass strict=False",
        ),
        ({"a": {"x": 1}}, {"a": {"x": {"z": 1}}}, r"a\.x: the state has a dict here, the checkpoint int"),
        ({"a": {"x": {}}}, {"a": {"x": [1]}}, r"a\.x: the state has a list here, the checkpoint dict"),
        (
            {"a": {"x": [torch.zeros(1)]}},
            {"a": {"x": [torch.zeros(1), 1]}},
            r"a\.x: 2 items in the state, 1 in the checkpoint",
        ),
    ],
)
def test_objects_that_do_not_fit_are_refused_by_name(saved, live, message):
    stored = save(saved)
    with pytest.raises(MismatchError, match=message):
        targets(live, stored)


def test_without_strictness_what_fits_is_loaded():
    stored = save({"a": {"x": 1}})
    live = {"a": {"x": 0, "y": 2}}
    stored.load(live, strict=False)
    assert live == {"a": {"x": 1, "y": 2}}


def test_wrapper_tensors_are_refused_by_name():
    class Wrapped(torch.Tensor):
        def __tensor_flatten__(self):
            return [], None

        @classmethod
        def __tensor_unflatten__(cls, *args):
            raise NotImplementedError

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    with pytest.raises(UnsupportedLayout, match="extra: w: tensor subclass Wrapped"):
        capture({"extra": {"w": torch.zeros(2).as_subclass(Wrapped)}})
