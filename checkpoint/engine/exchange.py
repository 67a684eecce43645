"""Handing on what one rank reads for several, over connections made for one load.

Each rank runs two threads beside those that read what nobody else needs: one sends its bundles, read a little ahead,
to the ranks that need something of them, one receives those of others. Both go through them in the order of the job
(see ``checkpoint.engine.sharing``), so that nobody waits in a circle; reading, sending and copying overlap, and memory
is bounded by a few bundles.

To a *near* rank, which sees memory of this one, goes only where in it the lots lie. It copies what it wants from there
and says so, which frees the memory for a later bundle: nobody waits for that before all earlier bundles have been
announced, so a bundle counts as transferred when it is copied, and the order does what it did.

To others go messages with what they want and no more: of each lot, the receiver's parts in order of its wanted boxes.
Both ends work out the same layout from the same boxes, so no message needs a header.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import torch
from torch._C._distributed_c10d import Store

from checkpoint.boxes import Box, intersect, slices_within
from checkpoint.engine.connections import Connections, PeersLost
from checkpoint.engine.memory import Bytes
from checkpoint.engine.overlap import Ints, spread
from checkpoint.engine.read import PieceReader
from checkpoint.engine.segment import Segment, Segments
from checkpoint.engine.sharing import Share
from checkpoint.engine.views import Cut, Views, boxes_of, elements
from storage.spans import span

_NUM_AHEAD: Final = 2
"""Bundles being read while another one is sent."""

_NUM_SLOTS: Final = _NUM_AHEAD + 1
"""Bundles in shared memory: those, and one that is being copied.

A page of it takes longer to get from the system than to fill, so there is little of it, used again and again.
"""

_ALIGNMENT: Final = 64
"""Of lots in shared memory: PyTorch takes elements of 16 bytes to be aligned, and copies like whole cache lines."""

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
        machine: What :func:`checkpoint.engine.segment.this_machine` says.
        timeout_s: Longest wait for any other rank.
    """

    def __init__(
        self,
        reader: PieceReader,
        views: Views,
        share: Share,
        *,
        rank: int,
        machine: bytes,
        timeout_s: float,
    ) -> None:
        self._reader = reader
        self._views = views
        self._share = share
        self._rank = rank
        lots = share.lots
        self._own = np.flatnonzero(lots.reader == rank)  # lots that this rank reads
        self._bundles = _runs(self._own, lots.bundle[self._own])
        self._peers = sorted({*lots.reader.tolist(), *share.receiver.tolist()} - {rank})
        self._connections = Connections(rank, self._peers, timeout_s)
        self._segments = Segments(rank, machine, timeout_s)
        self._slot_bytes = 0  # that of this rank is cut into slots, for a bundle each
        self.num_bytes_received = 0

    def connect(self, store: Store) -> None:
        """Connect to the ranks that share something with this one, which all do so at the same time.

        Args:
            store: Shared by all ranks that exchange, and used by nobody else.

        Raises:
            PeersLost: Some did not come in time.
        """
        self._connections.open(store)
        sizes = [
            int(_begins([self._views.num_bytes(*self._run(lot)) for lot in bundle.tolist()])[-1])
            for bundle in self._bundles
        ]
        self._slot_bytes = max(sizes, default=0)
        num_bytes = min(_NUM_SLOTS, len(sizes)) * self._slot_bytes
        self._segments.open(self._connections, self._peers, num_bytes, store)

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
                pool.submit(self._closing_on_failure, work)
                for work in (self._send, self._receive, partial(self._reader.read_alone, shared))
            ]
            try:
                wait(tasks)
            except BaseException:  # an interrupt: nobody may go on waiting for the others
                self.close()
                raise
        failures = [error for task in tasks if (error := task.exception()) is not None]
        tasks.clear()  # an error that is raised here and is referred to from here would hold all that it came by
        # What this rank did itself says more than that its connections broke.
        failures.sort(key=lambda one: isinstance(one, PeersLost))
        if failures:
            raise failures.pop(0)

    def close(self) -> None:
        """Give the connections up. Not before all ranks are done: what is on its way could be lost."""
        self._connections.close()
        self._segments.close()

    def _closing_on_failure(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException:
            self.close()
            raise

    def _send(self) -> None:
        lots, own = self._share.lots, self._own
        self._reader.check_headers(spread(lots.first[own], lots.end[own] - lots.first[own]))
        with ThreadPoolExecutor(_NUM_AHEAD, thread_name_prefix="checkpoint-share") as pool:
            ahead: deque[Future[Mapping[int, Sequence[Bytes]]]] = deque()
            copying: deque[Sequence[int]] = deque()  # by slot in use, the oldest first: who copies from it
            for index, bundle in enumerate(self._bundles):
                if self._segments.own is not None and index >= _NUM_SLOTS:
                    self._segments.wait_until_copied(copying.popleft())
                ahead.append(pool.submit(self._read_bundle, bundle, index % _NUM_SLOTS))
                if len(ahead) > _NUM_AHEAD:
                    copying.append(self._hand_on(ahead.popleft().result()))
            while ahead:
                self._hand_on(ahead.popleft().result())

    def _hand_on(self, messages: Mapping[int, Sequence[Bytes]]) -> Sequence[int]:
        """Send the messages of a bundle; gives the near ranks among the receivers."""
        for receiver, message in messages.items():
            self._connections.send(receiver, [part.data for part in message])
        return [receiver for receiver in messages if receiver in self._segments.receivers]

    def _read_bundle(self, bundle: Ints, slot: int) -> Mapping[int, Sequence[Bytes]]:
        """Read the lots of a bundle, fill the views of this rank from them, and make the message to each receiver.

        Args:
            bundle: The lots.
            slot: Where in shared memory to read them, if anybody is near.
        """
        runs = [self._run(lot) for lot in bundle.tolist()]
        cuts = [self._views.cut(*run) for run in runs]
        places = [self._views.destination(*run) for run in runs]
        begins = slot * self._slot_bytes + _begins([cut.end - cut.begin for cut in cuts])[:-1]
        shared = self._segments.own
        raws = self._reader.read_raw(runs, places if shared is None else _lots_in(shared, begins, cuts))
        with torch.no_grad():
            for cut, raw, place in zip(cuts, raws, places, strict=True):
                self._put(cut, raw, place)
        wanted: dict[int, list[tuple[int, tuple[Box, ...]]]] = {}
        for index, (lot, cut) in enumerate(zip(bundle.tolist(), cuts, strict=True)):
            for receiver, parts in self._parts_of(lot, len(cut.box.offsets)).items():
                wanted.setdefault(receiver, []).append((index, tuple(parts)))
        messages: dict[int, Sequence[Bytes]] = {}
        # Replicas want the same and get the same: as many messages as there are different ones.
        made: dict[tuple[tuple[int, tuple[Box, ...]], ...], Sequence[Bytes]] = {}
        for receiver, parts_of_lots in sorted(wanted.items()):
            if receiver in self._segments.receivers:
                messages[receiver] = [begins[[index for index, _ in parts_of_lots]].view(np.uint8)]
                continue
            key = tuple(parts_of_lots)
            if key not in made:
                made[key] = [self._part(self._slot(cuts[index], parts), raws[index]) for index, parts in key]
            messages[receiver] = made[key]
        return messages

    def _put(self, cut: Cut, raw: Bytes, place: Bytes | None) -> None:
        """Fill the views of this rank from a lot, unless it was read to where it is wanted."""
        if place is None:
            self._views.fill(cut, raw)
        elif place is not raw:
            np.copyto(place, raw)

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
            copied: list[Future[None]] = []
            for message in _runs(others, lots.bundle[others], lots.reader[others]):
                reader = int(lots.reader[message[0]])
                runs = [self._run(lot) for lot in message.tolist()]
                cuts = [self._views.cut(*run) for run in runs]
                places = [self._views.destination(*run) for run in runs]
                slots = [self._slot(cut, [part.box for part in cut.parts]) for cut in cuts]
                num_bytes = sum(slot.num_bytes for slot in slots)
                self.num_bytes_received += num_bytes
                if reader in self._segments.others:
                    self._copy_shared(reader, cuts, places)
                    continue
                # Each in memory of its own and so aligned, as PyTorch takes elements of 16 bytes to be.
                parts = [
                    np.empty(slot.num_bytes, dtype=np.uint8) if place is None else place
                    for slot, place in zip(slots, places, strict=True)
                ]
                with span("checkpoint.exchange", shared=False, num_bytes=num_bytes):
                    self._connections.receive(reader, [part.data for part in parts])
                while copied:
                    copied.pop().result()
                rest = [
                    (slot, part)
                    for slot, part, place in zip(slots, parts, places, strict=True)
                    if place is None
                ]
                if rest:
                    copied.append(pool.submit(self._fill, rest))
            while copied:
                copied.pop().result()

    def _copy_shared(self, reader: int, cuts: Sequence[Cut], places: Sequence[Bytes | None]) -> None:
        """Hear from a near rank where lots lie, copy what is wanted of them, and say so."""
        begins = np.empty(len(cuts), dtype=np.int64)
        with span("checkpoint.exchange", shared=True):
            self._connections.receive(reader, [begins.view(np.uint8).data])
        num_bytes = sum(cut.end - cut.begin for cut in cuts)
        with span("checkpoint.copy", num_bytes=num_bytes), torch.no_grad():
            raws = _lots_in(self._segments.others[reader], begins, cuts)
            for cut, raw, place in zip(cuts, raws, places, strict=True):
                self._put(cut, raw, place)
        self._segments.say_copied(reader)

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


def _begins(sizes: Sequence[int]) -> Ints:
    """Where lots begin in a slot of shared memory, one after the other, and where the last one ends."""
    aligned = -(-np.asarray(sizes, dtype=np.int64) // _ALIGNMENT) * _ALIGNMENT
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(aligned)])


def _lots_in(segment: Segment, begins: Ints, cuts: Sequence[Cut]) -> list[Bytes]:
    """The memory of lots."""
    return [
        segment.memory[begin : begin + cut.end - cut.begin]
        for begin, cut in zip(begins.tolist(), cuts, strict=True)
    ]


def _runs(indices: Ints, *keys: Ints) -> list[Ints]:
    """Cut indices where a key changes."""
    changes = np.zeros(len(indices), dtype=np.bool_)
    for key in keys:
        changes[1:] |= key[1:] != key[:-1]
    return np.split(indices, np.flatnonzero(changes)) if len(indices) else []
