"""Cost models: which modules they tell of, what identifies them, and which one a mixture means."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from omniload.errors import MixtureError, PlanError
from omniload.planner import costs
from omniload.planner.costs import (
    AttentionCost,
    CalibratedCost,
    CostModel,
    Decoder,
    Encoder,
    FunctionCost,
    MixedCost,
    TokenCost,
    cost_model,
)
from tests.elsewhere import VECTOR_FEATURES, printed

DECODER = Decoder(
    hidden_size=64,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=128,
    vocab_size=1000,
)
IMAGE = Encoder(hidden_size=32, num_hidden_layers=2, intermediate_size=64)
AUDIO = Encoder(hidden_size=16, num_hidden_layers=3, intermediate_size=32, block=50, num_block_layers=3)
UNITS = (np.array([100_000, 7, 0]), np.array([0, 256, 16]), np.array([1500, 0, 3]))


def tokens_and_patches(length: np.ndarray, patches: np.ndarray, frames: np.ndarray) -> np.ndarray:
    return np.stack([length * 3, patches + frames])


def breaks(length: np.ndarray, patches: np.ndarray, frames: np.ndarray) -> np.ndarray:
    raise ZeroDivisionError("two\nlines")


def negative_for_long(length: np.ndarray, patches: np.ndarray, frames: np.ndarray) -> np.ndarray:
    return 50 - length


MODELS: list[CostModel] = [
    AttentionCost(),
    TokenCost(),
    MixedCost(backbone=DECODER),
    MixedCost(backbone=DECODER, image=IMAGE),
    MixedCost(backbone=DECODER, audio=AUDIO),
    MixedCost(backbone=DECODER, image=AUDIO),
    MixedCost(backbone=replace(DECODER, vocab_size=1001), image=IMAGE, audio=AUDIO),
    CalibratedCost(tokens=5),
    CalibratedCost(patches=5),
    FunctionCost(tokens_and_patches),
]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: f"{model.name}-{'-'.join(model.modules)}")
def test_every_model_gives_one_row_of_integers_per_module(model: CostModel) -> None:
    cost = model.cost(*UNITS)
    assert cost.dtype == np.int64
    assert cost.shape == (len(model.modules), 3)
    assert cost.min() >= 0
    assert model.modules[0] == "backbone"
    assert model.cost(*(unit[:0] for unit in UNITS)).shape == (len(model.modules), 0)
    assert (model.cost(*(unit.astype(np.uint32) for unit in UNITS)) == cost).all(), (
        "columns of pieces are uint32"
    )
    # A piece costs the same whatever is planned beside it.
    for i in range(3):
        assert (model.cost(*(unit[i : i + 1] for unit in UNITS))[:, 0] == cost[:, i]).all()


def test_each_module_is_counted_by_its_own_rows() -> None:
    model = MixedCost(backbone=DECODER, image=IMAGE, audio=AUDIO)
    assert model.modules == ("backbone", "image", "audio")
    length, patches, frames = UNITS
    expected = [DECODER.flops(length), IMAGE.flops(patches), AUDIO.flops(frames)]
    assert model.cost(*UNITS).tolist() == [row.tolist() for row in expected]
    assert replace(model, image=None).modules == ("backbone", "audio")


def test_fingerprints_tell_models_apart() -> None:
    assert len({model.fingerprint for model in MODELS}) == len(MODELS)


ANSWERS = """
import hashlib
import numpy as np
from omniload.placing.slicing import choose_slicing
from tests.omniload.test_costs_models import MODELS

digest, rng = hashlib.sha256(), np.random.default_rng(5)
length, patches, frames = np.minimum(rng.zipf(1.5, (3, 5000)), 100_000)
for model in MODELS:
    digest.update(model.fingerprint.encode() + model.cost(length, patches, frames).tobytes())
for cp in (2, 8):
    cut = choose_slicing(np.cumsum(np.append(0, length[:100])), cp)
    digest.update(cut.method.encode() + cut.begin.tobytes() + cut.offsets.tobytes())
print(digest.hexdigest())
"""


def test_costs_and_slices_depend_neither_on_the_hash_seed_nor_on_the_vector_instructions() -> None:
    answers = [
        printed(ANSWERS, PYTHONHASHSEED="0"),
        printed(ANSWERS, PYTHONHASHSEED="1", NPY_DISABLE_CPU_FEATURES=VECTOR_FEATURES),
    ]
    assert len(answers[0]) == 65
    assert answers[0] == answers[1]


def test_a_mixture_names_a_cost_model_or_gives_the_sizes_of_the_model() -> None:
    assert cost_model("attention") == AttentionCost()
    assert cost_model("tokens") == TokenCost()
    assert cost_model(TokenCost()) == TokenCost()
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 1000,
    }
    image = {"embed_dim": 32, "depth": 2, "mlp_ratio": 2}
    assert cost_model({"backbone": sizes, "image": image}) == MixedCost(backbone=DECODER, image=IMAGE)
    here = __name__
    named = cost_model(f"{here}:tokens_and_patches")
    assert named.modules == ("backbone", "image")
    assert named.name == f"{here}:tokens_and_patches"
    assert named.cost(*UNITS).tolist() == [[300_000, 21, 0], [1500, 256, 19]]


@pytest.mark.parametrize(
    ("wanted", "error", "message"),
    [
        ("atention", MixtureError, "'atention' is neither built in .*; did you mean 'attention'"),
        ("nowhere_at_all:cost", MixtureError, "nowhere_at_all:cost cannot be imported"),
        (f"{__name__}:missing", MixtureError, "missing cannot be imported"),
        (":", MixtureError, ": cannot be imported"),
        (".near:cost", MixtureError, "near:cost cannot be imported"),
        (7, MixtureError, "a int is no cost model"),
        (f"{__name__}:breaks", PlanError, "breaks': ZeroDivisionError: two lines"),
        (f"{__name__}:UNITS", MixtureError, "a tuple is no cost model"),
        (len, PlanError, "builtins:len': TypeError"),
        ({}, PlanError, "'backbone' is missing"),
        ({"backbon": {}}, PlanError, "unknown module 'backbon'; did you mean 'backbone'"),
        ({"backbone": {}}, PlanError, "decoder: 'num_hidden_layers' is missing"),
        ({"backbone": "llama"}, PlanError, "decoder: a str is no configuration"),
        (lambda *units: units[0] / 3, PlanError, "piece 0 costs 0.33"),
        (lambda *units: np.ones((4, 1)), PlanError, "tells of 4 modules; there are 3"),
        (lambda *units: np.ones((0, 1)), PlanError, "tells of 0 modules; there are 3"),
        (lambda *units: None, PlanError, r"gave shape \[\] for 1 pieces"),
        (lambda *units: [[1], [2, 3]], PlanError, "ValueError"),
        (AttentionCost, PlanError, "AttentionCost': TypeError"),
    ],
)
def test_what_is_no_cost_model_is_refused_in_one_line(wanted: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        cost_model(wanted)
    assert "\n" not in str(caught.value)


def test_a_function_that_goes_wrong_later_is_refused_then() -> None:
    model = cost_model(negative_for_long)
    with pytest.raises(PlanError, match="negative_for_long': module 0: piece 0 costs -99950"):
        model.cost(*UNITS)


def test_the_public_names_are_sorted_and_there() -> None:
    assert costs.__all__ == sorted(costs.__all__, key=lambda name: (not name.isupper(), name))
    assert all(hasattr(costs, name) for name in costs.__all__)


def test_no_heavy_library_is_loaded() -> None:
    code = "import omniload.planner.costs, sys; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert told.stdout.strip() == "[]"
