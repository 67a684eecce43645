"""Handing on what one rank reads for several, over connections made for one load.

Each rank runs two threads beside those that read what nobody else needs: one sends its bundles, read a little ahead,
to the ranks that need something of them, one receives those of others. Both go through them in the order of the job
(see ``checkpoint.engine.sharing``), so that nobody waits in a circle; reading, sending and copying overlap, and memory
is bounded by a few bundles.

The messages of a bundle hold what the receiver wants and no more: of each lot, the receiver's parts in order of its
wanted boxes. Both ends work out the same layout from the same boxes, so no message needs a header.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch._C._distributed_c10d import Store

from checkpoint.boxes import Box, intersect, slices_within
from checkpoint.engine.connections import Connections, PeersLost
from checkpoint.engine.memory import Bytes
from checkpoint.engine.overlap import Ints, spread
from checkpoint.engine.read import PieceReader
from checkpoint.engine.sharing import Share
from checkpoint.engine.views import Cut, Views, boxes_of, elements
from storage.spans import span

_NUM_AHEAD: Final = 2
"""Bundles being read while another one is sent."""

# What the bits of an element are taken for while they travel, by its size in bytes.
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Slot:
    """What one message holds of one lot.

    Attributes:
        cut: The elements of the lot.
        pieces: Boxes in the order in which their elements follow each other, with the wanted part that each is of.
        num_bytes: Size of all of them.
    """

    cut: Cut
    pieces: Sequence[tuple[Box, int]]
    num_bytes: int

    @property
    def is_whole(self) -> bool:
        """Whether it holds all elements of the lot, once, which are then in the same order."""
        return self.num_bytes == self.cut.end - self.cut.begin and len({part for _, part in self.pieces}) == 1


class Exchange:
    """One rank's end of the exchange of one load.

    Args:
        reader: Reads pieces.
        views: Where they go.
        share: Who reads what.
        rank: This rank.
        timeout_s: Longest wait for any other rank.
    """

    def __init__(self, reader: PieceReader, views: Views, share: Share, rank: int, timeout_s: float) -> None:
        self._reader = reader
        self._views = views
        self._share = share
        self._rank = rank
        peers = {*share.lots.reader.tolist(), *share.receiver.tolist()} - {rank}
        self._connections = Connections(rank, peers, timeout_s)
        self.num_bytes_received = 0

    def connect(self, store: Store) -> None:
        """Connect to the ranks that share something with this one, which all do so at the same time.

        Args:
            store: Shared by all ranks that exchange, and used by nobody else.

        Raises:
            PeersLost: Some did not come in time.
        """
        self._connections.open(store)

    def run(self) -> None:
        """Read and exchange what is shared, and beside that read the rest.

        Raises:
            PeersLost: Another rank failed or does not answer.
            CheckpointError, StorageError: This rank failed; the others have lost their connections to it.
        """
        lots = self._share.lots
        shared = np.sort(spread(lots.first, lots.end - lots.first))
        with ThreadPoolExecutor(3, thread_name_prefix="checkpoint-exchange") as pool:
            tasks = [
                pool.submit(self._send),
                pool.submit(self._receive),
                pool.submit(self._reader.read_alone, shared),
            ]
            try:
                for task in tasks:
                    task.add_done_callback(self._closes_on_failure)
                wait(tasks)
            except BaseException:  # an interrupt: nobody may go on waiting for the others
                self._connections.close()
                raise
        failures = [error for task in tasks if (error := task.exception()) is not None]
        # What this rank did itself says more than that its connections broke.
        for error in sorted(failures, key=lambda one: isinstance(one, PeersLost)):
            raise error

    def close(self) -> None:
        """Give the connections up. Not before all ranks are done: what is on its way could be lost."""
        self._connections.close()

    def _closes_on_failure(self, done: Future[None]) -> None:
        if done.exception() is not None:
            self._connections.close()

    def _send(self) -> None:
        lots = self._share.lots
        own = np.flatnonzero(lots.reader == self._rank)
        self._reader.check_headers(spread(lots.first[own], lots.end[own] - lots.first[own]))
        for messages in self._read_ahead(_runs(own, lots.bundle[own])):
            for receiver, message in messages.items():
                self._connections.send(receiver, [part.data for part in message])

    def _read_ahead(self, bundles: Sequence[Ints]) -> Iterator[Mapping[int, Sequence[Bytes]]]:
        """The messages of each bundle by receiver, in order."""
        with ThreadPoolExecutor(_NUM_AHEAD, thread_name_prefix="checkpoint-share") as pool:
            ahead: deque[Future[Mapping[int, Sequence[Bytes]]]] = deque()
            for bundle in bundles:
                ahead.append(pool.submit(self._read_bundle, bundle))
                if len(ahead) > _NUM_AHEAD:
                    yield ahead.popleft().result()
            for messages in ahead:
                yield messages.result()

    def _read_bundle(self, bundle: Ints) -> Mapping[int, Sequence[Bytes]]:
        """Read the lots of a bundle, fill the views of this rank from them, and make the message to each receiver."""
        runs = [self._run(lot) for lot in bundle.tolist()]
        cuts = [self._views.cut(*run) for run in runs]
        places = [self._views.destination(*run) for run in runs]
        raws = self._reader.read_raw(runs, places)
        wanted: dict[int, list[tuple[int, tuple[Box, ...]]]] = {}
        for index, (lot, cut) in enumerate(zip(bundle.tolist(), cuts, strict=True)):
            for receiver, parts in self._parts_of(lot, len(cut.box.offsets)).items():
                wanted.setdefault(receiver, []).append((index, tuple(parts)))
        # Replicas want the same and get the same: as many messages as there are different ones.
        messages: dict[tuple[tuple[int, tuple[Box, ...]], ...], Sequence[Bytes]] = {}
        with torch.no_grad():
            for cut, raw, place in zip(cuts, raws, places, strict=True):
                if place is None:
                    self._views.fill(cut, raw)
            for parts_of_lots in {tuple(of_receiver) for of_receiver in wanted.values()}:
                messages[parts_of_lots] = [
                    self._part(self._slot(cuts[index], parts), raws[index]) for index, parts in parts_of_lots
                ]
        return {receiver: messages[tuple(wanted[receiver])] for receiver in sorted(wanted)}

    def _parts_of(self, lot: int, num_dims: int) -> dict[int, list[Box]]:
        """What each receiver wants of the stored box of a lot that this rank reads."""
        share = self._share
        low, high = (int(np.searchsorted(share.lot, lot, side=side)) for side in ("left", "right"))
        parts: dict[int, list[Box]] = {}
        for receiver, offsets, lengths in zip(
            share.receiver[low:high].tolist(),
            share.offsets[low:high].tolist(),
            share.lengths[low:high].tolist(),
            strict=True,
        ):
            parts.setdefault(receiver, []).append(Box(tuple(offsets[:num_dims]), tuple(lengths[:num_dims])))
        return parts

    def _part(self, slot: _Slot, raw: Bytes) -> Bytes:
        """The bytes of a slot; nothing is copied where they are those of the lot."""
        if slot.is_whole:
            return raw
        part = np.empty(slot.num_bytes, dtype=np.uint8)
        bits = self._bits(slot.cut)
        for (box, _), target in zip(slot.pieces, _rooms(slot, part, bits), strict=True):
            target.copy_(elements(slot.cut, raw, box, bits))
        return part

    def _receive(self) -> None:
        lots = self._share.lots
        others = np.flatnonzero(lots.reader != self._rank)
        with ThreadPoolExecutor(1, thread_name_prefix="checkpoint-copy") as pool:
            # One message is copied while the next one arrives.
            copied: Future[None] | None = None
            for message in _runs(others, lots.bundle[others], lots.reader[others]):
                runs = [self._run(lot) for lot in message.tolist()]
                cuts = [self._views.cut(*run) for run in runs]
                slots = [self._slot(cut, [part.box for part in cut.parts]) for cut in cuts]
                places = [
                    self._views.destination(*run) if slot.is_whole else None
                    for run, slot in zip(runs, slots, strict=True)
                ]
                # Each in memory of its own and so aligned, as PyTorch takes elements of 16 bytes to be.
                parts = [
                    np.empty(slot.num_bytes, dtype=np.uint8) if place is None else place
                    for slot, place in zip(slots, places, strict=True)
                ]
                num_bytes = sum(slot.num_bytes for slot in slots)
                with span("checkpoint.exchange", num_bytes=num_bytes):
                    self._connections.receive(int(lots.reader[message[0]]), [part.data for part in parts])
                self.num_bytes_received += num_bytes
                if copied is not None:
                    copied.result()
                rest = [
                    (slot, part)
                    for slot, part, place in zip(slots, parts, places, strict=True)
                    if place is None
                ]
                copied = pool.submit(self._fill, rest) if rest else None
            if copied is not None:
                copied.result()

    def _fill(self, slots: Sequence[tuple[_Slot, Bytes]]) -> None:
        with torch.no_grad():
            for slot, room in slots:
                for index, part in enumerate(slot.cut.parts):
                    rooms = _rooms(slot, room, part.wanted.bits)
                    for (box, owner), source in zip(slot.pieces, rooms, strict=True):
                        if owner == index:
                            part.wanted.view[slices_within(box, part.wanted.box)].copy_(source)

    def _run(self, lot: int) -> tuple[int, int, int]:
        lots = self._share.lots
        return int(lots.row[lot]), int(lots.first[lot]), int(lots.end[lot])

    def _slot(self, cut: Cut, parts: Sequence[Box]) -> _Slot:
        itemsize = self._views.itemsize(cut.row)
        within = boxes_of(cut, itemsize)
        pieces = [
            (common, index)
            for index, part in enumerate(parts)
            for piece in within
            if (common := intersect(piece, part)) is not None
        ]
        return _Slot(cut=cut, pieces=pieces, num_bytes=sum(box.num_elements for box, _ in pieces) * itemsize)

    def _bits(self, cut: Cut) -> torch.dtype:
        return _BITS[self._views.itemsize(cut.row)]


def _rooms(slot: _Slot, room: Bytes, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """The memory of each piece of a slot."""
    begin = 0
    for box, _ in slot.pieces:
        end = begin + box.num_elements * dtype.itemsize
        yield torch.from_numpy(room[begin:end]).view(dtype).view(box.lengths)
        begin = end


def _runs(indices: Ints, *keys: Ints) -> list[Ints]:
    """Cut indices where a key changes."""
    changes = np.zeros(len(indices), dtype=np.bool_)
    for key in keys:
        changes[1:] |= key[1:] != key[:-1]
    return np.split(indices, np.flatnonzero(changes)) if len(indices) else []
