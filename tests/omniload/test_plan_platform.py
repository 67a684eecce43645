"""Equal input gives equal plans on any platform: whatever the hash seed, numpy's instructions, or the kernels."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest

from omniload.mixture import Mixture
from omniload.planner import Planner, StreamState
from omniload.planner.arrange import WAYS
from omniload.planner.balancing import METHODS
from tests.elsewhere import VECTOR_FEATURES, printed
from tests.omniload.planning import FakeMetadata

SEQ_LEN = 64
MODEL = {
    "backbone": {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "intermediate_size": 704,
        "vocab_size": 1000,
        "sliding_window": 32,
    }
}


def mixtures() -> Iterator[Mixture]:
    """All ways of packing and of balancing, a ramp, a cost model of a decoder, and outliers that wait."""
    ways = [{"packing": way, "balance": "kk"} for way in WAYS]
    ways += [{"balance": method, "cost": MODEL} for method in METHODS]
    for way in ways:
        yield Mixture.load(
            {
                "seq_len": SEQ_LEN,
                "packs": 24,
                "lanes": 6,
                "schedule": [
                    {"tokens": 0, "weights": {"a": 0.7, "b": 0.2, "c": 0.1}},
                    {"tokens": 9000, "ramp": "cosine", "weights": {"a": 0.1, "b": 0.3, "c": 0.6}},
                ],
                "delay": {"thresholds": [50], "max_steps": 2},
                "sources": {
                    name: {"path": "unused", "weight": 1, "on_exhausted": "repeat"} for name in "abc"
                },
                **way,
            }
        )


def plan_hashes() -> list[str]:
    """The hashes of eight plans of each mixture."""
    random = np.random.default_rng(0)
    rows = [[[int(n)] for n in random.integers(1, most, 60)] for most in (90, 20, 64)]
    hashes = []
    for mixture in mixtures():
        planner = Planner(mixture, FakeMetadata(rows, SEQ_LEN), StreamState.initial(3))
        for _ in range(8):
            plan = planner.next()
            assert plan is not None
            hashes.append(plan.hash)
    return hashes


_ELSEWHERE = """
import json, sys
import omniload.kernels
if sys.argv[1] == "python":
    omniload.kernels.KERNELS = None
from tests.omniload.test_plan_platform import plan_hashes
print(json.dumps(plan_hashes()))
"""


@pytest.mark.parametrize(
    ("kernels", "environment"),
    [
        ("compiled", {"PYTHONHASHSEED": "1"}),
        ("python", {"PYTHONHASHSEED": "2"}),
        ("compiled", {"NPY_DISABLE_CPU_FEATURES": VECTOR_FEATURES}),
    ],
)
def test_plans_are_the_same_in_another_process(kernels: str, environment: dict[str, str]) -> None:
    assert json.loads(printed(_ELSEWHERE, kernels, **environment)) == plan_hashes()
