"""State of FSDP2, tensor-parallel and DDP modules on six ranks: saved on one layout, resumed on any other."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from checkpoint.errors import StateError, UnsupportedLayout
from checkpoint.frameworks.state import CapturedState, LocalTensor, capture, finish, targets
from tests.checkpoint.test_state import Memory
from tests.distributed import run_distributed

WORLD = 6
OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, amsgrad=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
}


class Net(nn.Module):
    """Tied ends, an uneven hidden size, a buffer and a parameter without gradient."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(11, 7)
        self.up = nn.Linear(7, 13)
        self.down = nn.Linear(13, 7)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight
        self.idle = nn.Parameter(torch.randn(3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.double()

    def forward(self, tokens):
        self.seen += 1
        hidden = self.embed(tokens)
        return self.head(hidden + self.down(torch.tanh(self.up(hidden))))


def plain(model):
    return model


def fsdp(model):
    mesh = init_device_mesh("cpu", (6,))
    fully_shard(model.up, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp_over_tp(model):
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
    # Told as a local tensor, an uneven hidden state would be taken for an even one.
    plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan, src_data_rank=None)
    return fully_shard(model, mesh=mesh["dp"])


def hsdp(model):
    return fully_shard(model, mesh=init_device_mesh("cpu", (2, 3), mesh_dim_names=("replicate", "shard")))


def ddp(model):
    return DistributedDataParallel(model, find_unused_parameters=True)


LAYOUTS = {
    "plain": plain,
    "fsdp": fsdp,
    "fsdp_over_tp": fsdp_over_tp,
    "hsdp": hsdp,
    "ddp": ddp,
}


def make(layout, optimizer, seed):
    model = LAYOUTS[layout](Net(seed))
    return {
        "model": model,
        "optimizer": OPTIMIZERS[optimizer](model.parameters()),
        "extra": {"layout": layout},
    }


def train(state, steps, seed):
    """The same tokens on every rank, so that averages over ranks are the values themselves."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        tokens = torch.randint(0, 11, (4, 5), generator=generator)
        state["optimizer"].zero_grad()
        nn.functional.cross_entropy(
            state["model"](tokens).flatten(0, 1), tokens.roll(1, 1).flatten()
        ).backward()
        state["optimizer"].step()


def gathered(state):
    """The state of all ranks as one checkpoint in memory."""
    own = capture(state)
    rows = [
        (t.group, t.key, t.dtype, t.shape, t.boxes, [view.clone() for view in t.views]) for t in own.tensors
    ]
    everyone = [None] * WORLD
    dist.all_gather_object(everyone, (rows, own.objects, own.rank_objects))
    captured = []
    for theirs, objects, rank_objects in everyone:
        assert objects == own.objects
        tensors = [
            LocalTensor(
                group=group, key=key, dtype=dtype, shape=shape, boxes=boxes, views=tuple(views), tensor=views
            )
            for group, key, dtype, shape, boxes, views in theirs
        ]
        captured.append(CapturedState(tensors=tensors, objects=objects, rank_objects=rank_objects))
    return Memory(*captured)


def assert_equal(left, right):
    assert left.full.keys() == right.full.keys()
    for name, full in left.full.items():
        assert torch.equal(full, right.full[name]), name
    assert left.objects["optimizer"] == right.objects["optimizer"]


def resume(saved_on, resumed_on, optimizer):
    """Save on one layout, resume on another: the state is the stored one, and so is the next step's."""
    state = make(saved_on, optimizer, seed=1)
    train(state, steps=2, seed=1)
    stored = gathered(state)
    resumed = make(resumed_on, optimizer, seed=2)
    found = targets(resumed, stored).tensors
    assert not resumed["optimizer"].state
    stored.read(found)
    finish(resumed, stored, found)
    assert resumed["extra"] == {"layout": saved_on}
    assert_equal(stored, gathered(resumed))
    if saved_on == resumed_on:
        for mine, theirs in zip(
            state["optimizer"].state.values(), resumed["optimizer"].state.values(), strict=True
        ):
            assert mine.keys() == theirs.keys()
            for key, value in mine.items():
                assert type(value) is type(theirs[key])
                if isinstance(value, DTensor):
                    assert value._spec == theirs[key]._spec
                    assert torch.equal(value.to_local(), theirs[key].to_local())
        train(state, steps=2, seed=2)
        train(resumed, steps=2, seed=2)
        assert_equal(gathered(state), gathered(resumed))
    else:  # the same step on another layout rounds differently
        train(state, steps=2, seed=2)
        train(resumed, steps=2, seed=2)
        left, right = gathered(state), gathered(resumed)
        for name, full in left.full.items():
            torch.testing.assert_close(full, right.full[name], rtol=1e-12, atol=1e-14)
    return stored.keys("model"), stored.keys("optimizer"), stored.objects["model"]["aliases"]


def after_an_evaluation():
    """The root of FSDP keeps full parameters after a forward pass; capture takes the sharded ones."""
    state = make("fsdp", "adamw", seed=1)
    before = gathered(state)
    with torch.no_grad():
        state["model"](torch.zeros(1, 2, dtype=torch.int64))
    unsharded = [name for name, param in state["model"].named_parameters() if not isinstance(param, DTensor)]
    assert unsharded
    after = gathered(state)
    assert before.keys("model") == after.keys("model")
    assert all(torch.equal(full, after.full[name]) for name, full in before.full.items() if name[1] != "seen")


def generators(rank):
    torch.manual_seed(rank)
    stored = gathered({"extra": {}})
    expected = torch.rand(2)
    finish(
        {"extra": {}}, stored, targets({"extra": {}}, stored).tensors, rank_objects=stored.rank_objects[rank]
    )
    assert torch.equal(torch.rand(2), expected)


def refusals():
    model = Net(seed=1)
    early = torch.optim.AdamW(model.parameters())
    fsdp(model)
    with pytest.raises(StateError, match=r"create the optimizer after fully_shard\(\)"):
        capture({"model": model, "optimizer": early})
    state = make("fsdp", "adamw", seed=1)
    weight = state["model"].up.weight
    state["optimizer"].state[weight]["exp_avg"] = torch.zeros_like(weight.to_local())
    if weight.to_local().numel():
        with pytest.raises(
            UnsupportedLayout, match=r"state\.up\.weight\.exp_avg is a plain tensor of the parameter's"
        ):
            capture(state)


def worker(rank, world_size):
    names = [
        resume("fsdp_over_tp", "fsdp_over_tp", "adamw"),
        resume("fsdp_over_tp", "fsdp", "adamw"),
        resume("fsdp", "fsdp_over_tp", "adamw"),
        resume("hsdp", "hsdp", "adamw"),
        resume("hsdp", "plain", "adamw"),
        resume("plain", "ddp", "adamw"),
        resume("ddp", "fsdp_over_tp", "adamw"),
    ]
    momentum = [
        resume("fsdp", "fsdp", "sgd"),
        resume("fsdp", "hsdp", "sgd"),
    ]
    after_an_evaluation()
    generators(rank)
    refusals()
    return names, momentum


@pytest.mark.slow
def test_state_moves_between_layouts_and_resumes_exactly():
    for names, momentum in run_distributed(worker, WORLD, timeout_s=240):
        for model, _, aliases in names + momentum:
            assert model == [
                *("down.bias", "down.weight", "embed.weight", "idle", "seen", "up.bias", "up.weight")
            ]
            assert aliases == {"head.weight": "embed.weight"}
        trained = ["down.bias", "down.weight", "embed.weight", "up.bias", "up.weight"]
        for _, optimizer, _ in names:
            items = ["exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"]
            assert optimizer == [f"state.{name}.{item}" for name in trained for item in items]
        for _, optimizer, _ in momentum:
            assert optimizer == [f"state.{name}.momentum_buffer" for name in trained]
