"""A model computed slice by slice, with keys and values gathered, is the model: loss and gradients, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from omniload.placing.slicing import SLICINGS, Slices

HIDDEN, HEADS, VOCAB = 12, 3, 17
LENGTHS = [9, 1, 30, 5, 11]


class Tiny(nn.Module):
    """Two layers of attention and feed-forward; each part knows only its own tokens, except keys and values."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, HIDDEN, dtype=torch.float64)
        self.place = nn.Embedding(64, HIDDEN, dtype=torch.float64)
        linear = {"q": HIDDEN, "k": HIDDEN, "v": HIDDEN, "o": HIDDEN, "up": HIDDEN}
        self.layers = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(HIDDEN, n, dtype=torch.float64) for name, n in linear.items()})
            for _ in range(2)
        )
        self.head = nn.Linear(HIDDEN, VOCAB, dtype=torch.float64)

    def loss(self, parts: list[Tensor], ids: Tensor, targets: Tensor, cu_seqlens: np.ndarray) -> Tensor:
        """Summed over ranks, each of which has the tokens ``parts[rank]`` of the row."""
        position = torch.from_numpy(np.concatenate([np.arange(n) for n in np.diff(cu_seqlens)]))
        document = torch.from_numpy(np.repeat(np.arange(len(cu_seqlens) - 1), np.diff(cu_seqlens)))
        xs = [self.embed(ids[part]) + self.place(position[part]) for part in parts]
        gathered = torch.cat(parts)  # the row index of each gathered key
        for layer in self.layers:
            keys = torch.cat([layer["k"](x) for x in xs])
            values = torch.cat([layer["v"](x) for x in xs])
            out = []
            for part, x in zip(parts, xs, strict=True):
                sees = (document[part][:, None] == document[gathered]) & (part[:, None] >= gathered)
                q, k, v = (
                    y.unflatten(-1, (HEADS, -1)).transpose(0, 1) for y in (layer["q"](x), keys, values)
                )
                weights = (q @ k.transpose(1, 2)).masked_fill(~sees, -torch.inf).softmax(-1)
                x = x + layer["o"]((weights @ v).transpose(0, 1).flatten(1))
                out.append(x + torch.tanh(layer["up"](x)))
            xs = out
        losses = [
            nn.functional.cross_entropy(self.head(x), targets[part], reduction="sum")
            for part, x in zip(parts, xs, strict=True)
        ]
        return torch.stack(losses).sum()


def loss_and_gradients(slices: Slices | None, ranks: int, drop: bool = False) -> list[Tensor]:
    cu_seqlens = np.concatenate([[0], np.cumsum(LENGTHS)])
    generator = torch.Generator().manual_seed(1)
    ids, targets = torch.randint(VOCAB, (2, sum(LENGTHS)), generator=generator)
    parts = (
        [torch.arange(sum(LENGTHS))]
        if slices is None
        else [torch.from_numpy(slices.of(r)) for r in range(ranks)]
    )
    if drop:
        parts[0] = parts[0][:-1]
    model = Tiny()
    loss = model.loss(parts, ids, targets, cu_seqlens)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("cp", [1, 2, 4, 5])
@pytest.mark.parametrize("method", SLICINGS)
def test_loss_and_gradients_are_those_of_the_whole_row(method: str, cp: int) -> None:
    slices = SLICINGS[method](np.concatenate([[0], np.cumsum(LENGTHS)]), cp)
    if cp > 1 and method != "contiguous":
        assert any((np.diff(slices.of(rank)) > 1).any() for rank in range(cp)), (
            "a rank has parts that lie apart"
        )
    whole, sliced = loss_and_gradients(None, 1), loss_and_gradients(slices, cp)
    assert len(whole) == len(sliced) == 25
    for expected, found in zip(whole, sliced, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


def test_a_token_left_out_is_seen() -> None:
    slices = SLICINGS["zigzag"](np.concatenate([[0], np.cumsum(LENGTHS)]), 4)
    whole, sliced = loss_and_gradients(None, 1), loss_and_gradients(slices, 4, drop=True)
    assert all(not torch.allclose(a, b, rtol=1e-6) for a, b in zip(whole[:3], sliced[:3], strict=True))
