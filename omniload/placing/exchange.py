"""The exchange between an encoder on all ranks and a backbone on the data-parallel ones, as one all-to-all.

A rank encodes its items whole, in the order of their numbers, and sends each row to the rank whose backbone has a
placeholder for it. Numbers follow the placeholders: of two items of one receiver, the one with the lower number stands
first. What the encoder reads, like patches, is not exchanged: every rank fetches that of the items it encodes.

Several ranks may share a lane. Either its fetcher receives for all and passes the rows on as it does the lane (the
default: `Exchange.of`, with ``tree.fetchers(("pp", "cp", "tp"))[bucket]`` as receivers), which follows from plan and
mesh alone; or each context-parallel rank receives the rows of its own slice (`Exchange.of_parts`, `parts_of_slices`),
for which every rank must know where in the lanes the placeholders are. Pipeline stages past the first receive nothing.

>>> exchange = Exchange.of(rows, encoder=encoder, receiver=receiver, num_ranks=world)  # doctest: +SKIP
>>> received = encoded.new_empty(sum(exchange.receive_rows(rank)), width)  # doctest: +SKIP
>>> all_to_all_single(  # doctest: +SKIP
...     received,
...     encoded[exchange.send_order(rank)],
...     exchange.receive_rows(rank).tolist(),
...     exchange.send_rows(rank).tolist(),
... )
>>> in_place = received[exchange.receive_order(rank)]  # doctest: +SKIP

Gradients go the other way: ``sent_back[receive_order] = gradient``, the same call with the splits swapped, then
``gradient_of_encoded[send_order] = arrived``; autograd of indexing and of an all-to-all does just that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from omniload.errors import PlaceError
from omniload.placing.columns import check_ranks, whole_columns


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """Runs of rows of items that go to one receiver each. Those of a receiver are in the order it wants them."""

    item: np.ndarray
    """``int64[m]``: item of each part."""
    start: np.ndarray
    """``int64[m]``: rows of that item before the part."""
    rows: np.ndarray
    """``int64[m]``: rows of the part."""
    receiver: np.ndarray
    """``int64[m]``: rank that gets it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """Who sends which rows to whom; see `omniload.placing.exchange` for how it is run."""

    num_ranks: int
    """Ranks that take part."""
    rows: np.ndarray
    """``int64[n]``: rows that the encoder makes of each item."""
    encoder: np.ndarray
    """``int64[n]``: rank that encodes each item."""
    parts: Parts
    """The rows by receiver."""

    @classmethod
    def of(cls, rows: np.ndarray, *, encoder: np.ndarray, receiver: np.ndarray, num_ranks: int) -> Self:
        """The exchange in which every item goes to one rank as a whole.

        Args:
            rows: ``int64[n]`` rows of each item, in the order of the placeholders of its receiver.
            encoder: ``int64[n]`` rank that encodes each, as of `assign_encoders`.
            receiver: ``int64[n]`` rank that gets the rows of each.
            num_ranks: ranks that take part.

        Raises:
            PlaceError: an argument that makes no sense.
        """
        [rows] = whole_columns("items", rows=rows)
        parts = Parts(item=np.arange(len(rows)), start=np.zeros_like(rows), rows=rows, receiver=receiver)
        return cls.of_parts(rows, encoder=encoder, parts=parts, num_ranks=num_ranks)

    @classmethod
    def of_parts(cls, rows: np.ndarray, *, encoder: np.ndarray, parts: Parts, num_ranks: int) -> Self:
        """The exchange in which the rows of an item may go to several ranks.

        Raises:
            PlaceError: an argument that makes no sense, or a row that is in no part or in two.
        """
        rows, encoder = whole_columns("items", rows=rows, encoder=encoder)
        item, start, length, receiver = whole_columns(
            "parts", item=parts.item, start=parts.start, rows=parts.rows, receiver=parts.receiver
        )
        check_ranks("items", num_ranks, encoder)
        check_ranks("parts", num_ranks, receiver)
        if item.max(initial=-1) >= len(rows):
            raise PlaceError(f"parts: item {item.max()} is not among the {len(rows)} items")
        begin = (np.cumsum(rows) - rows)[item] + start
        order = np.lexsort((begin + length, begin))
        ends = np.append(0, (begin + length)[order])
        if (ends[:-1] != begin[order]).any() or ends[-1] != rows.sum() or (start + length > rows[item]).any():
            raise PlaceError(
                f"parts: their {int(length.sum())} rows are not the {int(rows.sum())} rows of the {len(rows)} items,"
                " each once"
            )
        parts = Parts(item=item, start=start, rows=length, receiver=receiver)
        return cls(num_ranks=num_ranks, rows=rows, encoder=encoder, parts=parts)

    def items_of(self, rank: int) -> np.ndarray:
        """``int64[k]``: the items that a rank encodes, in the order in which it lays their rows end to end."""
        check_ranks("exchange", self.num_ranks, rank)
        return np.flatnonzero(self.encoder == rank)

    def send_rows(self, rank: int) -> np.ndarray:
        """``int64[num_ranks]``: rows that a rank sends to each, itself among them."""
        sent = self._sent_by(rank)
        return _sums(self.parts.receiver[sent], self.parts.rows[sent], self.num_ranks)

    def receive_rows(self, rank: int) -> np.ndarray:
        """``int64[num_ranks]``: rows that a rank receives from each, itself among them."""
        wanted = self._wanted_by(rank)
        return _sums(self.encoder[self.parts.item[wanted]], self.parts.rows[wanted], self.num_ranks)

    def send_order(self, rank: int) -> np.ndarray:
        """``int64[k]``: the rows that a rank sends, among those it encodes, by receiver and in that one's order."""
        sent = self._sent_by(rank)
        sent = sent[np.argsort(self.parts.receiver[sent], kind="stable")]
        encoded = np.where(self.encoder == rank, self.rows, 0)
        begin = np.cumsum(encoded) - encoded
        return _runs(begin[self.parts.item[sent]] + self.parts.start[sent], self.parts.rows[sent])

    def receive_order(self, rank: int) -> np.ndarray:
        """``int64[k]``: where each row that a rank wants, in the order of its placeholders, is among those received."""
        wanted = self._wanted_by(rank)
        rows = self.parts.rows[wanted]
        arrival = np.argsort(self.encoder[self.parts.item[wanted]], kind="stable")
        begin = np.empty(len(wanted), np.int64)
        begin[arrival] = np.cumsum(rows[arrival]) - rows[arrival]
        return _runs(begin, rows)

    @property
    def sent(self) -> np.ndarray:
        """``int64[num_ranks, num_ranks]``: rows by sender and receiver; that of the gradients is its transpose."""
        pair = self.encoder[self.parts.item] * self.num_ranks + self.parts.receiver
        return _sums(pair, self.parts.rows, self.num_ranks**2).reshape(self.num_ranks, self.num_ranks)

    @property
    def num_moved_rows(self) -> int:
        """Rows that leave their rank."""
        return int(self.parts.rows[self.encoder[self.parts.item] != self.parts.receiver].sum())

    def _sent_by(self, rank: int) -> np.ndarray:
        check_ranks("exchange", self.num_ranks, rank)
        return np.flatnonzero(self.encoder[self.parts.item] == rank)

    def _wanted_by(self, rank: int) -> np.ndarray:
        check_ranks("exchange", self.num_ranks, rank)
        return np.flatnonzero(self.parts.receiver == rank)


def parts_of_slices(
    rows: np.ndarray, *, tokens: np.ndarray, slices: list[np.ndarray], receivers: np.ndarray
) -> Parts:
    """The parts of the items of one lane whose tokens are cut among context-parallel ranks.

    Parts of several lanes are one after the other, with the numbers of the items going on.

    Args:
        rows: ``int64[n]`` rows of each item of the lane.
        tokens: ``int64[sum(rows)]`` token of the lane that is the placeholder of each row, item by item.
        slices: for each context-parallel rank, ``int64`` tokens of the lane that it has, in the order it has them,
            like ``cut.of(rank)`` of `omniload.placing.slicing`.
        receivers: ``int64[len(slices)]`` rank that receives for each slice.

    Raises:
        PlaceError: not one placeholder for each row, or one that is not in exactly one slice.
    """
    [rows] = whole_columns("items", rows=rows)
    [tokens] = whole_columns("placeholders", token=tokens)
    [in_lane] = whole_columns("slices", token=np.concatenate([*slices, np.empty(0, np.int64)]))
    if len(receivers) != len(slices):
        raise PlaceError(f"slices: {len(slices)} slices and {len(receivers)} receivers; give one for each")
    if len(tokens) != rows.sum():
        raise PlaceError(
            f"tokens: {len(tokens)} placeholders for {int(rows.sum())} rows; there is one for each row"
        )
    row_at = np.full(1 + int(max(tokens.max(initial=-1), in_lane.max(initial=-1))), -1, np.int64)
    row_at[tokens] = np.arange(len(tokens))
    taken = row_at[in_lane]
    of_slice = np.repeat(np.arange(len(slices)), [len(one) for one in slices])[taken >= 0]
    taken = taken[taken >= 0]
    if not np.array_equal(np.sort(taken), np.arange(len(tokens))):
        raise PlaceError(f"slices: not every one of the {len(tokens)} placeholders is in them once")
    item = np.repeat(np.arange(len(rows)), rows)
    row = _runs(np.zeros_like(rows), rows)
    # A part ends where the next row is not the next of the same item, or is another rank's.
    goes_on = (np.diff(taken) == 1) & (np.diff(item[taken]) == 0) & (np.diff(of_slice) == 0)
    begin = np.flatnonzero(np.append(True, ~goes_on)[: len(taken)])
    return Parts(
        item=item[taken[begin]],
        start=row[taken[begin]],
        rows=np.diff(np.append(begin, len(taken))),
        receiver=receivers[of_slice[begin]],
    )


def _runs(begin: np.ndarray, length: np.ndarray) -> np.ndarray:
    """The numbers from each ``begin`` on, ``length`` of them, end to end."""
    ends = np.cumsum(length)
    return np.repeat(begin - (ends - length), length) + np.arange(int(length.sum()))


def _sums(group: np.ndarray, values: np.ndarray, num_groups: int) -> np.ndarray:
    sums = np.zeros(num_groups, np.int64)
    np.add.at(sums, group, values)
    return sums
