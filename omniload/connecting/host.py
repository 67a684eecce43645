"""`connect`: from the host of a loader to one that shares what it loads with other ranks, or receives it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, Union

import pyarrow as pa
import torch.distributed as dist

from omniload.connecting.board import Board
from omniload.connecting.circles import Circle, StageOrder, View, circles_of
from omniload.connecting.messages import StepReader, StepWriter, error_from_json, error_to_json
from omniload.connecting.peers import Peers, digest_of
from omniload.connecting.runtime import ReceiverRuntime, SourceRuntime
from omniload.errors import MixtureError, PlaceError
from omniload.identity import Identity
from omniload.lazy import lazy
from omniload.mixture import Mixture
from omniload.pieces import Failure
from omniload.place import Place
from omniload.placing import ClientPlaceTree
from omniload.placing.axes import SHARED_AXES
from omniload.planner import Plan, StreamState
from omniload.runtime.options import Settings
from omniload.runtime.steps import Host, Runtime, Step

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Mesh: TypeAlias = Union["DeviceMesh", ClientPlaceTree, Mapping[str, int], str]
"""All ranks of a job by axis: a DeviceMesh, sizes by axis with the outermost first, or those written ``dp=2,tp=4``."""
_ELSEWHERE: dict[str, Any] = {
    "sources": {"__all__": {"path": True, "storage_options": True}},
    **dict.fromkeys(("tokenizer", "quarantine", "execution", "ray"), True),
}
"""What ranks may be told otherwise: where things are, and where the roles run."""


class SourceHost:
    """The host of a rank that loads, for itself and the others of its circle.

    Args:
        host: its own.
        peers: the circle.
        mixture: the mixture.
        lanes: this rank's lanes.
    """

    def __init__(self, host: Host, peers: Peers, mixture: Mixture, lanes: Sequence[int]) -> None:
        self._host = host
        self._peers = peers
        self._names = mixture.names
        self._writer = StepWriter(mixture.names, lanes)

    def identity(self) -> Identity:
        """See `Host.identity`."""
        return self._host.identity()

    def urls(self, source: int) -> list[str]:
        """See `Host.urls`."""
        return self._host.urls(source)

    def failures(self) -> list[Failure]:
        """See `Host.failures`."""
        return self._host.failures()

    def origins(self, plan: Plan, lane: int) -> pa.Table:
        """See `Host.origins`."""
        return self._host.origins(plan, lane)

    def start(self, state: StreamState) -> Runtime:
        """Begin to load, and to send what is loaded once all ranks of the circle began."""
        return SourceRuntime(self._peers, state, self._names, self._host.start(state), self._writer)

    def close(self) -> None:
        """See `Host.close`."""
        self._host.close()


class ReceiverHost:
    """The host of a rank that opens no source and plans nothing, unless it is asked where its tokens come from.

    Args:
        peers: the circle.
        mixture: the mixture.
        lanes: this rank's lanes.
        derived: which of `omniload.constructor.DERIVED` they have.
        identity: of the stream, as the source found it.
        reopen: makes the host that this rank would have by itself.
    """

    def __init__(
        self,
        peers: Peers,
        mixture: Mixture,
        lanes: Sequence[int],
        derived: Sequence[str],
        identity: Identity,
        reopen: Callable[[], Host],
    ) -> None:
        self._peers = peers
        self._names = mixture.names
        place = peers.circle.ranks.index(peers.rank)
        self._reader = StepReader(mixture.names, lanes, peers.circle.views[place], derived)
        self._identity = identity
        self._reopen = reopen

    @lazy
    def _own(self) -> Host:
        return self._reopen()

    def identity(self) -> Identity:
        """As the source found it."""
        return self._identity

    def urls(self, source: int) -> list[str]:
        """See `Host.urls`; opens the sources."""
        return self._own.urls(source)

    def failures(self) -> list[Failure]:
        """None: this rank reads no rows."""
        return []

    def origins(self, plan: Plan, lane: int) -> pa.Table:
        """See `Host.origins`; opens the sources."""
        return self._own.origins(plan, lane)

    def start(self, state: StreamState) -> Runtime:
        """Begin to receive."""
        return ReceiverRuntime(self._peers, state, self._names, self._reader)

    def close(self) -> None:
        """Let go of the sources, if they were opened."""
        if "_own" in self.__dict__:
            self._own.close()


def connect(
    host: Host,
    mesh: Mesh,
    *,
    mixture: Mixture,
    place: Place,
    lanes: Sequence[int],
    settings: Settings,
    state: StreamState,
    broadcast: Sequence[str] | None,
    timeout_s: float,
    context_parallel: str | None,
    stage_order: StageOrder,
    reopen: Callable[[], Host],
) -> Host:
    """The host in place of ``host``, of all ranks of the job at once: see `omniload.client.MixtureLoader.connect`.

    Raises:
        PlaceError: the mesh is not that of the job and of the loader, or an argument is none that can be.
        MixtureError: a rank has another mixture, or was told otherwise how to load it.
        LoaderTimeout: a rank does not answer.
    """
    if not dist.is_initialized():
        raise PlaceError(
            "connect: there is no process group; call torch.distributed.init_process_group before"
        )
    rank = dist.get_rank()
    board = Board(rank, dist.get_world_size())

    def circles_over(axes: Sequence[str]) -> list[Circle]:
        if not 0 < timeout_s < math.inf:
            raise ValueError(f"timeout_s: {timeout_s} must be positive and finite")
        if isinstance(host, SourceHost | ReceiverHost):
            raise PlaceError(
                "connect: this loader is connected already; make another one to connect it otherwise"
            )
        tree = _tree_of(mesh)
        own = tree.place(rank)
        if own != place:
            raise PlaceError(
                f"mesh: rank {rank} is data-parallel rank {own.dp_rank} of {own.dp_size} in it, and {place.dp_rank} of"
                f" {place.dp_size} by what the loader was told; give both the same mesh"
            )
        return circles_of(tree, axes, slicing=context_parallel, stage_order=stage_order)

    circles: list[Circle] = []
    met: Exception | None = None
    try:
        circles = circles_over(SHARED_AXES if broadcast is None else broadcast)
    except Exception as error:  # the others are told before they wait for this rank in a group
        met = error
    # A rank waits for a source that may itself wait as long as it was told to.
    patience_s = settings.timeout_s + (timeout_s if 0 < timeout_s < math.inf else 0.0)
    board.meet(met, patience_s)
    peers = Peers(circles, rank, patience_s, board)
    told = [mixture.model_dump(mode="json", exclude=_ELSEWHERE), settings.split, list(settings.derived)]
    other = peers.agree(digest_of(told), about="connect")
    if other is not None:
        raise MixtureError(
            f"connect: rank {other[0]} has another mixture than rank {peers.circle.source}, or another split or"
            " derived; give all ranks the same"
        )
    if broadcast is None and mixture.strategy is not None:
        marked = _share(peers, lambda: list(_marked(host, state)))
        if marked and set(marked) != set(SHARED_AXES):
            peers = Peers(circles_over(marked), rank, patience_s, board)
    if peers.circle == Circle(ranks=(rank,), views=(View(),)):
        return host  # nobody to share with, nothing to leave out
    identity = _identity_of(_share(peers, lambda: host.identity().to_json()))
    if peers.is_source:
        return SourceHost(host, peers, mixture, lanes)
    host.close()
    return ReceiverHost(peers, mixture, lanes, settings.derived, identity, reopen)


def _tree_of(mesh: Mesh) -> ClientPlaceTree:
    if isinstance(mesh, str):
        return ClientPlaceTree.parse(mesh, world_size=dist.get_world_size())
    if isinstance(mesh, Mapping):
        return ClientPlaceTree.of(mesh, world_size=dist.get_world_size())
    if isinstance(mesh, ClientPlaceTree):
        return ClientPlaceTree.of(
            dict(zip(mesh.names, mesh.sizes, strict=True)), world_size=dist.get_world_size()
        )
    return ClientPlaceTree.from_mesh(mesh)


def _share(peers: Peers, find: Callable[[], object]) -> Any:
    """What the source finds, or the error that it meets, on all ranks."""
    data = b""
    if peers.is_source:
        try:
            data = json.dumps({"found": find()}).encode()
        except Exception as error:
            peers.share(json.dumps({"error": error_to_json(error)}).encode(), "connect")
            raise
    shared: dict[str, Any] = json.loads(peers.share(data, "connect"))
    if "error" in shared:
        raise error_from_json(shared["error"])
    return shared["found"]


def _marked(host: Host, state: StreamState) -> tuple[str, ...]:
    """The axes along which the strategy wants the backbone's lanes broadcast, by the plan of the next step."""
    runtime = host.start(state)
    try:
        item = runtime.next_step()
    finally:
        runtime.stop()
    if not isinstance(item, Step):
        return ()  # nothing to broadcast; whoever iterates is told of the error, or the end
    backbone = dict(item.plan.placement).get("backbone")
    return backbone.broadcast if backbone else ()


def _identity_of(values: Mapping[str, Any]) -> Identity:
    """Inverse of `Identity.to_json`."""
    sources = {
        name: (str(of), str(data), int(files)) for name, (of, data, files) in values["sources"].items()
    }
    return Identity(shape=values["shape"], tokenizer=values["tokenizer"], sources=sources)
