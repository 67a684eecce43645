"""Context parallelism: which tokens of a row each of the ranks that share it takes.

Three ways:

- `contiguous` – rank r takes the r-th part of the row. Late parts of a long document see more than early ones.
- `zigzag` – the row is cut into 2·cp chunks and rank r takes chunks r and 2·cp - 1 - r, which balances one long
  document.
- `per_document` – each document is cut so, for itself (WLB-LLM, arXiv 2503.17924), which balances any documents, but
  sends more keys and values around and leaves each rank short runs.

Ranks get numbers of tokens that differ by one at most, and equal ones where cp divides the row. No padding is put in:
whoever needs equal shapes pads the shorter slices by one token, or the row to a multiple of 2·cp beforehand, which also
makes all chunks of `zigzag` equal.

Everything here is derived after the plan, from the lane and the mesh; no plan depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from omniload.errors import PlaceError
from omniload.planner.costs.exact import weighted_sum
from omniload.planner.costs.lengths import LINEAR_TOKENS

PAIR_COST = 2
"""Default cost of a pair of a query and a key, relative to `LINEAR_TOKENS` for all else that a token costs."""
_MOST_TOKENS = 2**31
"""Of a row, and one more: the pairs of so many still count in 64 bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slices:
    """The tokens of a row by rank, as runs of neighbours of one document: every token is in one run.

    The runs are listed by rank, those of a rank in the order of the row.
    """

    method: str
    """Name of the way."""
    offsets: np.ndarray
    """``int64[cp + 1]``: rank r has the runs ``offsets[r]:offsets[r + 1]``."""
    begin: np.ndarray
    """``int64[k]``: first token of each run in the row."""
    length: np.ndarray
    """``int64[k]``: tokens of each run, at least one."""
    document: np.ndarray
    """``int64[k]``: the document of each run."""
    position: np.ndarray
    """``int64[k]``: position of its first token in that document."""

    @property
    def num_ranks(self) -> int:
        """Ranks that share the row: cp."""
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> np.ndarray:
        """``int64[cp]``: tokens of each rank."""
        return self.per_rank(self.length)

    def of(self, rank: int) -> np.ndarray:
        """``int64[n]``: the tokens of one rank as indices into the row, ascending."""
        runs = slice(int(self.offsets[rank]), int(self.offsets[rank + 1]))
        length = self.length[runs]
        ends = np.cumsum(length)
        tokens: np.ndarray = np.repeat(self.begin[runs] - ends + length, length) + np.arange(length.sum())
        return tokens

    def per_rank(self, of_runs: np.ndarray) -> np.ndarray:
        """``int64[cp]``: sums of ``int64[k]`` over the runs of each rank."""
        return np.diff(np.concatenate([[0], np.cumsum(of_runs)])[self.offsets])


def contiguous(cu_seqlens: np.ndarray, cp: int) -> Slices:
    """Part r of the row to rank r.

    Args:
        cu_seqlens: integer ``[k + 1]``, where the documents of the row begin, from 0, and where the last one ends.
        cp: ranks.

    Raises:
        PlaceError: there are no ranks, the offsets do not ascend from 0, or the row has 2³¹ tokens or more.
    """
    documents = _checked(cu_seqlens, cp)
    return _slices("contiguous", _even(documents, cp), np.arange(cp), documents, cp)


def zigzag(cu_seqlens: np.ndarray, cp: int) -> Slices:
    """Of 2·cp chunks of the row, r and 2·cp - 1 - r to rank r; arguments and errors as of `contiguous`."""
    documents = _checked(cu_seqlens, cp)
    share = np.diff(_even(documents, cp))
    early = share // 2
    sizes = np.concatenate([early, (share - early)[::-1]])
    return _slices("zigzag", np.concatenate([[0], np.cumsum(sizes)]), _there_and_back(cp), documents, cp)


def per_document(cu_seqlens: np.ndarray, cp: int) -> Slices:
    """Each document as `zigzag` cuts a row; arguments and errors as of `contiguous`.

    Chunks of a document are equal; its last tokens, fewer than 2·cp, are dealt to the ranks one by one, going on where
    the document before left off.
    """
    documents = _checked(cu_seqlens, cp)
    chunk, rest = np.divmod(np.diff(documents), 2 * cp)
    cut = chunk > 0
    chunks = (documents[:-1][cut, None] + chunk[cut, None] * np.arange(2 * cp)).ravel()
    dealt = np.repeat(documents[1:] - np.cumsum(rest), rest) + np.arange(rest.sum())
    begins = np.concatenate([chunks, dealt])
    ranks = np.concatenate([np.tile(_there_and_back(cp), int(cut.sum())), np.arange(len(dealt)) % cp])
    order = np.argsort(begins, kind="stable")
    cuts = np.concatenate([begins[order], documents[-1:]])
    return _slices("per_document", cuts, ranks[order], documents, cp)


SLICINGS: Mapping[str, Callable[[np.ndarray, int], Slices]] = {
    "contiguous": contiguous,
    "zigzag": zigzag,
    "per_document": per_document,
}
"""The ways by name, the simplest first."""


def slice_costs(slices: Slices, *, pair_cost: int = PAIR_COST, token_cost: int = LINEAR_TOKENS) -> np.ndarray:
    """What each rank spends on its tokens under a causal mask inside each document.

    Args:
        slices: of the row.
        pair_cost: of a query and a key that it sees; with a `Decoder`, its ``pair_flops`` times its layers without a
            window. Windowed layers are left out: there a late token sees no more than an early one.
        token_cost: of all else that a token costs; with a `Decoder`, its ``token_flops``.

    Returns:
        ``int64[cp]``, exact.

    Raises:
        PlanError: a cost is larger than 64 bits hold.
    """
    pairs = slices.length * slices.position + slices.length * (slices.length + 1) // 2
    values = (slices.per_rank(pairs), slices.num_tokens)
    return weighted_sum((pair_cost, token_cost), values, 1, slices.method)


def received_tokens(slices: Slices) -> int:
    """Tokens whose keys and values ranks need from others, all ranks together: the least that could be sent.

    A rank needs, of each document that it has tokens of, all tokens up to its last one there.
    """
    rank = np.repeat(np.arange(slices.num_ranks), np.diff(slices.offsets))
    here = np.stack([rank, slices.document])
    last = np.append((here[:, 1:] != here[:, :-1]).any(axis=0), True)[: len(rank)]
    needed = (slices.position + slices.length)[last]
    return int(needed.sum()) - int(slices.length.sum())


def choose_slicing(
    cu_seqlens: np.ndarray, cp: int, *, pair_cost: int = PAIR_COST, token_cost: int = LINEAR_TOKENS
) -> Slices:
    """The way whose costliest rank costs least.

    Of several such ways the one with the fewest `received_tokens`, then the first of `SLICINGS`. Arguments and errors
    as of `contiguous` and `slice_costs`.
    """

    def key(slices: Slices) -> tuple[int, int]:
        costs = slice_costs(slices, pair_cost=pair_cost, token_cost=token_cost)
        return int(costs.max()), received_tokens(slices)

    return min((make(cu_seqlens, cp) for make in SLICINGS.values()), key=key)


def _checked(cu_seqlens: np.ndarray, cp: int) -> np.ndarray:
    """``int64[k + 1]``: the offsets.

    Raises:
        PlaceError: see `contiguous`.
    """
    if cp < 1:
        raise PlaceError(f"cp: {cp} ranks cannot share a row; give at least 1")
    offsets = np.asarray(cu_seqlens)
    if offsets.ndim != 1 or offsets.dtype.kind not in "iu" or not len(offsets) or offsets[0] != 0:
        raise PlaceError(
            f"cu_seqlens: {offsets.dtype}{list(offsets.shape)} are no offsets of documents: integers from 0 on"
        )
    offsets = offsets.astype(np.int64)
    descends = np.flatnonzero(np.diff(offsets) < 0)
    if len(descends):
        at = int(descends[0])
        raise PlaceError(f"cu_seqlens: document {at} ends at {offsets[at + 1]} and begins at {offsets[at]}")
    if offsets[-1] >= _MOST_TOKENS:
        raise PlaceError(f"cu_seqlens: a row of {offsets[-1]} tokens; {_MOST_TOKENS - 1} are the most")
    return offsets


def _even(documents: np.ndarray, cp: int) -> np.ndarray:
    """``int64[cp + 1]``: where parts of the row begin that differ by one at most."""
    return np.arange(cp + 1) * int(documents[-1]) // cp


def _there_and_back(cp: int) -> np.ndarray:
    """``int64[2 cp]``: ranks of the chunks of a zig-zag."""
    return np.concatenate([np.arange(cp), np.arange(cp)[::-1]])


def _slices(method: str, cuts: np.ndarray, ranks: np.ndarray, documents: np.ndarray, cp: int) -> Slices:
    """Runs between cuts, given to the ranks of the chunks and cut once more where documents end."""
    edges = np.unique(np.concatenate([cuts, documents]))
    begin = edges[:-1]
    # On the right of equals: an empty chunk, or document, has no run.
    rank = ranks[np.searchsorted(cuts, begin, side="right") - 1]
    document = np.searchsorted(documents, begin, side="right") - 1
    order = np.argsort(rank, kind="stable")
    begin, document = begin[order], document[order]
    return Slices(
        method=method,
        offsets=np.concatenate([[0], np.cumsum(np.bincount(rank, minlength=cp))]),
        begin=begin,
        length=np.diff(edges)[order],
        document=document,
        position=begin - documents[document],
    )
