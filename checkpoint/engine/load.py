"""Loading: open, match, read, apply. Each stage is a round, so that all ranks go on or none does."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np

from checkpoint.engine.connections import PeersLost
from checkpoint.engine.coordination import Coordinator
from checkpoint.engine.exchange import Exchange
from checkpoint.engine.match import LoadOptions, Match, StoredView, check_shared, check_unexpected, match
from checkpoint.engine.messages import pack, unpack
from checkpoint.engine.read import PieceReader, ReadStats
from checkpoint.engine.segment import this_machine
from checkpoint.engine.sharing import Share, decode_share, decode_wants, encode_wants, share_reads
from checkpoint.engine.views import Views
from checkpoint.errors import CoordinationTimeout
from checkpoint.format.manifest import MANIFEST, decode_manifest, read_manifest
from checkpoint.frameworks.rng import derive_rng
from checkpoint.frameworks.values import Found, LocalTensor, Stored
from checkpoint.stored import StoredCheckpoint
from storage import Store
from storage.spans import span


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """What a load did.

    Attributes:
        url: Where the checkpoint is.
        step: Its step number, if it has one.
        attempt: Id of the committed attempt.
        matched: Tensors that this rank's state has and that were filled, as ``group/key``; an optimizer's included.
        missing: What of the state the checkpoint lacks, left as it was; on this rank. Groups by their names, tensors
            and plain values of other groups as ``group/key``.
        unexpected: Tensors of the checkpoint that no rank's state has; only in groups that the state names.
        converted: Those of ``matched`` whose element type is not the stored one.
        rng_restored: Whether the generators of random numbers were set back to what this rank saved. On another
            number of ranks they are seeded from the run, the step and the rank instead.
        num_bytes_read: Payload bytes that this rank read.
        num_bytes_received: Payload bytes that other ranks read for this one.
        num_bytes_wanted: Stored bytes that this rank needed, each counted once.
    """

    url: str
    step: int | None
    attempt: str
    matched: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    converted: tuple[str, ...]
    rng_restored: bool
    num_bytes_read: int
    num_bytes_received: int
    num_bytes_wanted: int

    @property
    def num_tensors(self) -> int:
        """How many tensors were filled on this rank."""
        return len(self.matched)


Targets = Callable[[Stored], Found]
Finish = Callable[[Stored, Sequence[LocalTensor], Mapping[str, object] | None], None]

_RoundOf = Callable[[str, Callable[[], bytes], Callable[[list[bytes]], bytes | list[bytes]]], bytes]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Own:
    """What this rank wants of a checkpoint; ``checkpoint`` is narrowed to the tensors that it needs."""

    checkpoint: StoredCheckpoint
    stored: StoredView
    match: Match
    views: Views
    rank_objects: Mapping[str, object] | None  # of this rank, if the checkpoint was saved on as many


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Plan:
    """What this rank does; all ranks have agreed to do theirs."""

    own: _Own
    unexpected: tuple[str, ...]
    share: Share | None
    anyone_shares: bool


class Loader:
    """Loads of one rank.

    Args:
        coordinator: This rank's seat.
        machine: What ranks that may share memory have in common; by default, that they run on one machine.
    """

    def __init__(self, coordinator: Coordinator, machine: bytes | None = None) -> None:
        self._coordinator = coordinator
        self._machine = machine or this_machine()

    def next_call(self) -> str:
        """A name for the rounds of one load, to be taken before anything can fail; equal on all ranks."""
        return self._coordinator.next_call("load")

    def checking_arguments(self, name: str, timeout_s: float) -> AbstractContextManager[None]:
        """What is raised in it fails the load of this name on all ranks: to the others, this one failed to open."""
        return self._coordinator.checking(name, "open", timeout_s)

    def load(
        self,
        store: Store,
        groups: Sequence[str],
        targets: Targets,
        finish: Finish,
        options: LoadOptions,
        *,
        name: str | None = None,
    ) -> LoadReport:
        """Load; see ``checkpoint.load``.

        Args:
            store: The checkpoint directory.
            groups: Top-level names of the state.
            targets: Gives the tensors to fill; must not change the state.
            finish: Applies everything that is not tensor bytes, once they have arrived.
            options: How.
            name: Of the call, if the caller has taken one with :meth:`next_call`.

        Raises:
            NotACheckpoint, FormatError, CorruptCheckpoint, TilingError, MismatchError: On all ranks alike; all but
                CorruptCheckpoint before the state is touched.
        """
        name = name or self.next_call()

        def round_of(
            stage: str, local: Callable[[], bytes], decide: Callable[[list[bytes]], bytes | list[bytes]]
        ) -> bytes:
            return self._coordinator.round(name, stage, local, decide, timeout_s=options.timeout_s)

        with span("checkpoint.open", path=store.url):
            checkpoint = _open(store, round_of)
        with span("checkpoint.match", path=store.url):
            plan = self._plan(checkpoint, groups, targets, round_of, options)
        stats = self._read(name, plan, round_of, options)

        manifest = checkpoint.manifest

        def apply() -> bytes:
            finish(plan.own.stored, plan.own.match.targets, plan.own.rank_objects)
            if plan.own.rank_objects is None:
                derive_rng(int(manifest.run_id, 16), manifest.step or 0, self._coordinator.rank)
            return b""

        round_of("apply", apply, _nothing)
        return LoadReport(
            url=store.url,
            step=manifest.step,
            attempt=manifest.attempt,
            matched=tuple(f"{tensor.group}/{tensor.key}" for tensor in plan.own.match.targets),
            missing=tuple(sorted(plan.own.match.missing)),
            unexpected=plan.unexpected,
            converted=tuple(plan.own.match.converted),
            rng_restored=plan.own.rank_objects is not None,
            num_bytes_read=stats.num_bytes_read,
            num_bytes_received=stats.num_bytes_received,
            num_bytes_wanted=stats.num_bytes_wanted,
        )

    def _plan(
        self,
        checkpoint: StoredCheckpoint,
        groups: Sequence[str],
        targets: Targets,
        round_of: _RoundOf,
        options: LoadOptions,
    ) -> _Plan:
        """Find out what goes where and who reads it, and that it fits, before any payload is read."""
        own: _Own | None = None

        def local() -> bytes:
            nonlocal own
            own = self._look(checkpoint, targets, options)
            known = np.zeros(len(checkpoint.catalog.tensors), dtype=bool)
            known[own.match.ids] = True
            return pack([np.packbits(known).tobytes(), encode_wants(own.views.wants)])

        def decide(messages: list[bytes]) -> list[bytes]:
            assert own is not None
            checkpoint.check_files()
            num_tensors = len(checkpoint.catalog.tensors)
            packed, encoded = zip(*map(unpack, messages), strict=True)
            known = np.bitwise_or.reduce([np.frombuffer(one, dtype=np.uint8) for one in packed])
            is_known = np.unpackbits(known, count=num_tensors).astype(bool).tolist() if num_tensors else []
            unexpected = json.dumps(check_unexpected(checkpoint, is_known, groups, options)).encode()
            if len(messages) == 1:
                return [pack([unexpected, b"", b""])]
            wants = [decode_wants(one) for one in encoded]
            needed = {one for want in wants for one in np.unique(want.tensor_id).tolist()}
            has_all = needed == {one.tensor_id for one in own.match.wanted}
            tables = (own.checkpoint if has_all else checkpoint.narrowed(needed)).tables
            is_local = checkpoint.data.local_path("") is not None
            shares = share_reads(tables, wants, verify=options.verify, is_local=is_local)
            anyone_shares = b"+" if any(shares) else b""
            return [pack([unexpected, share, anyone_shares]) for share in shares]

        unexpected, share, anyone_shares = unpack(round_of("match", local, decide))
        assert own is not None
        return _Plan(
            own=own,
            unexpected=tuple(json.loads(unexpected)),
            share=decode_share(share, own.checkpoint.tables.boxes),
            anyone_shares=bool(anyone_shares),
        )

    def _look(self, checkpoint: StoredCheckpoint, targets: Targets, options: LoadOptions) -> _Own:
        """Read the metadata that this rank needs, and find the place of everything."""
        stored = StoredView(checkpoint)
        found = match(checkpoint, stored, targets(stored), options)
        needed = {one.tensor_id for one in found.wanted}
        narrow = checkpoint.narrowed(needed)
        narrow.tables.check_tilings(needed)
        check_shared(narrow.tables, found.wanted, checkpoint.store.url)
        rank_objects: Mapping[str, object] | None = None
        if checkpoint.manifest.writer.get("world_size") == self._coordinator.world_size:
            rank_objects = checkpoint.rank_objects(self._coordinator.rank) or None
        return _Own(
            checkpoint=narrow,
            stored=stored,
            match=found,
            views=Views(narrow.tables, found.wanted),
            rank_objects=rank_objects,
        )

    def _read(self, name: str, plan: _Plan, round_of: _RoundOf, options: LoadOptions) -> ReadStats:
        reader = PieceReader(plan.own.checkpoint, plan.own.views, verify=options.verify)
        exchange: Exchange | None = None
        if plan.share is not None:
            exchange = Exchange(
                reader,
                plan.own.views,
                plan.share,
                rank=self._coordinator.rank,
                machine=self._machine,
                timeout_s=options.timeout_s,
            )

        def of_exchange(work: Callable[[Exchange], None]) -> bytes:
            try:
                if exchange is not None:
                    work(exchange)
            except PeersLost as error:
                return str(
                    error
                ).encode()  # no failure of this rank: what happened to the other one is to be told
            return b""

        def connect(exchange: Exchange) -> None:
            exchange.connect(self._coordinator.connect(f"{name}/exchange"))

        def read() -> bytes:
            if exchange is None:
                reader.read_alone(np.zeros(0, dtype=np.int64))
            return of_exchange(Exchange.run)

        try:
            if plan.anyone_shares:
                round_of("connect", lambda: of_exchange(connect), _none_lost)
            round_of("read", read, _none_lost)
        finally:
            if exchange is not None:
                exchange.close()
        return ReadStats(
            num_bytes_read=reader.num_bytes_read,
            num_bytes_received=exchange.num_bytes_received if exchange is not None else 0,
            num_bytes_wanted=plan.own.views.num_bytes_wanted(),
        )


def _open(store: Store, round_of: _RoundOf) -> StoredCheckpoint:
    """Agree on the attempt: rank 0 reads the manifest, since it may be replaced at any time."""
    data = round_of("open", bytes, lambda _: read_manifest(store)[1])
    return StoredCheckpoint(store, decode_manifest(data, f"{store.url}/{MANIFEST}"))


def _none_lost(lost: list[bytes]) -> bytes:
    for rank, message in enumerate(lost):
        if message:
            raise CoordinationTimeout(
                f"rank {rank} lost its connections to the ranks that it exchanges what they read with, though none of "
                f"them failed ({message.decode()}); look at the network between them"
            )
    return b""


def _nothing(_: list[bytes]) -> bytes:
    return b""
