"""However a step is packed, balanced and shared, a model learns the same from it: in float64, to rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch.nn.functional import cross_entropy

from omniload import DataLoader
from omniload.planner.arrange import WAYS
from omniload.planner.balancing import METHODS
from tests.omniload.mixtures import token_rows, write_parquet
from training.config import ModelConfig
from training.model import CausalLM
from training.step import backward

SEQ_LEN = 48
STEPS = 3
TINY = ModelConfig(
    vocab_size=1000, hidden_size=8, intermediate_size=8, num_layers=2, num_heads=2, num_kv_heads=1
)


def mixture(folder: Path, **keys: Any) -> dict[str, Any]:
    for i, mean in enumerate([12, 90]):
        write_parquet(folder / f"{i}.parquet", token_rows(i, 80, mean))
    return {
        "seq_len": SEQ_LEN,
        "packs": 8,
        "lanes": 4,
        "sources": {str(i): {"path": str(folder / f"{i}.parquet"), "weight": 0.5} for i in range(2)},
        **keys,
    }


def gradients(model: CausalLM) -> list[torch.Tensor]:
    taken = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return taken


@pytest.mark.parametrize(
    ("packing", "balance"),
    [("best_fit", method) for method in sorted(METHODS)]
    + [(way, "kk") for way in sorted(WAYS) if way != "best_fit"],
)
def test_loss_and_gradients_are_those_of_each_document_by_itself(
    tmp_path: Path, packing: str, balance: str
) -> None:
    spec = mixture(tmp_path, packing=packing, balance=balance)
    model = CausalLM(TINY, torch.float64, seed=0)
    rows = {name: pq.read_table(one["path"])["input_ids"] for name, one in spec["sources"].items()}
    ranks = [DataLoader(spec, dp_rank=rank, dp_size=2) for rank in range(2)]
    cut = packed = 0
    for groups in zip(*(loader.steps() for loader in ranks), strict=True):
        if groups[0][0]["step"] == STEPS:
            break
        # Sharded: each rank runs its lanes, and gradients are added up.
        loss = sum(backward(model, lanes) for lanes in groups)
        found = gradients(model)
        # Unsharded and unpacked: each piece by itself, with the tokens as they are stored.
        total = 0.0
        for loader, lanes in zip(ranks, groups, strict=True):
            for lane in lanes:
                table = loader.samples(lane).to_pylist()
                packed += len(table) > lane["input_ids"].shape[0]
                for piece in table:
                    tokens = rows[piece["source"]][piece["row"]].as_py()
                    cut += piece["start"] % SEQ_LEN > 0
                    total += document(model, tokens, piece["start"], piece["end"], lane["num_target_tokens"])
        np.testing.assert_allclose(loss, total, rtol=1e-12)
        torch.testing.assert_close(found, gradients(model), rtol=1e-9, atol=1e-14)
    assert (packed > 0) == (packing != "none")
    assert (cut > 0) == (packing == "concatenate"), "cut where no other way cuts"
    for loader in ranks:
        loader.close()


def document(model: CausalLM, tokens: list[int], start: int, end: int, num_target_tokens: int) -> float:
    """Part of a step's loss that tokens ``start:end`` of a document have; adds their gradients."""
    inputs = torch.tensor(tokens[start:end])[None]
    targets = torch.tensor(tokens[start + 1 : end + 1], dtype=torch.int64)
    positions = torch.arange(end - start)[None]
    logits = model(inputs, positions, torch.tensor([0, end - start]))
    loss = cross_entropy(logits[: len(targets)], targets, reduction="sum") / num_target_tokens
    loss.backward()
    return loss.item()
