"""An exchange of rows between ranks, as the tests of it set it up."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from omniload.placing import ClientPlaceTree, Exchange, Parts, assign_encoders, parts_of_slices
from omniload.placing.slicing import SLICINGS

TREES = tuple(
    ClientPlaceTree.parse(text)
    for text in (
        "dp=4",
        "dp=2,tp=2",
        "cp=2,dp=2",
        "pp=2,dp=2",
        "tp=4",
        "dp=3,cp=2",
        "dp_shard=2,ep=2,cp=2,tp=2",
    )
)


@st.composite
def fetched(draw: st.DrawFn) -> tuple[Exchange, list[np.ndarray]]:
    """An exchange in which the fetcher of each lane gets its rows; with it, the rows that each rank wants."""
    tree = draw(st.sampled_from(TREES))
    rows, cost, bucket = _items(draw, tree.dp_size)
    receiver = tree.fetchers(("pp", "cp", "tp"))[bucket]
    encoder = assign_encoders(cost, rows, receiver, num_ranks=tree.world_size)
    exchange = Exchange.of(rows, encoder=encoder, receiver=receiver, num_ranks=tree.world_size)
    names = names_of(rows)
    wanted = [_flat([names[item] for item in np.flatnonzero(receiver == rank)]) for rank in tree.ranks]
    return exchange, wanted


@st.composite
def sliced(draw: st.DrawFn) -> tuple[Exchange, list[np.ndarray]]:
    """The same, in which each context-parallel rank gets the rows of its slice, in any order of the tokens."""
    tree = draw(st.sampled_from([tree for tree in TREES if "cp" in tree.names]))
    cp = tree.num_buckets("cp")
    rows, cost, bucket = _items(draw, tree.dp_size)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    names = names_of(rows)
    roots = tree.fetchers(("pp", "tp"))
    wanted: list[np.ndarray] = [np.empty(0, np.int64)] * tree.world_size
    parts: list[Parts] = []
    for lane in range(tree.dp_size):
        items = np.flatnonzero(bucket == lane)
        num_rows = int(rows[items].sum())
        num_tokens = num_rows + draw(st.integers(0, 9))
        tokens = np.sort(rng.permutation(num_tokens)[:num_rows])
        documents = np.sort(np.append(rng.integers(0, num_tokens + 1, 2), [0, num_tokens]))
        cut = SLICINGS[draw(st.sampled_from(sorted(SLICINGS)))](documents, cp)
        slices = [cut.of(place) for place in range(cp)]
        if rng.random() < 0.3:
            slices = [rng.permutation(tokens_of) for tokens_of in slices]
        receivers = roots[tree.bucket_of(roots) == lane]
        found = parts_of_slices(rows[items], tokens=tokens, slices=slices, receivers=receivers)
        parts.append(
            Parts(item=items[found.item], start=found.start, rows=found.rows, receiver=found.receiver)
        )
        name_at = np.full(num_tokens, -1)
        name_at[tokens] = _flat([names[item] for item in items])
        for rank, part in zip(receivers.tolist(), slices, strict=True):
            wanted[rank] = name_at[part][name_at[part] >= 0]
    joined = {
        field: np.concatenate([getattr(one, field) for one in parts])
        for field in ("item", "start", "rows", "receiver")
    }
    home = tree.fetchers(("pp", "cp", "tp"))[bucket]
    encoder = assign_encoders(cost, rows, home, num_ranks=tree.world_size)
    return Exchange.of_parts(rows, encoder=encoder, parts=Parts(**joined), num_ranks=tree.world_size), wanted


def names_of(rows: np.ndarray) -> list[np.ndarray]:
    """A number for each row of each item, all different."""
    ends = np.cumsum(rows)
    return [np.arange(end - count, end) for end, count in zip(ends.tolist(), rows.tolist(), strict=True)]


def encoded_by(exchange: Exchange, rank: int) -> np.ndarray:
    """The names of the rows that a rank's encoder gives."""
    names = names_of(exchange.rows)
    return _flat([names[item] for item in exchange.items_of(rank)])


def _items(draw: st.DrawFn, num_buckets: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    drawn = draw(
        st.lists(
            st.tuples(st.integers(0, 5), st.integers(0, 4), st.integers(0, num_buckets - 1)), max_size=12
        )
    )
    rows, cost, bucket = np.array(drawn, np.int64).reshape(-1, 3).T
    return rows, cost, bucket


def _flat(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.empty(0, np.int64), *arrays])
