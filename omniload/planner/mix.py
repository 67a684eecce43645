"""Mixing: which source gives the next sample, by largest integer deficit against the scheduled weights.

After every draw of ``n`` (tokens, or 1 if the weights are shares of samples) each source is owed its weight's share of
it and the drawn one has received ``n``. The next draw is from the source that is owed most. All of it is exact integer
arithmetic, so that the order is the same on every platform; any prefix of the draws stays within two of the longest
samples of its declared share.

A source whose tokens are more than its cap's share of all is out until the others have caught up: it accrues nothing
and cannot be drawn, and the weights of the others are renormalised. So its tokens never exceed its share by more than
one sample, whatever the weights and their unit.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from omniload.kernels import KERNELS
from omniload.weights import WEIGHT_UNIT, renormalised

FEW_SOURCES = 16
"""Up to this many sources a loop over Python's integers is faster than arrays."""

_MOST_TOKENS = 2**28
_MOST_DEFICIT = 2**61
_OUT = -(2**63)
_NEVER = 2**63 - 1
_RUN = 2**16
"""Draws made by the compiled loop before what it gave is put aside."""


class Drawable(Protocol):
    """A source with samples at hand."""

    @property
    def ready(self) -> np.ndarray:
        """``int64[n]``: emitted tokens of those samples, in order."""

    def draw_ready(self, count: int) -> None:
        """Draw the first ``count`` of them."""

    def read_on(self) -> bool:
        """Have more at hand, when all are drawn; False if the source gave its last."""

    def number(self, orders: np.ndarray) -> None:
        """Give what `draw_ready` drew since the last call its draw numbers: ``int64[n]``, ascending."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Some draws."""

    sources: list[int]
    """Which sources were drawn from, ascending."""
    samples: int
    """How many draws."""
    tokens: int
    """Emitted tokens of the samples."""
    pieces: int
    """Their pieces."""


class Mixer:
    """What every source is owed.

    Args:
        deficits: what each is owed, in units times `WEIGHT_UNIT`.
        emitted: tokens of each so far.
        caps: most of all tokens that may be each one's, in parts of `WEIGHT_UNIT`.
        by_samples: whether weights are shares of samples and not of tokens.
    """

    def __init__(
        self,
        deficits: Sequence[int],
        emitted: Sequence[int],
        caps: Sequence[int],
        *,
        by_samples: bool = False,
    ) -> None:
        self._by_samples = by_samples
        self._emitted = np.array(emitted, np.int64)
        self._total = sum(emitted)
        self._caps = caps
        self._parts_of_caps = np.array(caps, np.int64)
        self._capped = any(cap < WEIGHT_UNIT for cap in caps)
        self._declared = np.zeros(len(deficits), np.int64)
        self._by_weight = np.empty(0, np.int64)
        self._is_out = np.zeros(len(deficits), bool)
        # The sources that are out, by the total of tokens at which they are so no more.
        self._back_at: list[tuple[int, int]] = []
        few = len(deficits) <= FEW_SOURCES or max(map(abs, deficits)) > _MOST_DEFICIT
        self._owed: _OwedToFew | _OwedToMany = _OwedToFew(deficits) if few else _OwedToMany(deficits)
        self._put_out()

    @property
    def deficits(self) -> tuple[int, ...]:
        """What each source is owed, in units times `WEIGHT_UNIT`."""
        return tuple(self._owed.deficits())

    def set_weights(self, weights: Sequence[int]) -> None:
        """Go on with these integer weights; a source of weight 0 accrues nothing and is not drawn."""
        self._declared = np.array(weights, np.int64)
        by_weight = np.argsort(-self._declared, kind="stable")
        self._by_weight = by_weight[: np.count_nonzero(self._declared)]
        self._apply_weights()

    def most_owed(self) -> int | None:
        """The source to draw from, the first on ties; None if there is none that has a weight and is below its cap."""
        return self._owed.most()

    def draw(self, source: int, tokens: int) -> None:
        """Account for a sample of the source that `most_owed` named; one of no tokens changes nothing."""
        amount = min(tokens, 1) if self._by_samples else tokens
        if isinstance(self._owed, _OwedToMany) and not self._owed.holds(source, amount):
            self._owed = _OwedToFew(self._owed.deficits())
            self._apply_weights()
        self._owed.pay(source, amount)
        if self._capped:
            self._emitted[source] += tokens
            self._total += tokens
            self._heed_caps(source)

    def draw_ready(
        self, sources: Sequence[Drawable], seq_len: int, tokens: int, pieces: int, order: int
    ) -> Run:
        """Draw as `most_owed` and `draw` would, in one go, until enough is drawn or a source is spent.

        Draws less, or nothing, where the compiled loops are missing or 64 bits do not hold what is owed.

        Args:
            sources: all of them, in order.
            seq_len: longest piece.
            tokens: stop when that many are drawn,
            pieces: or that many pieces.
            order: number of the first draw.
        """
        runs: list[np.ndarray] = []
        num_tokens = num_pieces = 0
        while KERNELS is not None and num_tokens < tokens and num_pieces < pieces:
            drawn, its_tokens, its_pieces = self._run(
                sources, seq_len, tokens - num_tokens, pieces - num_pieces
            )
            if not len(drawn):
                break
            runs.append(drawn)
            num_tokens += its_tokens
            num_pieces += its_pieces
        if not runs:
            return Run(sources=[], samples=0, tokens=0, pieces=0)
        source_of = np.concatenate(runs)
        counts = np.bincount(source_of)
        orders = np.split(np.argsort(source_of, kind="stable") + order, np.cumsum(counts)[:-1])
        drawn_from = np.flatnonzero(counts).tolist()
        for source in drawn_from:
            sources[source].number(orders[source])
        return Run(sources=drawn_from, samples=len(source_of), tokens=num_tokens, pieces=num_pieces)

    def _run(
        self, sources: Sequence[Drawable], seq_len: int, tokens: int, pieces: int
    ) -> tuple[np.ndarray, int, int]:
        """Some draws, as many as the compiled loop makes at once: ``uint16[n]`` sources, tokens and pieces."""
        assert KERNELS is not None
        drawn = np.empty(min(_RUN, pieces), np.uint16)
        deficits = self._owed.in_64_bits()
        if deficits is None or self._total > _MOST_DEFICIT:
            return drawn[:0], 0, 0

        def more(source: int, taken: int) -> np.ndarray:
            one = sources[source]
            one.draw_ready(taken)
            while not len(one.ready) and one.read_on():
                pass
            return one.ready

        taken = np.zeros(len(sources), np.int64)
        samples, num_tokens, num_pieces = KERNELS.draw(
            deficits,
            self._declared,
            self._by_weight,
            more,
            taken,
            drawn,
            self._by_samples,
            seq_len,
            min(tokens, _NEVER),
            min(pieces, _NEVER),
            self._emitted if self._capped else None,
            self._parts_of_caps,
            self._total,
        )
        for source in np.flatnonzero(taken).tolist():
            sources[source].draw_ready(int(taken[source]))
        if samples:
            self._owed.replace(deficits)
            if self._capped:
                self._total += num_tokens
                self._put_out()
        return drawn[:samples], num_tokens, num_pieces

    def leave(self, source: int) -> None:
        """Strike what a source is owed: it gave its last sample."""
        self._owed.strike(source)

    def _apply_weights(self) -> None:
        self._owed.set_weights(renormalised(np.where(self._is_out, 0, self._declared)))

    def _put_out(self) -> None:
        """Find out from the account alone which sources are out."""
        self._is_out[:] = False
        self._back_at = []
        if self._capped:
            for source in range(len(self._caps)):
                self._put_out_if_over_cap(source)
        self._apply_weights()

    def _heed_caps(self, source: int) -> None:
        """Let in and put out, after only the tokens of ``source`` changed."""
        changed = False
        while self._back_at and self._back_at[0][0] <= self._total:
            self._is_out[heapq.heappop(self._back_at)[1]] = False
            changed = True
        if self._put_out_if_over_cap(source) or changed:
            self._apply_weights()

    def _put_out_if_over_cap(self, source: int) -> bool:
        emitted, cap = int(self._emitted[source]) * WEIGHT_UNIT, self._caps[source]
        over = emitted > cap * self._total
        if over:
            self._is_out[source] = True
            heapq.heappush(self._back_at, (-(-emitted // cap), source))
        return over


class _OwedToFew:
    """Deficits and weights in Python's integers, of any size."""

    def __init__(self, deficits: Sequence[int]) -> None:
        self._deficits = list(deficits)
        self._weights: list[tuple[int, int]] = []  # (source, weight) of those that have one

    def deficits(self) -> list[int]:
        return self._deficits

    def in_64_bits(self) -> np.ndarray | None:
        if max(map(abs, self._deficits), default=0) > _MOST_DEFICIT:
            return None
        return np.array(self._deficits, np.int64)

    def replace(self, deficits: np.ndarray) -> None:
        self._deficits = deficits.tolist()

    def set_weights(self, weights: np.ndarray) -> None:
        sources = np.flatnonzero(weights)
        self._weights = list(zip(sources.tolist(), weights[sources].tolist(), strict=True))

    def most(self) -> int | None:
        best, largest = None, 0
        for source, _ in self._weights:
            deficit = self._deficits[source]
            if best is None or deficit > largest:
                best, largest = source, deficit
        return best

    def pay(self, source: int, amount: int) -> None:
        deficits = self._deficits
        for one, weight in self._weights:
            deficits[one] += weight * amount
        deficits[source] -= WEIGHT_UNIT * amount

    def strike(self, source: int) -> None:
        self._deficits[source] = 0


class _OwedToMany:
    """Deficits and weights in 64 bits.

    They hold: the largest deficit is at most 2⁶¹ before a payment and grows by at most 2²⁸ tokens times a weight of
    2³² or less; a deficit only falls when its source is drawn, and not below -2⁶¹. `holds` looks at the two that
    move; by the bound on prefixes, samples of 2²⁸ tokens would have to be owed twice over for it to say no.
    """

    def __init__(self, deficits: Sequence[int]) -> None:
        self._deficits = np.array(deficits, np.int64)
        self._weights = np.zeros(len(deficits), np.int64)
        self._shares = np.empty_like(self._weights)
        # Deficits of the sources that have a weight, those of the others too low to be the largest.
        self._drawable = np.full(len(deficits), _OUT, np.int64)
        self._any = False

    def deficits(self) -> list[int]:
        deficits: list[int] = self.in_64_bits().tolist()
        return deficits

    def in_64_bits(self) -> np.ndarray:
        return np.where(self._weights > 0, self._drawable, self._deficits)

    def replace(self, deficits: np.ndarray) -> None:
        self._deficits = deficits
        self._drawable = np.where(self._weights > 0, deficits, _OUT)

    def set_weights(self, weights: np.ndarray) -> None:
        self._deficits = self.in_64_bits()
        self._drawable = np.where(weights > 0, self._deficits, _OUT)
        self._weights = weights
        self._any = bool(weights.any())

    def most(self) -> int | None:
        return int(self._drawable.argmax()) if self._any else None

    def holds(self, source: int, amount: int) -> bool:
        largest = int(self._drawable[source])
        return (
            amount <= _MOST_TOKENS
            and largest <= _MOST_DEFICIT
            and largest - WEIGHT_UNIT * amount >= -_MOST_DEFICIT
        )

    def pay(self, source: int, amount: int) -> None:
        np.multiply(self._weights, amount, out=self._shares)
        self._drawable += self._shares
        self._drawable[source] -= WEIGHT_UNIT * amount

    def strike(self, source: int) -> None:
        self._deficits[source] = 0
        if self._weights[source]:
            self._drawable[source] = 0
