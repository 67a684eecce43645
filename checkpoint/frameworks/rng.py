"""The random number generators of this process: Python's, NumPy's global one and PyTorch's on CPU and GPUs."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def capture_rng() -> dict[str, object]:
    """The state of the generators as plain values; words are little-endian uint32.

    Those of GPUs only if this process uses one already: asking would make it use one.
    """
    cuda = torch.cuda.get_rng_state_all() if _uses_gpu() else []
    version, words, gauss = random.getstate()
    legacy = np.random.get_state(legacy=False)
    assert isinstance(legacy, dict)
    return {
        "python": {"version": version, "words": np.array(words, "<u4").tobytes(), "gauss": gauss},
        "numpy": {
            "words": legacy["state"]["key"].astype("<u4").tobytes(),
            "pos": int(legacy["state"]["pos"]),
            "has_gauss": int(legacy["has_gauss"]),
            "gauss": float(legacy["gauss"]),
        },
        "torch": torch.get_rng_state().numpy().tobytes(),
        "cuda": [state.numpy().tobytes() for state in cuda],
    }


def restore_rng(stored: Mapping[str, Any]) -> None:
    """Continue the generators where :func:`capture_rng` found them; of GPUs, those that are here."""
    python, numpy = stored["python"], stored["numpy"]
    words = tuple(np.frombuffer(python["words"], "<u4").tolist())
    random.setstate((python["version"], words, python["gauss"]))
    key = np.frombuffer(numpy["words"], "<u4").astype(np.uint32)
    np.random.set_state(("MT19937", key, numpy["pos"], numpy["has_gauss"], numpy["gauss"]))
    torch.set_rng_state(torch.frombuffer(bytearray(stored["torch"]), dtype=torch.uint8))
    for device, state in zip(range(torch.cuda.device_count()), stored.get("cuda", ()), strict=False):
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8), device)


def derive_rng(seed: int, step: int, rank: int) -> None:
    """Seed the generators from (seed, step, rank), where no stored state belongs to this rank.

    Streams of different ranks and steps are independent (NumPy's ``SeedSequence``).
    """
    for_python, for_numpy, for_torch = np.random.SeedSequence([seed, step, rank]).spawn(3)
    random.seed(for_python.generate_state(8).tobytes())
    np.random.seed(for_numpy.generate_state(8))
    torch.manual_seed(int(for_torch.generate_state(1, np.uint64)[0]))


def _uses_gpu() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
