"""FSDP1 on four ranks: flat shards are saved as boxes without a collective, and resumed on any other layout.

What a state holds is asked of PyTorch, which gathers it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import checkpoint
from checkpoint.errors import MismatchError, RanksFailed, UnsupportedLayout
from checkpoint.frameworks import fsdp1
from checkpoint.frameworks.state import capture
from tests.distributed import run_distributed

WORLD = 4


class Counting(nn.Linear):
    """A layer with extra state."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]


class Net(nn.Module):
    """Tied ends, sizes that no number of ranks divides, a single element, a buffer, a parameter without gradient."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(11, 7)
        self.up = nn.Linear(7, 13)
        self.down = Counting(13, 7)
        self.cube = nn.Parameter(torch.randn(5, 6, 7))
        self.gain = nn.Linear(1, 1, bias=False)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight
        self.idle = nn.Parameter(torch.randn(10))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens):
        self.seen += 1
        hidden = self.embed(tokens)
        hidden = hidden + self.down(torch.tanh(self.up(hidden))) * self.gain(hidden.new_ones(1, 1))
        return self.head(hidden + self.cube.sum((0, 1)))


def wrapped(**options):
    def wrap(model):
        model.up = wrapped_alone(model.up, **options)
        model.gain = wrapped_alone(model.gain, **options)
        return wrapped_alone(model, **options)

    return wrap


def wrapped_alone(module, **options):
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"), **options)


def fsdp2(model):
    fully_shard(model.up)
    return fully_shard(model)


def hybrid(model):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return wrapped(use_orig_params=False, sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh)(
        model
    )


LAYOUTS = {
    "plain": lambda model: model,
    "fsdp2": fsdp2,
    "flat": wrapped(use_orig_params=False),
    "orig": wrapped(use_orig_params=True),
    "grad_op": wrapped(use_orig_params=True, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP),
    "hybrid": hybrid,
    "no_shard_flat": wrapped(use_orig_params=False, sharding_strategy=ShardingStrategy.NO_SHARD),
    "no_shard_orig": wrapped(use_orig_params=True, sharding_strategy=ShardingStrategy.NO_SHARD),
}
FLATTENS = {"flat", "hybrid", "no_shard_flat"}

OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.0, amsgrad=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
}


def make(layout, optimizer="adamw", seed=1):
    model = LAYOUTS[layout](Net(seed).double())
    return {"model": model, "optimizer": OPTIMIZERS[optimizer](model.parameters())}


def tokens_of(seed):
    return torch.randint(0, 11, (4, 5), generator=torch.Generator().manual_seed(seed))


def train(state, seeds):
    """The same tokens on every rank, so that averages over ranks are the values themselves."""
    for seed in seeds:
        tokens = tokens_of(seed)
        state["optimizer"].zero_grad()
        logits = state["model"](tokens)
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(1, 1).flatten()).backward()
        state["optimizer"].step()


def gathered(state):
    """Full tensors by name, as PyTorch gathers them."""
    model, optimizer = get_state_dict(
        state["model"], state["optimizer"], options=StateDictOptions(full_state_dict=True)
    )
    full = {f"model.{key}": value.clone() for key, value in model.items() if isinstance(value, torch.Tensor)}
    for name, items in optimizer["state"].items():
        full |= {f"optimizer.{name}.{key}": value.clone() for key, value in items.items()}
    return full


class Collectives(TorchDispatchMode):
    """Collects the names of the collectives that are called meanwhile."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented  # what it comes down to is seen
        if "c10d" in func.namespace:
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def silently(call, *args):
    """Call something that must not communicate by collectives."""
    with Collectives() as seen:
        call(*args)
    assert not seen.names


def assert_same(expected, found, resumed_on):
    """Equal; but a parameter without state gains zeros where it becomes part of one that has."""
    gained = found.keys() - expected.keys()
    if resumed_on in FLATTENS and not any(name.startswith("optimizer.idle.") for name in expected):
        assert gained
        assert all(name.startswith("optimizer.idle.") for name in gained)
        assert not any(found[name].any() for name in gained if not name.endswith(".step"))
    else:
        assert not gained
    for name, value in expected.items():
        assert value.dtype == found[name].dtype
        assert torch.equal(value, found[name]), name


def states_of(state):
    optimizer = state["optimizer"]
    return [optimizer.state.get(param, {}) for group in optimizer.param_groups for param in group["params"]]


def resume(root, saved_on, resumed_on, optimizer="adamw", *, warm=False):
    """Save on one layout, resume on another: the state is the stored one, and so is what comes after."""
    state = make(saved_on, optimizer)
    train(state, [1])
    place = root / f"{saved_on}-{resumed_on}-{optimizer}-{warm}"
    silently(checkpoint.save, place, state)
    resumed = make(resumed_on, optimizer, seed=2)
    if warm:
        train(resumed, [3])
        for items in resumed["optimizer"].state.values():
            for value in items.values():
                value += 1
    silently(checkpoint.load, place, resumed)
    assert resumed["model"].down.calls == 1
    if saved_on == resumed_on:  # a rank has state for the same of its parameters
        assert [*map(bool, states_of(state))] == [*map(bool, states_of(resumed))]
    expected = gathered(state)
    if resumed_on == "orig" and not any(name.startswith("optimizer.idle.") for name in expected):
        # PyTorch cannot gather the state of an optimizer that has none for one of the parameters.
        silently(checkpoint.save, place / "again", resumed)
        plain = make("plain", optimizer, seed=3)
        checkpoint.load(place / "again", plain)
        assert_same(expected, gathered(plain), "plain")
    else:
        assert_same(expected, gathered(resumed), resumed_on)
    train(state, [4])
    train(resumed, [4])
    one, other = gathered(state), gathered(resumed)
    for name, value in one.items():
        if saved_on == resumed_on:
            assert torch.equal(value, other[name]), name
        elif not name.startswith("optimizer.idle."):  # another layout rounds differently
            torch.testing.assert_close(value, other[name], rtol=1e-12, atol=1e-14)


class Odd(nn.Module):
    """A module under two names, frozen and ignored ones, a parameter without elements, recomputed activations."""

    def __init__(self, seed, **options):
        super().__init__()
        torch.manual_seed(seed)
        self.first = wrapped_alone(checkpoint_wrapper(nn.Linear(5, 5)), **options)
        self.second = self.first
        self.frozen = wrapped_alone(nn.Linear(5, 5).requires_grad_(False), **options)
        self.ignored = nn.Linear(5, 5)
        self.some, self.nothing = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(0, 3))

    def forward(self, x):
        hidden = self.second(self.first(x)) * self.some.sum() + self.nothing.sum()
        return self.ignored(hidden) + self.frozen(x)


def odd_modules(root):
    """Saved in the background, of a step that is over when the files are written."""
    x = torch.ones(2, 5)
    for saved_on, resumed_on in ((True, False), (False, True)):
        states = []
        for seed, use_orig_params in ((1, saved_on), (2, resumed_on)):
            odd = Odd(seed, use_orig_params=use_orig_params)
            model = wrapped_alone(odd, use_orig_params=use_orig_params, ignored_modules=[odd.ignored])
            states.append({"model": model, "optimizer": torch.optim.AdamW(model.parameters())})
        state, other = states
        for is_last in (False, True):
            if is_last:
                with torch.no_grad():
                    expected = state["model"](x)
                handle = checkpoint.async_save(root / f"odd-{saved_on}", state)
            state["optimizer"].zero_grad()
            state["model"](x).sum().backward()
            state["optimizer"].step()
        handle.result()
        silently(checkpoint.load, root / f"odd-{saved_on}", other)
        with torch.no_grad():
            assert torch.equal(other["model"](x), expected)
            assert not torch.equal(state["model"](x), expected)


def hard_cases():
    """What this rank's shards have in them; a table of ranks x facts must have all."""
    tensors = {
        name: fsdp1.flat_tensors("model", list(make(name)["model"].named_modules()))
        for name in ("flat", "orig", "no_shard_flat")
    }
    held = [(flat, one) for flats in tensors.values() for flat in flats for one in flat.held]
    local = {(t.group, t.key): len(t.boxes) for t in capture(make("flat")).tensors}
    return {
        "absent": sum(not one.part.length for _, one in held),
        "only padding": sum(not any(one.part.length for one in flat.held) for flat in tensors["flat"]),
        "padded": sum(
            flat.memory.numel() > sum(one.part.length for one in flat.held) > 0 for flat in tensors["flat"]
        ),
        "split": sum(one.part.start > 0 for _, one in held),
        "boxes": max(local.values()),
        "gathers": _gathers(),
    }


def _gathers():
    state = make("flat")
    train(state, [1])
    with Collectives() as seen:
        state["model"].state_dict()
    return len(seen.names)


def after_an_evaluation(root):
    """The root keeps its full parameters after a forward pass: neither saved, nor used after a load."""
    for layout in ("flat", "orig"):
        state, other = make(layout), make(layout, seed=2)
        train(state, [1])
        expected = gathered(state)
        with torch.no_grad():
            logits = state["model"](tokens_of(1))
            other["model"](tokens_of(1))
        flat = other["model"]._handle.flat_param
        assert flat._full_param_padded.untyped_storage().size(), "the root was expected to stay whole"
        silently(checkpoint.save, root / f"eval-{layout}", state)
        silently(checkpoint.load, root / f"eval-{layout}", other)
        with torch.no_grad():
            assert torch.equal(other["model"](tokens_of(1)), logits)
        found = gathered(other)
        assert all(torch.equal(expected[name], found[name]) for name in expected if name != "model.seen")


def replaced_memory(root):
    """What an optimizer put in place of a parameter's memory counts, though FSDP1 has not seen it yet."""
    state = make("orig")
    train(state, [1])
    for param in state["model"].parameters():
        param.data = param.data + 1
    silently(checkpoint.save, root / "replaced", state)
    other = make("plain", seed=2)
    checkpoint.load(root / "replaced", other)
    expected = gathered(state)
    assert torch.equal(expected["model.up.weight"], other["model"].up.weight)
    assert torch.equal(expected["model.cube"], other["model"].cube)


def mixed_precision(root):
    """Stored are the parameters in full precision."""
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    states = []
    for seed in (1, 2):
        model = wrapped(use_orig_params=seed == 1, mixed_precision=precision)(Net(seed))
        states.append({"model": model, "optimizer": OPTIMIZERS["sgd"](model.parameters())})
    train(states[0], [1, 2])
    silently(checkpoint.save, root / "mixed", states[0])
    silently(checkpoint.load, root / "mixed", states[1])
    expected, found = gathered(states[0]), gathered(states[1])
    assert expected["model.cube"].dtype == torch.float32
    assert not torch.equal(expected["model.cube"], expected["model.cube"].bfloat16().float())
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def refusals(root):
    state = make("plain", "adamw")
    train(state, [1])
    state["optimizer"].state[state["model"].up.bias]["step"] += 1
    checkpoint.save(root / "steps", state)
    with pytest.raises(
        (MismatchError, RanksFailed), match=r"step of .*same flat parameter.*use_orig_params=True"
    ):
        checkpoint.load(root / "steps", make("flat"))
    checkpoint.load(root / "steps", make("orig"))

    factored = {"model": Net(1)}
    factored["optimizer"] = torch.optim.Adafactor(factored["model"].parameters())
    train(factored, [1])
    checkpoint.save(root / "factored", factored)
    other = {"model": LAYOUTS["orig"](Net(2))}
    other["optimizer"] = torch.optim.Adafactor(other["model"].parameters())
    before = [param.clone() for param in other["model"].parameters()]
    with pytest.raises(MismatchError, match=r"cannot be flattened like its parameter of shape"):
        checkpoint.load(root / "factored", other)
    assert all(map(torch.equal, before, other["model"].parameters()))

    transposed = nn.Linear(6, 8)
    transposed.weight.data = transposed.weight.data.t().contiguous().t()
    with pytest.raises(UnsupportedLayout, match=r"model: weight was not contiguous"):
        capture({"model": wrapped_alone(transposed)})
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallel = parallelize_module(nn.Linear(6, 8), mesh["tp"], ColwiseParallel(), src_data_rank=None)
    over_tp = wrapped_alone(parallel, device_mesh=mesh["dp"], use_orig_params=True)
    with pytest.raises(UnsupportedLayout, match=r"model: weight is a DTensor that FSDP1 flattened"):
        capture({"model": over_tp})
    state = make("orig")
    train(state, [1])
    for items in state["optimizer"].state.values():
        items["exp_avg"] = torch.zeros(3, 3)
    with pytest.raises(UnsupportedLayout, match=r"has shape \[3, 3\]; beside a flattened parameter"):
        capture(state)


def worker(rank, world_size, root):
    root = Path(root)
    resume(root, "flat", "flat")
    resume(root, "orig", "orig")
    resume(root, "flat", "orig", "sgd", warm=True)
    resume(root, "flat", "plain")
    resume(root, "orig", "fsdp2")
    resume(root, "plain", "flat", warm=True)
    resume(root, "fsdp2", "orig", "sgd")
    resume(root, "hybrid", "grad_op")
    resume(root, "grad_op", "no_shard_flat", "sgd")
    resume(root, "no_shard_orig", "hybrid")
    after_an_evaluation(root)
    replaced_memory(root)
    mixed_precision(root)
    odd_modules(root)
    refusals(root)
    return hard_cases()


@pytest.mark.slow
def test_flat_shards_are_saved_without_a_collective_and_resume_on_any_layout(tmp_path):
    facts = run_distributed(worker, WORLD, str(tmp_path), timeout_s=120)
    for name in facts[0]:
        assert sum(one[name] for one in facts) > 0, name
    assert max(one["boxes"] for one in facts) == 5  # of a tensor of three dimensions, there are no more
