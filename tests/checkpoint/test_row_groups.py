"""Row groups of the tables of boxes end where modules do."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import event, example, given
from hypothesis import strategies as st

from checkpoint.format.grouping import first_rows

_PARTS = ("wk", "wo", "wq", "wv")

keys = st.lists(st.sampled_from(["a", "b", "layers.0", "layers.1"]), min_size=1, max_size=3).map(".".join)
tensors = st.dictionaries(
    st.tuples(st.sampled_from(["model", "optimizer"]), keys), st.integers(0, 40_000), max_size=30
)


@given(tensors)
@example({})
@example({("model", "empty"): 0})
def test_they_are_in_order_and_neither_small_nor_large(counts: dict[tuple[str, str], int]) -> None:
    names = sorted(counts)
    rows = np.asarray([counts[name] for name in names], dtype=np.int64)
    found = first_rows(names, rows)
    sizes = [end - begin for begin, end in pairwise([*found, int(rows.sum())])]
    assert sum(sizes) == rows.sum()
    assert not found or found[0] == 0
    assert all(size >= 2048 for size in sizes[:-1])
    assert all(0 < size < 2048 + 14_336 for size in sizes[-1:]) or not rows.any()
    assert all(size < 2048 + 14_336 for size in sizes)
    event("several" if len(sizes) > 1 else "one")


def test_each_layer_has_its_own() -> None:
    """Layers 1, 10, 11 and 2 follow each other; none shares rows with the next one, though all begin alike."""
    names = sorted(("model", f"layers.{layer}.{part}") for layer in range(12) for part in _PARTS)
    found = first_rows(names, np.full(len(names), 1000))
    assert found == list(range(0, 48_000, 4000))


def test_a_layer_that_is_too_large_is_cut_between_its_modules() -> None:
    names = sorted(
        ("model", f"layers.{layer}.{module}.{part}")
        for layer in range(3)
        for module in ("attention", "mlp")
        for part in _PARTS
    )
    found = first_rows(names, np.full(len(names), 3000))
    assert found == list(range(0, 72_000, 12_000))


def test_small_layers_are_put_together() -> None:
    names = sorted(("model", f"layers.{layer:03d}.w") for layer in range(100))
    assert first_rows(names, np.full(100, 150)) == list(range(0, 15_000, 14 * 150))
    assert first_rows(names, np.full(100, 100)) == [0]  # all of it is small


def test_groups_of_the_state_are_kept_apart_and_a_large_tensor_is_cut_anywhere() -> None:
    names = [("model", "w"), ("optimizer", "w.exp_avg")]
    assert first_rows(names, np.asarray([5000, 33_000])) == [0, 5000, 19_336, 33_672]
