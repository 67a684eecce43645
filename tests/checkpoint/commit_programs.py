"""A model of save and commit: what each rank does, step by step, and what may come of each step.

A rank is a short program of :class:`Do`. One step of the model is one instruction of one rank: one operation on the
storage or one message. Between any two steps a rank may stop for ever; a wait may time out whether or not the
message was sent (which stands for one that is late and for one that is lost); an operation on storage may fail, with
or without effect. Time is not modelled, so more can happen here than in truth, never less; that rank 0 lingers
until all have read the outcome only takes time, so it is left out.

The programs follow ``checkpoint.engine``; the tests hold what it really does against the paths of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from checkpoint.format.manifest import MANIFEST

OK: Final = "ok"
FAILED: Final = "failed"
VOTED_DOWN: Final = "voted down"
REFUSED: Final = "refused"
LATE: Final = "late"
STOPPED: Final = "stopped"
ABANDONED: Final = "abandoned"
"""Failed so early that the attempt can be removed; told as failed."""

ENDED: Final = 1000
"""Where a rank is that has returned, raised or stopped."""

_ALWAYS: Final = frozenset({OK, FAILED, VOTED_DOWN, REFUSED, LATE})

_METADATA: Final = (  # in the order in which they are written
    "tensors.parquet",
    "shards.parquet",
    "stored.parquet",
    "files.parquet",
    "rank_objects.parquet",
    "objects.json",
)


class Manifest(NamedTuple):
    """The manifest, as far as it matters here."""

    attempt: int
    replaces: int | None


class Rank(NamedTuple):
    """Where a rank is in its program, how it goes or went, and what manifest it read."""

    at: int
    verdict: str
    old: Manifest | None


class Letter(NamedTuple):
    """A message of a round that was sent and not read yet."""

    attempt: int
    path: str
    verdict: str


class State(NamedTuple):
    """Everything at one moment.

    ``ranks`` are those of all jobs, ``files`` are pairs of a path and the attempt whose bytes it holds (the name of an
    unfinished one is hidden), ``previous`` is the attempt that was visible just before the one that is, ``visible`` are
    the attempts that have ever been.
    """

    ranks: tuple[Rank, ...]
    letters: frozenset[Letter]
    files: frozenset[tuple[str, int]]
    manifest: Manifest | None
    previous: int | None
    visible: frozenset[int]

    @property
    def verdicts(self) -> tuple[str, ...]:
        """How it goes or went, by rank."""
        return tuple(rank.verdict for rank in self.ranks)


class Event(NamedTuple):
    """What an observer of storage and messages sees of a step."""

    attempt: int
    rank: int
    op: str
    what: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The ranks that save together, once.

    Attributes:
        attempt: Number of the attempt, unique.
        world_size: Number of ranks.
        overwrite: Whether a committed checkpoint is replaced.
        luck: Which kinds of bad luck its ranks may have: ``stop``, ``late``, ``fault``.
        data_dir: Where all but the manifest goes; empty for a directory of its own.
    """

    attempt: int
    world_size: int
    overwrite: bool = False
    luck: frozenset[str] = frozenset({"stop", "late", "fault"})
    data_dir: str = ""

    @property
    def directory(self) -> str:
        """Where all but the manifest goes."""
        return self.data_dir or f"data/{self.attempt}"

    def payload(self, rank: int) -> str:
        """Path of the one payload file that a rank writes."""
        return f"{self.directory}/model-{rank:05d}-000.safetensors"

    def paths(self) -> frozenset[str]:
        """All files that make the checkpoint complete."""
        tables = [f"{self.directory}/{name}" for name in _METADATA]
        return frozenset(tables + [self.payload(rank) for rank in range(self.world_size)])


@dataclass(frozen=True, kw_only=True, slots=True)
class Do:
    """One instruction.

    Attributes:
        op: What an observer sees; empty if nothing.
        what: On what; ``{old}`` and ``{older}`` are the attempt of the manifest read before and the one it replaced.
        effect: What can come of it.
        when: Verdicts with which a rank does it; with others it goes on to the next.
        given: A further condition, on the manifest read before.
        times_out: Whether a wait ends by itself.
    """

    op: str
    what: str = ""
    effect: Callable[[Turn], Iterable[Result]]
    when: frozenset[str] = frozenset({OK})
    given: Callable[[Manifest | None], bool] = lambda _: True
    times_out: bool = True


class Turn(NamedTuple):
    """A rank about to do something."""

    state: State
    job: Job
    rank: int
    me: Rank
    do: Do
    what: str


class Result(NamedTuple):
    """One thing that may come of an instruction.

    ``luck`` says what kind of bad luck that takes, if any; ``old`` is the manifest, if it was read.
    """

    state: State
    verdict: str
    luck: str = ""
    old: Manifest | None = None


Program = tuple[Do, ...]


def post(turn: Turn) -> Iterator[Result]:
    """A follower tells how it went."""
    yield Result(_send(turn, f"{turn.what} from {turn.rank}", turn.me.verdict), turn.me.verdict)
    if turn.what == "plan":  # it cannot capture its state
        yield Result(_send(turn, f"plan from {turn.rank}", FAILED), FAILED, "fault")


def answer(turn: Turn) -> Iterator[Result]:
    """Rank 0 tells one follower the outcome."""
    yield Result(_send(turn, turn.what, turn.me.verdict), turn.me.verdict)


def gather(turn: Turn) -> Iterator[Result]:
    """Rank 0 waits until all have told it how it went; all must be ok."""
    wanted = {f"{turn.what} from {rank}" for rank in range(1, turn.job.world_size)}
    found = {one for one in turn.state.letters if one.attempt == turn.job.attempt and one.path in wanted}
    if len(found) == len(wanted):
        after = turn.state._replace(letters=turn.state.letters - found)
        all_ok = turn.me.verdict == OK and all(one.verdict == OK for one in found)
        yield Result(after, OK if all_ok else VOTED_DOWN)
        if turn.what == "plan":
            yield Result(after, VOTED_DOWN, "fault")  # rank 0 cannot capture its own state
    if turn.do.times_out and wanted:
        yield Result(turn.state, LATE, "late")


def hear(turn: Turn) -> Iterator[Result]:
    """A follower waits for the outcome."""
    path = f"{turn.what} to {turn.rank}"
    for letter in turn.state.letters:
        if letter.attempt == turn.job.attempt and letter.path == path:
            yield Result(turn.state._replace(letters=turn.state.letters - {letter}), letter.verdict)
    if turn.do.times_out:
        yield Result(turn.state, LATE, "late")


def refuse_if_committed(turn: Turn) -> Iterator[Result]:
    """Look whether there is a checkpoint already."""
    yield Result(turn.state, REFUSED if turn.state.manifest else OK)
    yield Result(turn.state, FAILED, "fault")


def write_part(turn: Turn) -> Iterator[Result]:
    """Begin or go on with a file that nobody sees before it is closed; when that fails it is removed."""
    yield Result(_with_file(turn, _hidden(turn.what)), OK)
    yield Result(_without(turn.state, {_hidden(turn.what)}), FAILED, "fault")


def close(turn: Turn) -> Iterator[Result]:
    """Give a file its name."""
    done = _without(turn.state, {_hidden(turn.what)})
    yield Result(_with_file(turn._replace(state=done), turn.what), OK)
    yield Result(done, FAILED, "fault")


def write(turn: Turn) -> Iterator[Result]:
    """Write a whole file at once."""
    yield Result(_with_file(turn, turn.what), OK)
    yield Result(turn.state, FAILED, "fault")


def write_table(turn: Turn) -> Iterator[Result]:
    """Write a file of metadata."""
    for result in write(turn):
        yield result._replace(verdict=OK if result.verdict == OK else ABANDONED)


def read_old(turn: Turn) -> Iterator[Result]:
    """Take note of the manifest that there is."""
    yield Result(turn.state, OK, old=turn.state.manifest)
    yield Result(turn.state, ABANDONED, "fault")


def put(turn: Turn) -> Iterator[Result]:
    """Put the manifest in place of whatever is there."""
    done = _publish(turn)
    yield Result(done, OK)
    yield Result(turn.state, FAILED, "fault")
    yield Result(done, FAILED, "fault")


def create(turn: Turn) -> Iterator[Result]:
    """Put the manifest there if there is none."""
    if turn.state.manifest is None:
        yield from put(turn)
        # The answer was lost, and the second try finds what the first one made.
        yield Result(_publish(turn), REFUSED, "fault")
    else:
        yield Result(turn.state, REFUSED)
        yield Result(turn.state, FAILED, "fault")


def ask_who_won(turn: Turn) -> Iterator[Result]:
    """After a refusal: it may have been a success."""
    assert turn.state.manifest is not None
    yield Result(turn.state, OK if turn.state.manifest.attempt == turn.job.attempt else REFUSED)
    yield Result(turn.state, FAILED, "fault")


def delete_first(turn: Turn) -> Iterator[Result]:
    """Begin to delete a directory: from here on it is incomplete."""
    inside = sorted(path for path, _ in turn.state.files if path.startswith(f"{turn.what}/"))
    yield Result(_without(turn.state, set(inside[:1])), turn.me.verdict)
    yield Result(turn.state, turn.me.verdict, "fault")  # what is left over fails no save


def delete_rest(turn: Turn) -> Iterator[Result]:
    """Delete the rest of a directory."""
    inside = {path for path, _ in turn.state.files if path.startswith(f"{turn.what}/")}
    verdict = FAILED if turn.me.verdict == ABANDONED else turn.me.verdict
    yield Result(_without(turn.state, inside), verdict)
    yield Result(turn.state, verdict, "fault")  # what is left over fails no save


def nothing(turn: Turn) -> Iterator[Result]:
    """Something that only an observer notices."""
    yield Result(turn.state, turn.me.verdict)


def leave(turn: Turn) -> Iterator[Result]:
    """Raise the verdict; never done as a step of its own."""
    raise AssertionError(turn)


def follower(job: Job, rank: int) -> Program:
    """What ranks other than 0 do."""
    return (
        Do(op="post", what="plan", effect=post),
        Do(op="hear", what="plan", effect=hear, when=_ALWAYS),
        _LEAVE,
        *_payload(job, rank),
        Do(op="post", what="write", effect=post, when=_ALWAYS),
        Do(op="hear", what="write", effect=hear, when=_ALWAYS),
    )


def leader(job: Job) -> Program:
    """What rank 0 does."""

    def tell(stage: str) -> list[Do]:
        return [
            Do(op="answer", what=f"{stage} to {rank}", effect=answer, when=_ALWAYS)
            for rank in range(1, job.world_size)
        ]

    seen = "" if job.world_size == 1 else "gather"
    look_first = () if job.overwrite else (Do(op="look", what=MANIFEST, effect=refuse_if_committed),)
    return (
        Do(op=seen, what="plan", effect=gather),
        *look_first,
        *tell("plan"),
        _LEAVE,
        *_payload(job, 0),
        Do(op=seen, what="write", effect=gather, when=_ALWAYS),
        *(Do(op="write", what=f"{job.directory}/{name}", effect=write_table) for name in _METADATA),
        *(_LOOK_AT_OLD if job.overwrite else ()),
        *_removal(job, ABANDONED),
        *(_REPLACE if job.overwrite else ()),
        *_CREATE,
        *_removal(job, REFUSED),
        *tell("write"),
        *_removal(job, VOTED_DOWN),
    )


def _removal(job: Job, verdict: str) -> Program:
    return tuple(
        Do(op=op, what=job.directory, effect=effect, when=frozenset({verdict}))
        for op, effect in (("delete", delete_first), ("", delete_rest))
    )


def _payload(job: Job, rank: int) -> Program:
    path = job.payload(rank)
    return (
        Do(op="open", what=path, effect=write_part),
        Do(op="fill", what=path, effect=write_part),
        Do(op="close", what=path, effect=close),
    )


def _is_there(old: Manifest | None) -> bool:
    return old is not None


def _replaced_another(old: Manifest | None) -> bool:
    return old is not None and old.replaces is not None


_LEAVE: Final = Do(op="leave", effect=leave, when=_ALWAYS - {OK})
_LOOK_AT_OLD: Final = (
    Do(op="look", what=MANIFEST, effect=read_old),
    Do(op="read", what=MANIFEST, effect=read_old, given=_is_there),
)
_REPLACE: Final = (
    Do(op="write", what=MANIFEST, effect=put, given=_is_there),
    Do(op="delete", what="data/{older}", effect=delete_first, given=_replaced_another),
    Do(op="", what="data/{older}", effect=delete_rest, given=_replaced_another),
)
_CREATE: Final = (
    Do(op="create", what=MANIFEST, effect=create, given=lambda old: old is None),
    Do(op="look", what=MANIFEST, effect=nothing, when=frozenset({REFUSED})),
    Do(op="read", what=MANIFEST, effect=ask_who_won, when=frozenset({REFUSED})),
)


def _send(turn: Turn, path: str, verdict: str) -> State:
    letter = Letter(turn.job.attempt, path, verdict)
    return turn.state._replace(letters=turn.state.letters | {letter})


def _hidden(path: str) -> str:
    directory, _, name = path.rpartition("/")
    return f"{directory}/.{name}"


def _with_file(turn: Turn, path: str) -> State:
    kept = _without(turn.state, {path})
    return kept._replace(files=kept.files | {(path, turn.job.attempt)})


def _without(state: State, paths: set[str]) -> State:
    return state._replace(files=frozenset(file for file in state.files if file[0] not in paths))


def _publish(turn: Turn) -> State:
    attempt = turn.job.attempt
    manifest = Manifest(attempt, turn.me.old.attempt if turn.me.old else None)
    previous = turn.state.manifest and turn.state.manifest.attempt
    return turn.state._replace(manifest=manifest, previous=previous, visible=turn.state.visible | {attempt})
