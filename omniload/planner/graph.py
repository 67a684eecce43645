"""One step while it is planned: a graph of metadata, and the primitives that a strategy builds it with.

::

    samples ──pack──► packs ──balance──► lanes        nodes: rows of tables; edges: arrays of indices
    ▲ mix                   ▲ cost

A *strategy* is a function of a `DGraph`. It draws samples, packs them, says what they cost, balances the packs over the
lanes, and declares for each module of the model (the backbone, the image encoder, …) over which axis of the mesh its
work is distributed and along which axes it is received by broadcast::

    def strategy(graph: DGraph) -> Plan:
        graph.mix().pack("best_fit").cost("attention").balance("kk")
        graph.distribute("dp").broadcast_at("cp", "tp")
        graph.view("image").distribute("world")
        return graph.plan()

The primitives are those of MegaScale-Data (arXiv 2504.09844, §4). Unlike there, what depends on the mesh is declared
and not computed here: a plan is the same for every mesh, and `omniload.placing` derives from it who does what.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, Self

import numpy as np

from omniload.errors import PlanError
from omniload.mixture import ROWS_OF_ANY_LENGTH
from omniload.pieces import UNITS, Encoder, join_pieces
from omniload.placing.axes import AXES
from omniload.planner.arrange import Packer, Packs, packer
from omniload.planner.checks import shown
from omniload.planner.costs import MODULES, CostModel, cost_model
from omniload.planner.lanes import Balancer, CapsUnmet, balancer_of, choose_and_balance
from omniload.planner.packing import held_back
from omniload.planner.plan import Placement, Plan
from omniload.planner.rules import COUNTED, StepRules, piece_costs
from omniload.suggest import suggest


class Draw(Protocol):
    """Draws samples until a step can be filled."""

    def __call__(
        self, candidates: np.ndarray, tokens: int, pieces: int, weights: Mapping[str, float] | None
    ) -> np.ndarray:
        """``PIECE[n]``, drawn until with the candidates there are so many tokens or pieces, or the sources end.

        Args:
            candidates: ``PIECE[n]`` that are there.
            tokens: wanted in all.
            pieces: wanted in all.
            weights: of the sources by name; None for those in force at this step.
        """


class NotEnough(Exception):
    """The sources give no more, and what is there does not fill the step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Edge:
    """One transform of the step, from one kind of nodes to another: a line of the lineage."""

    name: str
    """The primitive, and how: ``pack best_fit``."""
    num_in: int
    """Nodes it was given."""
    num_out: int
    """Nodes it made, or chose."""


class DGraph:
    """A step being planned. Every primitive returns the graph, so that they can be chained.

    Args:
        step: its index.
        rules: how the mixture wants its steps shaped: what the primitives do if they are not told otherwise.
        carried: ``PIECE[n]`` from earlier steps.
        draw: where more samples come from.
    """

    def __init__(self, *, step: int, rules: StepRules, carried: np.ndarray, draw: Draw) -> None:
        self.step = step
        self.rules = rules
        self.lineage: list[Edge] = []
        self._draw = draw
        self._candidates = carried
        self._weights: Mapping[str, float] | None = None
        self._scale = 1
        self._thresholds: tuple[int, ...] = ()
        self._max_delay_steps = 0
        self._held = np.zeros(len(carried), bool)
        self._model = rules.cost
        self._packs: Packs | None = None
        self._pack_costs: np.ndarray | None = None  # of those packs by that model, once asked for
        self._method: str | Packer | None = None  # of packing
        self._lanes: np.ndarray | None = None  # packs in the order of their lanes
        self._placement: dict[str, Placement] = {}

    @property
    def candidates(self) -> np.ndarray:
        """``PIECE[n]``, read-only: what the step may take; carried pieces, then those drawn, in the order drawn."""
        candidates = self._candidates.view()
        candidates.flags.writeable = False
        return candidates

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that the cost model knows, the backbone first."""
        return self._model.modules

    def mix(
        self,
        weights: Mapping[str, float] | None = None,
        *,
        tokens: int | None = None,
        pieces: int | None = None,
    ) -> Self:
        """Draw samples by largest deficit until a step can be filled.

        Args:
            weights: share of each source by name; those of the mixture's schedule by default.
            tokens: draw until there are so many; by default somewhat more than the step takes.
            pieces: draw until there are so many.
        """
        self._weights = weights
        enough = self.rules.enough(self._scale)
        tokens, pieces = enough[0] if tokens is None else tokens, enough[1] if pieces is None else pieces
        num_carried = len(self._candidates)
        while True:
            # What waits for later steps is there in addition.
            waiting = self._candidates[self._held]
            drawn = self._draw(
                self._candidates,
                tokens + int(waiting["length"].sum(dtype=np.int64)),
                pieces + len(waiting),
                weights,
            )
            self._candidates = join_pieces([self._candidates, drawn])
            self._hold_back()
            if not len(drawn) or not self._held[len(self._held) - len(drawn) :].any():
                break
        self.lineage.append(Edge(name="mix", num_in=num_carried, num_out=len(self._candidates)))
        return self

    def delay(self, thresholds: tuple[int, ...] | None = None, *, max_steps: int | None = None) -> Self:
        """Let outliers wait until there is one for every lane: the delay queue of WLB-LLM (arXiv 2503.17924).

        To be said before `mix`, which draws other samples in place of those that wait.

        Args:
            thresholds: tokens from which on a piece is an outlier of each level, ascending.
            max_steps: after so many steps a piece waits no more.

        Raises:
            PlanError: the thresholds do not ascend, or nothing says how long a piece waits.
        """
        self._thresholds = self.rules.delay_thresholds if thresholds is None else thresholds
        self._max_delay_steps = self.rules.max_delay_steps if max_steps is None else max_steps
        if list(self._thresholds) != sorted(set(self._thresholds)):
            raise PlanError(f"delay: thresholds {list(self._thresholds)} do not ascend: reorder them")
        if self._thresholds and self._max_delay_steps < 1:
            raise PlanError(
                f"delay: max_steps {self._max_delay_steps} lets no piece wait; give max_steps of at least 1"
            )
        self._hold_back()
        self.lineage.append(
            Edge(name="delay", num_in=len(self._candidates), num_out=int((~self._held).sum()))
        )
        return self

    def cost(self, model: CostModel | str | Callable[..., np.ndarray] | None = None) -> Self:
        """Say what packs cost, from lengths alone.

        Args:
            model: a cost model, the name of one, or a function ``(length, patches, frames) -> int64[n]`` or
                ``int64[modules, n]``; by default the mixture's, or measured coefficients where those are decided on.
        """
        self._model, self._pack_costs = self.rules.cost if model is None else cost_model(model), None
        return self

    def pack(self, method: str | Packer | None = None) -> Self:
        """Put candidates into packs; draws more if they are too few.

        Args:
            method: ``best_fit``, ``first_fit``, ``concatenate``, ``workload``, ``none``, or a function
                ``(lengths, capacity) -> int64[n]``: the pack of each candidate, or -1 to let it wait. The mixture's by
                default.

        Raises:
            NotEnough: the sources have no more.
            PlanError: there is no such method, it is not one for lanes filled by ``lane_tokens``, a piece is over a
                cap, or a function's answer breaks the rules.
        """
        name, pack = packer(self.rules.packing if method is None else method)
        if self.rules.packs is None and name != "none":
            raise PlanError(
                f"pack '{name}': lane_tokens fills lanes by 'none' only; give the mixture packs instead"
            )
        if name in ROWS_OF_ANY_LENGTH and name != self.rules.packing:
            raise PlanError(
                f"pack '{name}': makes rows of other lengths than packing: {self.rules.packing}, which the mixture has;"
                f" set it to {name}"
            )
        while True:
            free = np.flatnonzero(~self._held)
            self._check_sizes()
            packs = pack(self._candidates.take(free), self.rules, self.step, self._cost_of)
            if packs is not None:
                break
            if callable(method) and self._scale > _MOST_STEPS_DRAWN:
                raise PlanError(
                    f"pack '{name}': makes fewer than {self.rules.num_packs} packs of {len(free)} pieces, enough for"
                    f" {_MOST_STEPS_DRAWN} steps; let fewer of them wait"
                )
            self._draw_more()
        packs, self._pack_costs, self._method = packs.of(free), None, method
        self.lineage.append(Edge(name=f"pack {name}", num_in=len(free), num_out=packs.num_packs))
        self._packs, self._lanes = packs, packs.ranked if packs.lane_offsets is not None else None
        return self

    def balance(self, method: str | Balancer | None = None, *, levels: int | None = None) -> Self:
        """Give packs to lanes, so that lanes cost as much as each other and no cap is exceeded.

        Does nothing where packing has decided the lanes, unless they are over a cap. If no choice of packs fits the
        caps, more samples are drawn, a few times.

        Args:
            method: one of `omniload.planner.balancing.METHODS`, or a function of `Items` that says the lane of each;
                the mixture's by default.
            levels: of ``two_level``, groups of neighbouring packs that are balanced by themselves before the whole.

        Raises:
            NotEnough: the sources have no more, and what is there does not fit the caps.
            PlanError: no choice of packs fits the caps, or the function's answer breaks the rules.
        """
        name, balancer = balancer_of(self.rules.balance if method is None else method, levels)
        for redrawn in itertools.count():
            packs = self._packed()
            if packs.lane_offsets is not None:
                if self._caps_hold(packs, packs.lane_offsets):
                    return self
                packs = self._packs = replace(packs, lane_offsets=None)
            where = f"step {self.step}: balance '{name}'"
            try:
                self._lanes = choose_and_balance(
                    packs, self.pack_costs(), self._loads(packs), self.rules, balancer, where
                )
                break
            except CapsUnmet:
                if redrawn == _MOST_REDRAWN:
                    raise
            self._draw_more()
            self.pack(self._method)
        self.lineage.append(Edge(name=f"balance {name}", num_in=packs.num_packs, num_out=self.rules.lanes))
        return self

    def distribute(self, axis: str, group_size: int = 1, *, module: str = "backbone") -> Self:
        """Declare over which ranks a module's work is divided.

        Args:
            axis: ``dp``, ``world`` or an axis of the mesh.
            group_size: neighbouring ranks on it that share one part.
            module: which; see also `view`.

        Raises:
            PlanError: there is no such axis or module.
        """
        old = self._placed(module)
        _check_axes(axis)
        self._placement[module] = Placement(axis=axis, group_size=group_size, broadcast=old.broadcast)
        return self

    def broadcast_at(self, *axes: str, module: str = "backbone") -> Self:
        """Declare axes of the mesh along which only the first rank fetches and the others receive from it.

        Raises:
            PlanError: there is no such axis or module.
        """
        old = self._placed(module)
        _check_axes(*axes)
        self._placement[module] = Placement(axis=old.axis, group_size=old.group_size, broadcast=axes)
        return self

    def view(self, module: Encoder) -> GraphView:
        """The graph as an encoder sees it: the samples that bring something for it, and its own lengths."""
        return GraphView(graph=self, module=module)

    def pack_costs(self) -> np.ndarray:
        """``int64[modules, packs]``, read-only, of all packs, chosen or not."""
        if self._pack_costs is None:
            packs = self._packed()
            of_piece = self._cost_of(packs.cut(self._candidates, self.rules.labels))
            self._pack_costs = np.add.reduceat(of_piece, packs.bounds[:-1], axis=1)
            self._pack_costs.flags.writeable = False
        return self._pack_costs

    def plan(self) -> Plan:
        """Freeze the step.

        Raises:
            PlanError: a stage is missing.
        """
        packs = self._packed()
        if self._lanes is None:
            raise PlanError(f"step {self.step}: the packs are not balanced; call balance() before plan()")
        pieces, offsets = packs.take(self._candidates, self._lanes, self.rules.labels)
        if packs.lane_offsets is None:
            lane_offsets = np.arange(0, len(self._lanes) + 1, len(self._lanes) // self.rules.lanes)
        else:
            lane_offsets = packs.lane_offsets
        return Plan(
            step=self.step,
            pieces=pieces,
            offsets=offsets,
            lane_offsets=lane_offsets,
            lane_costs=np.add.reduceat(self.pack_costs()[:, self._lanes], lane_offsets[:-1], axis=1),
            placement=tuple(sorted(self._placement.items())),
        )

    def carried(self) -> np.ndarray:
        """``PIECE[n]``: what the step does not take: candidates that wait, and what is left of those that were cut."""
        if self._packs is None or self._lanes is None:
            return self._candidates
        return self._packs.left(self._candidates, self._lanes, self.rules.labels)

    def _placed(self, module: str) -> Placement:
        if module not in MODULES:
            raise PlanError(f"placement: there is no module '{module}'{suggest(module, MODULES)}")
        return self._placement.get(module, Placement())

    def _hold_back(self) -> None:
        """See which candidates wait in the delay queue."""
        self._held = np.zeros(len(self._candidates), bool)
        if self._thresholds:
            self._held = held_back(
                self._candidates["length"].astype(np.int64),
                self._candidates["born"].astype(np.int64),
                step=self.step,
                thresholds=self._thresholds,
                num_lanes=self.rules.lanes,
                max_delay_steps=self._max_delay_steps,
            )

    def _draw_more(self) -> None:
        before = len(self._candidates)
        free = self._candidates[~self._held]
        have = int(free["length"].sum(dtype=np.int64)), len(free)
        self._scale *= 2
        while any(map(operator.ge, have, self.rules.enough(self._scale))):
            self._scale *= 2
        self.mix(self._weights)
        if len(self._candidates) == before:
            if not self._held.any():
                raise NotEnough
            self._thresholds = ()  # at the end there is nothing left to wait for
            self._hold_back()

    def _cost_of(self, pieces: np.ndarray) -> np.ndarray:
        return piece_costs(self._model, pieces)

    def _packed(self) -> Packs:
        if self._packs is None:
            raise PlanError(f"step {self.step}: there are no packs yet; call mix() and pack() first")
        return self._packs

    def _check_sizes(self) -> None:
        """Refuse a piece that no lane may hold: it would wait for ever."""
        for name, cap in zip(self.rules.cap_names, self.rules.cap_values.tolist(), strict=True):
            amount = (
                self._cost_of(self._candidates).sum(axis=0)
                if name == "cost"
                else self._candidates[COUNTED[name]]
            )
            if len(amount) and amount.max() > cap:
                piece = self._candidates[amount.argmax()]
                raise PlanError(
                    f"step {self.step}: {shown(piece, self.rules.names)} has {amount.max()} {name}, over caps.{name}"
                    f" {cap} a lane; raise it, or leave such samples out"
                )

    def _caps_hold(self, packs: Packs, lane_offsets: np.ndarray) -> bool:
        """Whether lanes that packing decided hold the caps.

        Raises:
            PlanError: they do not, and other lanes cannot be made of the packs.
        """
        of_lane = {
            name: np.add.reduceat(of_pack[packs.ranked], lane_offsets[:-1])
            for name, of_pack in self._loads(packs).items()
        }
        over = self.rules.over_cap(of_lane)
        if over is not None and len(packs.ranked) != self.rules.packs:
            raise PlanError(f"step {self.step}: {over}; raise it, or make lanes smaller")
        return over is None

    def _loads(self, packs: Packs) -> dict[str, np.ndarray]:
        """``int64[packs]`` by cap: what it counts."""
        if not self.rules.cap_names:
            return {}
        parts = packs.cut(self._candidates, self.rules.labels)
        return self.rules.loads(parts, packs.bounds[:-1], self.pack_costs())


_MOST_REDRAWN = 4
"""Times that more is drawn for a choice of packs that fits the caps."""
_MOST_STEPS_DRAWN = 64
"""A function of the user's that cannot pack a step of so many steps' pieces never will."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphView:
    """A `DGraph` as one encoder sees it."""

    graph: DGraph
    """The whole."""
    module: Encoder
    """The encoder."""

    @property
    def samples(self) -> np.ndarray:
        """``int64[k]``: the candidates that bring something for it."""
        return np.flatnonzero(self.graph.candidates[UNITS[self.module]])

    @property
    def lengths(self) -> np.ndarray:
        """``int64[k]``: rows that each brings."""
        lengths: np.ndarray = self.graph.candidates[UNITS[self.module]][self.samples].astype(np.int64)
        return lengths

    def distribute(self, axis: str, group_size: int = 1) -> Self:
        """As `DGraph.distribute`, of this encoder."""
        self.graph.distribute(axis, group_size, module=self.module)
        return self

    def broadcast_at(self, *axes: str) -> Self:
        """As `DGraph.broadcast_at`, of this encoder."""
        self.graph.broadcast_at(*axes, module=self.module)
        return self


def _check_axes(*axes: str) -> None:
    for axis in axes:
        if axis not in (*AXES, "world"):
            raise PlanError(f"placement: there is no axis '{axis}'{suggest(axis, [*AXES, 'world'])}")
