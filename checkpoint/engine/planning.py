"""Planning a save: from what each rank holds to what each rank writes, agreed by all.

The plan of an earlier save is used again when *every* rank still holds exactly what it held then. Each compares that
for itself and votes with the name of the plan; equal votes travel as one, so a save of a known state costs each rank
a look at its own shards, and rank 0 nothing that grows with the number of boxes.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from checkpoint.compression import Compression, check_used
from checkpoint.engine.commit import already_committed
from checkpoint.engine.coordination import Coordinator
from checkpoint.engine.files import FileLayout, lay_out
from checkpoint.engine.metadata import TableEncoder
from checkpoint.engine.options import SaveOptions
from checkpoint.errors import ObjectsDiffer
from checkpoint.format.digest import digest_hex
from checkpoint.format.manifest import MANIFEST
from checkpoint.format.objects import decode_objects, encode_objects, first_difference
from checkpoint.frameworks.values import CapturedState, LocalTensor
from checkpoint.planner import describe, make_plan, positions_in
from storage import Store

# A job may save two states in turn, such as all of it, and the model alone.
_MAX_KNOWN: Final = 2

# All that a plan depends on, of one rank: group, key, dtype, shape and boxes of each tensor, and whether replicas may
# differ; and the compression.
_Held: TypeAlias = tuple[object, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlannedSave:
    """What all ranks agreed to do.

    Attributes:
        attempt: 32 hex digits, new for every attempt.
        run_id: 32 hex digits, the same for all saves of a job.
        captured: What this rank has to save.
        layouts: The payload files that it is to write.
        tables: Encodes the metadata; on rank 0 only.
        objects: Encoded global objects; on rank 0 only.
    """

    attempt: str
    run_id: str
    captured: CapturedState
    layouts: list[FileLayout]
    tables: TableEncoder | None
    objects: bytes


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Known:
    name: str
    held: _Held
    layouts: list[FileLayout]
    tables: TableEncoder | None


class SavePlanner:
    """Plans the saves of one rank.

    Args:
        coordinator: This rank's seat.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._run_id = uuid.uuid4().hex
        self._known: list[_Known] = []  # the one used last comes last

    def plan(
        self, name: str, store: Store, capture: Callable[[], CapturedState], options: SaveOptions
    ) -> PlannedSave:
        """Plan one save together with all ranks.

        Args:
            name: Of the call, equal on all ranks.
            store: The checkpoint directory.
            capture: Describes the state; its errors reach all ranks.
            options: How to save.

        Raises:
            AlreadyCommitted: The place holds a checkpoint that is not to be replaced.
            ObjectsDiffer: Ranks differ in what must be equal.
            StateError, TilingError: The state cannot be saved.
            RanksFailed: Some ranks could not take part.
            CoordinationTimeout: Some ranks did not come.
        """
        captured: CapturedState | None = None
        encoded: dict[str, bytes] = {}
        matching: dict[str, _Known] = {}

        def local() -> bytes:
            nonlocal captured
            captured = capture()
            for group, tree in captured.objects.items():
                encoded[group] = encode_objects(tree, group)
            held = _held(captured.tensors, options.compression)
            matching.update((one.name, one) for one in reversed(self._known) if one.held == held)
            # Whatever shapes the outcome must be the same everywhere, so it takes part in the vote.
            vote = {
                "objects": {group: digest_hex(data) for group, data in encoded.items()},
                "url": store.url,
                "step": options.step,
                "overwrite": options.overwrite,
                "compression": list((options.compression or {}).items()),
                "plans": list(matching),
            }
            return _pack(vote, b"" if matching else describe(captured.tensors))

        made: TableEncoder | None = None

        def make(header: Mapping[str, object], rows: Sequence[bytes]) -> list[bytes]:
            nonlocal made
            plan = make_plan(rows)
            check_used(options.compression or {}, [(tensor.group, tensor.key) for tensor in plan.tensors])
            made = TableEncoder(plan)
            return [_pack(header, share) for share in plan.shares()]

        def decide(messages: list[bytes]) -> bytes | list[bytes]:
            firsts: dict[bytes, int] = {}  # the first rank with each message, and then with each head of one
            for rank, message in enumerate(messages):
                firsts.setdefault(message, rank)
            heads: dict[bytes, int] = {}
            for message, rank in firsts.items():
                heads.setdefault(_head(message), rank)
            votes = {rank: json.loads(head) for head, rank in heads.items()}
            differing = _differing(votes)
            if differing is not None:
                return _pack({"differ": differing}, b"")
            if not options.overwrite and store.exists(MANIFEST):
                raise already_committed(store)
            header = {"attempt": uuid.uuid4().hex, "run_id": self._run_id}
            plans = [vote["plans"] for vote in votes.values()]
            if not any(plans):
                return make(header, [_payload(message) for message in messages])
            # A plan that fits on all ranks, or else all over again: on some rank something differs.
            common = [name for name in plans[0] if all(name in others for others in plans)]
            return _pack({**header, "plan": common[0] if common else None}, b"")

        def describe_all() -> bytes:
            assert captured is not None
            return describe(captured.tensors)

        def round_of(stage: str, local: Callable[[], bytes], decide: Any) -> tuple[dict[str, Any], bytes]:
            answer = self._coordinator.round(name, stage, local, decide, timeout_s=options.timeout_s)
            return json.loads(_head(answer)), _payload(answer)

        header, share = round_of("plan", local, decide)
        if "differ" in header:
            self._raise_difference(name, header["differ"], encoded, options.timeout_s)
        if "plan" in header and header["plan"] is None:
            again = {key: header[key] for key in ("attempt", "run_id")}
            header, share = round_of("describe", describe_all, lambda rows: make(again, rows))
        assert captured is not None
        if "plan" in header:
            known = matching[header["plan"]]
        else:
            known = self._remember(header["attempt"], captured.tensors, share, made, options.compression)
        self._known = [*(one for one in self._known if one is not known), known][-_MAX_KNOWN:]
        leads = self._coordinator.rank == 0
        return PlannedSave(
            attempt=header["attempt"],
            run_id=header["run_id"],
            captured=captured,
            layouts=known.layouts,
            tables=known.tables,
            objects=encode_objects(captured.objects, "state") if leads else b"",
        )

    def _remember(
        self,
        name: str,
        tensors: Sequence[LocalTensor],
        share: bytes,
        tables: TableEncoder | None,
        compression: Compression | None,
    ) -> _Known:
        positions = positions_in(share, sum(len(tensor.boxes) for tensor in tensors))
        layouts = lay_out(self._coordinator.rank, tensors, positions, compression or {})
        return _Known(name=name, held=_held(tensors, compression), layouts=layouts, tables=tables)

    def _raise_difference(
        self, name: str, groups: list[str], encoded: Mapping[str, bytes], timeout_s: float
    ) -> None:
        """Find out together which path of the global objects differs, and raise it."""

        def local() -> bytes:
            return json.dumps(
                {group: encoded[group].decode() for group in groups if group in encoded}
            ).encode()

        def decide(messages: list[bytes]) -> bytes:
            raise _objects_differ([json.loads(message) for message in messages], groups)

        self._coordinator.round(name, "objects", local, decide, timeout_s=timeout_s)


def _held(tensors: Sequence[LocalTensor], compression: Compression | None) -> _Held:
    return tuple((compression or {}).items()), [
        (one.group, one.key, one.dtype, one.shape, one.boxes, one.may_differ) for one in tensors
    ]


def _differing(votes: Mapping[int, dict[str, Any]]) -> list[str] | None:
    """Groups whose objects are not equal on all ranks; None if all are.

    Args:
        votes: Those that are not equal, each by the first rank with it.

    Raises:
        ObjectsDiffer: The ranks were called with different arguments.
    """
    first = votes[0]
    for rank, vote in votes.items():
        for name in ("url", "step", "overwrite", "compression"):
            if vote[name] != first[name]:
                raise ObjectsDiffer(
                    f"save was called with {name}={vote[name]!r} on rank {rank} but {first[name]!r} on rank 0; "
                    "all ranks must save the same thing to the same place"
                )
    objects = [vote["objects"] for vote in votes.values()]
    groups = sorted({group for one in objects for group in one})
    differing = [group for group in groups if len({one.get(group) for one in objects}) > 1]
    return differing or None


def _objects_differ(trees: list[dict[str, str]], groups: list[str]) -> ObjectsDiffer:
    for group in groups:
        for rank, tree in enumerate(trees):
            if (group in tree) != (group in trees[0]):
                holders = [one for one, other in enumerate(trees) if group in other]
                return ObjectsDiffer(f"state key {group!r} is on ranks {holders} only; pass it on all ranks")
            if tree.get(group) == trees[0].get(group):
                continue
            left, right = (decode_objects(one[group].encode(), group) for one in (trees[0], tree))
            path = first_difference(left, right, group)
            return ObjectsDiffer(
                f"{path}: differs between rank 0 and rank {rank}; what is not a tensor must be equal on all ranks"
            )
    raise AssertionError("equal objects have equal digests")


def _pack(header: Mapping[str, object], payload: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + payload


def _head(message: bytes) -> bytes:
    return message[8 : 8 + int.from_bytes(message[:8], "little")]


def _payload(message: bytes) -> bytes:
    return message[8 + int.from_bytes(message[:8], "little") :]
