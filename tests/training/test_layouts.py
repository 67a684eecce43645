"""The trajectory of a run does not depend on the mesh."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.distributed import run_distributed
from tests.training.fake_lanes import fake_step
from training.config import ModelConfig, OptimizerConfig
from training.digests import tensor_digests
from training.errors import LayoutError
from training.model import CausalLM
from training.optim import build_optimizer, clip_gradients, learning_rate
from training.parallel import build_mesh, parallelise, process_group
from training.step import backward, train_step

# Sizes that the dp axis cannot cut evenly: 25 feed-forward rows on 2 and 4 ranks, 31 or 62 vocabulary rows on 4.
UNTIED = ModelConfig(
    vocab_size=62, hidden_size=24, intermediate_size=50, num_layers=2, num_heads=4, num_kv_heads=2
)
TIED = UNTIED.model_copy(update={"tie_embeddings": True})
OPTIMIZER = OptimizerConfig(lr=3e-3, warmup_steps=2, clip_norm=0.1)

CASES = {
    "float64": (UNTIED, torch.float64, 6),
    "float64 tied": (TIED, torch.float64, 3),
    "float32": (UNTIED, torch.float32, 40),
}
FLOAT64 = ("float64", "float64 tied")


def _full(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _run(tp: int, case: str) -> dict[str, Any]:
    config, dtype, num_steps = CASES[case]
    mesh = build_mesh(tp, config)
    model = CausalLM(config, dtype, seed=7)
    parallelise(model, mesh)
    optimizer = build_optimizer(model, OPTIMIZER)
    initial = tensor_digests(model)
    dp_rank, dp_size = mesh.get_local_rank("dp"), mesh["dp"].size()
    results = [
        train_step(
            model,
            optimizer,
            fake_step(step)[dp_rank::dp_size],
            mesh,
            lr=learning_rate(step, num_steps, OPTIMIZER),
            clip_norm=OPTIMIZER.clip_norm,
            stop=step == num_steps - 1 and dist.get_rank() == dist.get_world_size() - 1,
        )
        for step in range(num_steps)
    ]
    return {
        "initial": initial,
        "loss": [result.loss for result in results],
        "grad_norm": [result.grad_norm for result in results],
        "tokens": [result.tokens for result in results],
        "stop": [result.stop for result in results],
        "weights": {name: _full(tensor).numpy() for name, tensor in model.state_dict(keep_vars=True).items()},
        "kinds": sorted(
            {
                str(p.device_mesh.mesh_dim_names) if isinstance(p, DTensor) else "plain"
                for p in model.parameters()
            }
        ),
    }


def _check_clipping(tp: int) -> None:
    """One backward; then the norm and the clipped gradients must be those of the full gradients."""
    mesh = build_mesh(tp, UNTIED)
    model = CausalLM(UNTIED, torch.float64, seed=7)
    parallelise(model, mesh)
    dp_rank, dp_size = mesh.get_local_rank("dp"), mesh["dp"].size()
    backward(model, fake_step(0)[dp_rank::dp_size])
    before = {name: _full(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
    expected = float(torch.cat([gradient.flatten() for gradient in before.values()]).norm())
    for max_norm in (expected * 2, expected / 3):
        norm = clip_gradients(model.parameters(), max_norm)
        assert norm == pytest.approx(expected, rel=1e-13)
        scale = min(1.0, max_norm / norm)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(_full(parameter.grad), before[name] * scale, rtol=1e-13, atol=0)


def _run_all(
    rank: int, world_size: int, runs: list[tuple[int, str]]
) -> dict[tuple[int, str], dict[str, Any]]:
    for tp in sorted({tp for tp, _ in runs}):
        _check_clipping(tp)
    with pytest.raises(
        LayoutError, match=rf"parallel\.tp: {world_size} does not divide model\.vocab_size: 61"
    ):
        build_mesh(
            world_size,
            UNTIED.model_copy(update={"vocab_size": 61, "num_kv_heads": 4, "intermediate_size": 8}),
        )
    return {(tp, case): _run(tp, case) for tp, case in runs}


@pytest.fixture(scope="module")
def alone() -> Iterator[dict[str, dict[str, Any]]]:
    """Every case in one process, without any parallelism."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with process_group(60):
        _check_clipping(1)
        yield {case: _run(1, case) for case in CASES}
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def together() -> dict[tuple[int, int, str], list[dict[str, Any]]]:
    """Runs on several ranks: ``(dp, tp, case)`` to the results by rank."""
    found = {}
    four = [(tp, case) for tp in (2, 1) for case in FLOAT64] + [(2, "float32")]
    for world_size, runs in ((4, four), (2, [(2, case) for case in FLOAT64])):
        by_rank = run_distributed(_run_all, world_size, runs)
        for tp, case in runs:
            found[world_size // tp, tp, case] = [results[tp, case] for results in by_rank]
    return found


pytestmark = pytest.mark.slow

LAYOUTS = pytest.mark.parametrize(("dp", "tp"), [(2, 2), (4, 1), (1, 2)])
RUNS = pytest.mark.parametrize(
    ("dp", "tp", "case"),
    [(dp, tp, case) for dp, tp in ((2, 2), (4, 1), (1, 2)) for case in FLOAT64] + [(2, 2, "float32")],
)


@pytest.mark.parametrize("case", FLOAT64)
@LAYOUTS
def test_float64_runs_agree_to_rounding(alone, together, dp, tp, case):
    """Loss and gradient norm within 1e-12 of one process over six steps, while clipping is active."""
    for result in together[dp, tp, case]:
        assert result["loss"] == pytest.approx(alone[case]["loss"], rel=1e-12)
        assert result["grad_norm"] == pytest.approx(alone[case]["grad_norm"], rel=1e-11)
        for name, weight in alone[case]["weights"].items():
            torch.testing.assert_close(
                torch.from_numpy(result["weights"][name]), torch.from_numpy(weight), rtol=1e-9, atol=1e-12
            )
    assert min(alone[case]["grad_norm"]) > OPTIMIZER.clip_norm


def test_float32_runs_agree_over_forty_steps(alone, together):
    """Loss within 1e-5 of one process, every step clipped, and no two steps alike."""
    expected = alone["float32"]
    for result in together[2, 2, "float32"]:
        assert result["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert min(expected["grad_norm"]) > OPTIMIZER.clip_norm
    assert len(set(expected["loss"])) == 40


@RUNS
def test_initial_weights_are_the_same_bits(alone, together, dp, tp, case):
    for result in together[dp, tp, case]:
        assert result["initial"] == alone[case]["initial"]


@RUNS
def test_ranks_report_the_same_step(together, dp, tp, case):
    """Loss, norm, token count and the wish to stop of one rank reach all, bit for bit."""
    results = together[dp, tp, case]
    num_steps = CASES[case][2]
    for result in results:
        for key in ("loss", "grad_norm", "tokens", "stop"):
            assert result[key] == results[0][key]
    assert results[0]["stop"] == [False] * (num_steps - 1) + [True]
    for step, tokens in enumerate(results[0]["tokens"]):
        assert tokens == sum(int(lane["segment_ids"].count_nonzero()) for lane in fake_step(step))


def test_meshes_were_mixed(together):
    """What the tests above claim about clipping holds for gradients on two different meshes at once."""
    assert together[2, 2, "float64"][0]["kinds"] == ["('dp', 'tp')", "('dp',)"]
    assert together[1, 2, "float64"][0]["kinds"] == ["('tp',)", "plain"]
