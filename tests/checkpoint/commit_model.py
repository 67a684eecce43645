"""The model of save and commit, the search over all that it allows, and for paths that an observer may have seen."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.checkpoint.commit_programs import (
    ENDED,
    OK,
    REFUSED,
    STOPPED,
    VOTED_DOWN,
    Event,
    Job,
    Manifest,
    Program,
    Rank,
    State,
    Turn,
    answer,
    follower,
    leader,
    leave,
    post,
)


class Step(NamedTuple):
    """One step: who did it, how it is told in a trace, what an observer sees (None: nothing), what it led to."""

    seat: int
    story: str
    event: Event | None
    luck: str
    state: State


@dataclass(kw_only=True)
class Model:
    """Jobs that save into one place at the same time.

    Attributes:
        jobs: The jobs.
        before: What was committed there before, oldest first, each having replaced the one before it.
        change: Changes the program of a rank, to see that what is wrong is found.
    """

    jobs: Sequence[Job]
    before: Sequence[Job] = ()
    change: Callable[[Program], Program] = lambda program: program
    _seats: list[tuple[Job, int, Program]] = field(init=False)
    _paths: dict[int, frozenset[str]] = field(init=False)

    def __post_init__(self) -> None:
        self._paths = {job.attempt: job.paths() for job in (*self.before, *self.jobs)}
        self._seats = [
            (job, rank, self.change(leader(job) if rank == 0 else follower(job, rank)))
            for job in self.jobs
            for rank in range(job.world_size)
        ]

    def start(self) -> State:
        """Before the first step."""
        kept = self.before[-2:]
        manifest = None
        if kept:
            manifest = Manifest(kept[-1].attempt, kept[0].attempt if len(kept) == 2 else None)
        return State(
            ranks=(Rank(0, OK, None),) * len(self._seats),
            letters=frozenset(),
            files=frozenset((path, job.attempt) for job in kept for path in job.paths()),
            manifest=manifest,
            previous=manifest and manifest.replaces,
            visible=frozenset(job.attempt for job in self.before),
        )

    def steps(self, state: State) -> Iterator[Step]:
        """What can happen next."""
        for seat, (job, rank, program) in enumerate(self._seats):
            me = state.ranks[seat]
            if me.at == ENDED:
                continue
            do = program[me.at]
            what = do.what.format(old=me.old and me.old.attempt, older=me.old and me.old.replaces)
            for after, verdict, luck, old in do.effect(Turn(state, job, rank, me, do, what)):
                if luck and luck not in job.luck:
                    continue
                next_rank = _go_on(program, me.at, verdict, old or me.old)
                mark = "" if do.effect not in (post, answer) else "+" if verdict == OK else "-"
                event = Event(job.attempt, rank, do.op + mark, what)
                seen = event if do.op and luck != "late" else None
                story = f"{job.attempt}.{rank} {do.op or do.effect.__name__} {what}: {luck or 'as it should'}"
                yield Step(seat, story, seen, luck, _seated(after, seat, next_rank))
            if "stop" in job.luck:
                stopped = Rank(ENDED, STOPPED, None)
                yield Step(seat, f"{job.attempt}.{rank} stops", None, "stop", _seated(state, seat, stopped))

    def problem(self, state: State) -> str | None:
        """What is wrong in a state."""
        if state.manifest is not None:
            # What was visible before is what readers may still be at, whatever attempt the manifest says it replaces.
            attempts = (state.manifest.attempt, state.previous)
            for role, attempt in zip(("visible", "replaced, still readable"), attempts, strict=True):
                if attempt is None:
                    continue
                held = {path: author for path, author in state.files if path in self._paths[attempt]}
                if len(held) < len(self._paths[attempt]):
                    return f"the {role} checkpoint is incomplete"
                if set(held.values()) != {attempt}:
                    return f"the {role} checkpoint is a mix"
        for (job, _, _), rank in zip(self._seats, state.ranks, strict=True):
            if rank.at == ENDED:
                if rank.verdict == OK and job.attempt not in state.visible:
                    return "a commit is reported that never was"
                if rank.verdict in {REFUSED, VOTED_DOWN} and job.attempt in state.visible:
                    return f"a save is reported {rank.verdict}, but was committed"
        return None

    def problem_of(self, before: State, step: Step) -> str | None:
        """What is wrong with a step."""
        if before.manifest not in (None, step.state.manifest) and not self._seats[step.seat][0].overwrite:
            return "a checkpoint was replaced unasked"
        return None


def _go_on(program: Program, at: int, verdict: str, old: Manifest | None) -> Rank:
    for index in range(at + 1, len(program)):
        do = program[index]
        if verdict in do.when and do.given(old):
            if do.effect is leave:
                break
            return Rank(index, verdict, old)
    return Rank(ENDED, verdict, None)


def _seated(state: State, seat: int, rank: Rank) -> State:
    return state._replace(ranks=(*state.ranks[:seat], rank, *state.ranks[seat + 1 :]))


class Violation(AssertionError):
    """The model allows what must not happen; tells the shortest way there."""


def explore(model: Model, start: State | None = None) -> list[State]:
    """Visit every state that any order of steps and any bad luck leads to; gives those in which all have ended.

    Raises:
        Violation: A state or a step is wrong, or a rank waits for ever.
    """
    first = start or model.start()
    came_from: dict[State, tuple[State, str] | None] = {first: None}
    pending = deque([first])
    ends = []

    def tell(state: State, problem: str) -> Violation:
        stories = []
        link = came_from[state]
        while link is not None:
            stories.append(link[1])
            link = came_from[link[0]]
        return Violation("\n  ".join([problem, *reversed(stories)]))

    while pending:
        state = pending.popleft()
        if (problem := model.problem(state)) is not None:
            raise tell(state, problem)
        ended = all(rank.at == ENDED for rank in state.ranks)
        if ended:
            ends.append(state)
        goes_on = False
        for step in model.steps(state):
            # Each step takes its rank onward, so that no run is endless.
            assert step.state.ranks[step.seat].at > state.ranks[step.seat].at
            goes_on |= step.luck != "stop"
            if step.state not in came_from:
                came_from[step.state] = (state, step.story)
                pending.append(step.state)
            if (problem := model.problem_of(state, step)) is not None:
                raise tell(step.state, problem)
        if not ended and not goes_on:
            raise tell(state, "a rank waits for ever")
    return ends


def follow(model: Model, events: Iterable[Event]) -> set[State]:
    """The ends of all paths of the model on which an observer sees exactly these events; none if there is no path."""
    states = _silently(model, {model.start()})
    for event in events:
        seen = {step.state for state in states for step in model.steps(state) if step.event == event}
        states = _silently(model, seen)
    return {state for state in states if all(rank.at == ENDED for rank in state.ranks)}


def _silently(model: Model, states: set[State]) -> set[State]:
    reached = set(states)
    pending = list(states)
    while pending:
        for step in model.steps(pending.pop()):
            if step.event is None and step.state not in reached:
                reached.add(step.state)
                pending.append(step.state)
    return reached
