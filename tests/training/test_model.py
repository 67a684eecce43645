"""The decoder computes what Llama computes, within documents."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import pytest
import torch
import transformers
from torch import Tensor

import checkpoint
from checkpoint.convert import convert_to_hf
from checkpoint.stored import StoredCheckpoint
from storage import Store
from tests.training.fake_lanes import fake_step
from training.config import ModelConfig
from training.model import CausalLM, attend_within, hf_config

CONFIG = ModelConfig(
    vocab_size=62, hidden_size=24, intermediate_size=50, num_layers=2, num_heads=4, num_kv_heads=2
)


def reference_logits(weights: Mapping[str, Tensor], config: ModelConfig, document: Tensor) -> Tensor:
    """Llama on one document, written with plain tensor algebra after the papers: ``[L]`` ids to ``[L, vocab]``."""

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * weight

    length, head_dim = len(document), config.head_dim
    frequency = 1 / config.rope_theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angle = torch.arange(length).float()[:, None] * frequency  # float32 in every Llama, hence here
    turn = torch.complex(angle.cos(), angle.sin()).to(torch.complex128)

    def rope(x: Tensor) -> Tensor:  # pairs (i, i + head_dim / 2) are complex numbers, turned by the angle
        real, imaginary = x.chunk(2, -1)
        turned = torch.complex(real, imaginary) * turn
        return torch.cat((turned.real, turned.imag), -1)

    x = weights["model.embed_tokens.weight"][document]
    for index in range(config.num_layers):
        layer = {
            name.removeprefix(f"model.layers.{index}."): weight
            for name, weight in weights.items()
            if name.startswith(f"model.layers.{index}.")
        }
        h = norm(x, layer["input_layernorm.weight"])
        heads = []
        for head in range(config.num_heads):
            kv = head // (config.num_heads // config.num_kv_heads)
            rows, kv_rows = (slice(i * head_dim, (i + 1) * head_dim) for i in (head, kv))
            q = rope(h @ layer["self_attn.q_proj.weight"][rows].T)
            k = rope(h @ layer["self_attn.k_proj.weight"][kv_rows].T)
            v = h @ layer["self_attn.v_proj.weight"][kv_rows].T
            scores = q @ k.T / math.sqrt(head_dim)
            scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
            heads.append(scores.softmax(-1) @ v)
        x = x + torch.cat(heads, -1) @ layer["self_attn.o_proj.weight"].T
        h = norm(x, layer["post_attention_layernorm.weight"])
        gate, up = h @ layer["mlp.gate_proj.weight"].T, h @ layer["mlp.up_proj.weight"].T
        x = x + (gate * gate.sigmoid() * up) @ layer["mlp.down_proj.weight"].T
    return norm(x, weights["model.norm.weight"]) @ weights["lm_head.weight"].T


@pytest.fixture
def model() -> CausalLM:
    """A model whose norms are not all ones and whose logits are not all alike."""
    model = CausalLM(CONFIG, torch.float64, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(parameter * 5 + 0.3 * noise)
    return model


def test_packed_documents_match_the_reference_one_by_one(model):
    """Every document of a pack gets the logits it would get alone, to float64 rounding."""
    weights = {name: weight.detach() for name, weight in model.state_dict().items()}
    for lane in fake_step(0):
        logits = model(lane["input_ids"], lane["position_ids"], lane["cu_seqlens"]).detach()
        bounds = lane["cu_seqlens"].tolist()
        assert len(bounds) > 4
        for begin, end in itertools.pairwise(bounds):
            expected = reference_logits(weights, CONFIG, lane["input_ids"].flatten()[begin:end])
            torch.testing.assert_close(logits[begin:end], expected, rtol=1e-11, atol=1e-12)


def test_no_gradient_crosses_a_document(model):
    """The loss of one document depends on nothing of its neighbours: exactly zero, not nearly."""
    lane = fake_step(1)[0]
    bounds = lane["cu_seqlens"].tolist()
    embedded: list[Tensor] = []
    model.model.embed_tokens.register_forward_hook(lambda _module, _inputs, output: embedded.append(output))
    logits = model(lane["input_ids"], lane["position_ids"], lane["cu_seqlens"])
    begin, end = bounds[1], bounds[2]
    (gradient,) = torch.autograd.grad(logits[begin:end].square().sum(), embedded)
    assert (gradient[begin:end] != 0).any()
    assert not gradient[:begin].any()
    assert not gradient[end:].any()


def test_run_boundaries_matter():
    """The check above can fail: one run over everything gives something else."""
    q, k, v = torch.randn(3, 4, 10, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    apart, together = attend_within([4, 6], q, k[:2], v[:2]), attend_within([10], q, k[:2], v[:2])
    torch.testing.assert_close(apart[:, :4], together[:, :4], rtol=1e-13, atol=0)
    assert (apart[:, 5:] - together[:, 5:]).abs().min() > 1e-6


def test_float32_and_float64_start_from_the_same_numbers():
    single = CausalLM(CONFIG, torch.float32, seed=5).state_dict()
    double = CausalLM(CONFIG, torch.float64, seed=5).state_dict()
    assert all(torch.equal(single[name].double(), double[name]) for name in single)


def test_weights_depend_on_seed_and_name_only():
    """Another seed changes every matrix; another depth changes none."""
    weights = CausalLM(CONFIG, torch.float32, seed=5).state_dict()
    reseeded = CausalLM(CONFIG, torch.float32, seed=6).state_dict()
    deeper = CausalLM(CONFIG.model_copy(update={"num_layers": 3}), torch.float32, seed=5).state_dict()
    for name, weight in weights.items():
        assert torch.equal(weight, deeper[name])
        assert weight.ndim == 1 or not torch.equal(weight, reseeded[name])
    matrices = [weight for weight in weights.values() if weight.shape == (24, 24)]
    assert len(matrices) == 4
    assert len({float(weight[0, 0]) for weight in matrices}) == 4


def test_parameter_names_and_shapes_are_those_of_llama():
    shapes = {
        name: tuple(weight.shape) for name, weight in CausalLM(CONFIG, torch.float32, 0).state_dict().items()
    }
    expected = {"model.embed_tokens.weight": (62, 24), "model.norm.weight": (24,), "lm_head.weight": (62, 24)}
    for index in range(2):
        layer = f"model.layers.{index}"
        expected |= {
            f"{layer}.self_attn.q_proj.weight": (24, 24),
            f"{layer}.self_attn.k_proj.weight": (12, 24),
            f"{layer}.self_attn.v_proj.weight": (12, 24),
            f"{layer}.self_attn.o_proj.weight": (24, 24),
            f"{layer}.mlp.gate_proj.weight": (50, 24),
            f"{layer}.mlp.up_proj.weight": (50, 24),
            f"{layer}.mlp.down_proj.weight": (24, 50),
            f"{layer}.input_layernorm.weight": (24,),
            f"{layer}.post_attention_layernorm.weight": (24,),
        }
    assert shapes == expected


def test_tied_model_has_one_embedding():
    model = CausalLM(CONFIG.model_copy(update={"tie_embeddings": True}), torch.float32, 0)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in dict(model.named_parameters())
    assert hf_config(model.config, torch.float32)["tie_word_embeddings"] is True


@pytest.mark.interop
@pytest.mark.parametrize("tied", [False, True])
def test_logits_equal_those_of_transformers(model, tied):
    """Hugging Face's own class, configured by `hf_config` and loaded without renaming, gives the same logits."""
    config = CONFIG.model_copy(update={"tie_embeddings": tied})
    model.config, model.model.config = config, config
    model.float().tie_weights()
    settings = hf_config(config, torch.float32)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
    theirs.load_state_dict(model.state_dict(), strict=True)
    document = torch.randint(0, 62, (1, 30), generator=torch.Generator().manual_seed(0))
    ours = model(document, torch.arange(30)[None], torch.tensor([0, 30]))
    torch.testing.assert_close(ours, theirs(document).logits[0], rtol=1e-4, atol=1e-5)


@pytest.mark.interop
@pytest.mark.parametrize("tied", [False, True])
def test_an_exported_checkpoint_opens_in_transformers(tmp_path, tied):
    """Saved, converted and loaded by ``from_pretrained``: the same logits, and no tensor missing or left over."""
    config = CONFIG.model_copy(update={"tie_embeddings": tied})
    model = CausalLM(config, torch.float32, 0)
    state = {"model": model, "hf_config": hf_config(config, torch.float32)}
    checkpoint.save(tmp_path / "saved", state)
    convert_to_hf(StoredCheckpoint.open(Store(tmp_path / "saved")), Store(tmp_path / "hf"))
    theirs, notes = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", output_loading_info=True, dtype=torch.float32
    )
    assert not any(notes.values()), notes
    document = torch.randint(0, 62, (1, 30), generator=torch.Generator().manual_seed(0))
    ours = model(document, torch.arange(30)[None], torch.tensor([0, 30]))
    torch.testing.assert_close(ours, theirs(document).logits[0], rtol=1e-4, atol=1e-5)
