"""Save and commit in every order of steps and with every stop, delay and fault; and that the model of it is true."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from checkpoint.errors import StateError
from checkpoint.format.manifest import MANIFEST, read_manifest
from storage import Store
from storage.errors import AlreadyExists, NoSpace
from tests.checkpoint.commit_model import Model, Violation, explore
from tests.checkpoint.commit_programs import (
    FAILED,
    LATE,
    OK,
    REFUSED,
    STOPPED,
    VOTED_DOWN,
    Do,
    Event,
    Job,
    Program,
    State,
    put,
)
from tests.checkpoint.commit_recorder import Place, Spoil, Stopped

LUCKY: frozenset[str] = frozenset()
FAULTS = frozenset({"fault"})
BEFORE = (Job(attempt=1, world_size=1), Job(attempt=2, world_size=2))


# Every order of steps


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_whatever_stops_comes_late_or_fails_what_is_visible_is_complete_and_all_survivors_end(
    world_size: int, overwrite: bool
) -> None:
    """Then a later save into the same place succeeds, or is refused and changes nothing."""
    before = BEFORE if overwrite else ()
    job = Job(attempt=3, world_size=world_size, overwrite=overwrite)
    ends = explore(Model(jobs=[job], before=before))
    met = {verdict for end in ends for verdict in end.verdicts}
    assert met >= {OK, FAILED, VOTED_DOWN, STOPPED} | ({LATE} if world_size > 1 else set())
    left = {(end.files, end.manifest, end.previous, end.visible) for end in ends}
    unfinished = [files for files, *_ in left if any("/." in path for path, _ in files)]
    assert unfinished, "some stopped in the middle of a file"
    assert any(
        end.verdicts[0] == STOPPED and end.manifest is not None and end.manifest.attempt == 3 for end in ends
    ), "some stopped right after the commit"

    for again in (False, True):
        later = Model(jobs=[Job(attempt=4, world_size=1, overwrite=again, luck=LUCKY)], before=(*before, job))
        for files, manifest, previous, visible in left:
            start = later.start()._replace(files=files, manifest=manifest, previous=previous, visible=visible)
            (end,) = explore(later, start)
            if manifest is None or again:
                assert end.verdicts == (OK,)
                assert end.manifest is not None
                assert end.manifest.attempt == 4
            else:
                assert end.verdicts == (REFUSED,)
                assert (end.files, end.manifest) == (files, manifest)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_save_beside_what_is_left_of_another_succeeds_or_is_refused(overwrite: bool) -> None:
    """A job that was restarted, while ranks of its former self that stopped or lag are still at it."""
    old = Job(attempt=3, world_size=2, overwrite=overwrite)
    new = Job(attempt=4, world_size=2, overwrite=overwrite, luck=LUCKY)
    ends = explore(Model(jobs=[old, new], before=BEFORE if overwrite else ()))
    for end in ends:
        assert len(set(end.verdicts[2:])) == 1
        if end.verdicts[2] == REFUSED:
            assert not overwrite
            assert end.manifest is not None
            assert end.manifest.attempt == 3
        else:
            assert end.verdicts[2] == OK
            assert 4 in end.visible
    assert {end.verdicts[2] for end in ends} == ({OK} if overwrite else {OK, REFUSED})
    assert any(STOPPED in end.verdicts[:2] and LATE in end.verdicts[:2] for end in ends)


@pytest.mark.parametrize("overwrite", [False, True])
def test_two_jobs_with_bad_luck_of_their_own_leave_the_place_whole(overwrite: bool) -> None:
    jobs = [Job(attempt=3 + index, world_size=2 - index, overwrite=overwrite) for index in range(2)]
    ends = explore(Model(jobs=jobs, before=BEFORE if overwrite else ()))
    assert any(end.verdicts == (STOPPED,) * 3 for end in ends)
    assert any(end.visible >= {3, 4} for end in ends) == overwrite


@pytest.mark.parametrize("overwrite", [False, True])
def test_of_three_jobs_that_save_into_one_place_at_once_one_is_visible_and_complete(overwrite: bool) -> None:
    """What was visible just before it is complete, too: nothing is deleted until two others have taken its place.

    That holds although ``replaces`` may then name an attempt that is gone: one that two others have replaced meanwhile.
    """
    jobs = [Job(attempt=attempt, world_size=1, overwrite=overwrite, luck=LUCKY) for attempt in (3, 4, 5)]
    before = BEFORE if overwrite else ()
    ends = explore(Model(jobs=jobs, before=before))
    assert {end.manifest.attempt for end in ends if end.manifest} == {3, 4, 5}
    for end in ends:
        assert sorted(end.verdicts) == ([OK] * 3 if overwrite else [OK, REFUSED, REFUSED])
    gone = [end for end in ends if end.manifest and _is_gone(end, end.manifest.replaces)]
    assert bool(gone) == overwrite
    assert all(end.previous != end.manifest.replaces for end in gone if end.manifest)


def _is_gone(end: State, attempt: int | None) -> bool:
    return attempt is not None and not any(path.startswith(f"data/{attempt}/") for path, _ in end.files)


def test_saves_after_three_that_overwrote_each_other_are_as_safe() -> None:
    """Also from where ``replaces`` names what is gone; two at once, each of which may stop or fail at any point."""
    jobs = [Job(attempt=attempt, world_size=1, overwrite=True, luck=LUCKY) for attempt in (3, 4, 5)]
    ends = explore(Model(jobs=jobs, before=BEFORE))
    later = Model(
        jobs=[Job(attempt=attempt, world_size=1, overwrite=True) for attempt in (6, 7)],
        before=(*BEFORE, *jobs),
    )
    starts = {
        later.start()._replace(
            files=end.files, manifest=end.manifest, previous=end.previous, visible=end.visible
        )
        for end in ends
    }
    assert any(start.manifest and _is_gone(start, start.manifest.replaces) for start in starts)
    for start in starts:
        ends = explore(later, start)
        assert {end.manifest.attempt for end in ends if end.manifest} >= {6, 7}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_without_bad_luck_every_order_ends_in_a_commit_that_all_report(world_size: int) -> None:
    (end,) = explore(Model(jobs=[Job(attempt=1, world_size=world_size, luck=LUCKY)]))
    assert end.verdicts == (OK,) * world_size
    assert not end.letters


def test_without_stops_and_delays_all_ranks_end_alike() -> None:
    ends = explore(Model(jobs=[Job(attempt=1, world_size=3, luck=FAULTS)]))
    assert all(len(set(end.verdicts)) == 1 for end in ends)
    assert {end.verdicts[0] for end in ends} == {OK, FAILED, VOTED_DOWN}


# What is wrong is found


def _is(do: Do, which: str) -> bool:
    return f"{do.op} {do.what}".startswith(which)


def _without(which: str) -> Callable[[Program], Program]:
    return lambda program: tuple(do for do in program if not _is(do, which))


def _moved(which: str, before: str) -> Callable[[Program], Program]:
    def move(program: Program) -> Program:
        moved = [do for do in program if _is(do, which)]
        rest = [do for do in program if not _is(do, which)]
        at = next((index for index, do in enumerate(rest) if _is(do, before)), len(rest))
        return (*rest[:at], *moved, *rest[at:])

    return move


def _changed(which: str, **changes: Any) -> Callable[[Program], Program]:
    return lambda program: tuple(replace(do, **changes) if _is(do, which) else do for do in program)


def _unconfirmed(program: Program) -> Program:
    """Takes a refusal for what it seems."""
    return tuple(do for do in program if do.what != MANIFEST or do.when != frozenset({REFUSED}))


def _removed_unconfirmed(program: Program) -> Program:
    """Takes a refusal for what it seems, until all is gone."""
    asks = [do for do in program if do.what == MANIFEST and do.when == frozenset({REFUSED})]
    at = max((index for index, do in enumerate(program) if do.when == frozenset({REFUSED})), default=-1)
    rest = [do for do in program[: at + 1] if do not in asks]
    return (*rest, *asks, *program[at + 1 :])


ONE = [Job(attempt=3, world_size=2)]
TWO = [Job(attempt=3, world_size=1), Job(attempt=4, world_size=1)]
OVERWRITING = [Job(attempt=3, world_size=2, overwrite=True)]

WRONG: dict[str, tuple[Sequence[Job], Callable[[Program], Program], str]] = {
    "the manifest before the data": (ONE, _moved("create", "write data"), "visible .* incomplete"),
    "the vote before the data": (ONE, _moved("post write", "open"), "visible .* incomplete"),
    "no count of the votes": (ONE, _without("gather write"), "visible .* incomplete"),
    "success told before the commit": (ONE, _moved("answer write", "create"), "reported that never was"),
    "a clean-up whatever failed": (
        ONE,
        _changed("delete data/3", when=frozenset({VOTED_DOWN, FAILED})),
        "visible .* incomplete",
    ),
    "the replaced attempt deleted at once": (
        OVERWRITING,
        _changed("delete data/{older}", what="data/{old}"),
        "replaced, .* incomplete",
    ),
    "a manifest created over another": (TWO, _changed("create", effect=put), "replaced unasked"),
    "a lost answer taken for a refusal": (
        ONE,
        _unconfirmed,
        "reported refused, but was committed|visible .* incomplete",
    ),
    "an attempt removed before it is known who won": (ONE, _removed_unconfirmed, "visible .* incomplete"),
    "a leader that waits without end": (ONE, _changed("gather write", times_out=False), "waits for ever"),
    "a follower that waits without end": (ONE, _changed("hear write", times_out=False), "waits for ever"),
    "one directory for all attempts": (
        [replace(job, data_dir="data/x") for job in TWO],
        lambda program: program,
        "is a mix",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_protocol_that_is_wrong_is_found_out(wrong: str) -> None:
    jobs, change, problem = WRONG[wrong]
    before = BEFORE if jobs[0].overwrite else ()
    explore(Model(jobs=[replace(job, data_dir="") for job in jobs], before=before))  # the right one is fine
    with pytest.raises(Violation, match=problem):
        explore(Model(jobs=jobs, before=before, change=change))


# The model is true


def _when(rank: int, op: str, error: BaseException, what: str = "") -> Spoil:
    """A rank whose operation does nothing but raise."""

    def spoil(event: Event, act: Callable[[], Any]) -> Any:
        if (event.rank, event.op) == (rank, op) and event.what.endswith(what):
            raise error
        return act()

    return spoil


def _after(op: str, error: BaseException, what: str = "") -> Spoil:
    """A rank whose operation raises when it is done."""

    def spoil(event: Event, act: Callable[[], Any]) -> Any:
        done = act()
        if event.op == op and event.what.endswith(what):
            raise error
        return done

    return spoil


FULL = NoSpace("disk", "full")


def _fresh(place: Place) -> None:
    assert place.save(3) == [OK] * 3


def _alone(place: Place) -> None:
    assert place.save(1) == [OK]


def _again(place: Place) -> None:
    assert place.save(2) == [OK] * 2
    assert place.save(3) == [REFUSED] * 3
    assert place.save(1) == [REFUSED]


def _overwriting(place: Place) -> None:
    for world_size in (2, 1, 3, 2):
        assert place.save(world_size, overwrite=True) == [OK] * world_size
    assert sum(event.op == "delete" for event in place.events) == 2


def _rank_cannot_capture(place: Place) -> None:
    assert place.save(3, luck=FAULTS, spoil=_when(1, "capture", StateError("a socket"))) == [FAILED] * 3
    assert place.save(2) == [OK] * 2


def _rank_0_cannot_capture(place: Place) -> None:
    assert place.save(2, luck=FAULTS, spoil=_when(0, "capture", StateError("a socket"))) == [FAILED] * 2


def _cannot_look(place: Place) -> None:
    assert place.save(2, luck=FAULTS, spoil=_when(0, "look", FULL)) == [FAILED] * 2


def _rank_cannot_write(place: Place) -> None:
    for op in ("open", "fill", "close"):
        assert place.save(3, luck=FAULTS, spoil=_when(1, op, FULL)) == [FAILED] * 3
    assert Store(place.root).list() == []
    assert place.save(2) == [OK] * 2


def _rank_0_cannot_write(place: Place) -> None:
    for world_size in (1, 3):
        spoil = _when(0, "fill", FULL)
        assert place.save(world_size, luck=FAULTS, spoil=spoil) == [FAILED] * world_size
    assert Store(place.root).list() == []


def _cannot_clean_up(place: Place) -> None:
    def spoil(event: Event, act: Callable[[], Any]) -> Any:
        return _when(0, "delete", FULL)(event, partial(_when(1, "fill", FULL), event, act))

    assert place.save(3, luck=FAULTS, spoil=spoil) == [FAILED] * 3
    assert len(Store(place.root).list()) == 2


def _cannot_write_a_table(place: Place) -> None:
    spoil = _when(0, "write", FULL, "stored.parquet")
    assert place.save(2, luck=FAULTS, spoil=spoil) == [FAILED] * 2
    assert Store(place.root).list() == []
    assert place.save(2) == [OK] * 2


def _cannot_create_the_manifest(place: Place) -> None:
    assert place.save(2, luck=FAULTS, spoil=_when(0, "create", FULL)) == [FAILED] * 2
    assert place.save(2, overwrite=True) == [OK] * 2


def _created_but_failed(place: Place) -> None:
    spoil = _after("create", TimeoutError("the answer is lost"))
    assert place.save(2, luck=FAULTS, spoil=spoil) == [FAILED] * 2
    assert place.save(2) == [REFUSED] * 2


def _created_but_refused(place: Place) -> None:
    spoil = _after("create", AlreadyExists(MANIFEST, "made by the first of two tries"))
    assert place.save(2, luck=FAULTS, spoil=spoil) == [OK] * 2


def _lost_race(place: Place) -> None:
    def spoil(event: Event, act: Callable[[], Any]) -> Any:
        done = act()
        if event.what.endswith("objects.json"):  # just before the manifest
            assert place.save(1) == [OK]
        return done

    assert place.save(2, spoil=spoil) == [REFUSED] * 2
    assert len(Store(place.root).list_dirs("data")) == 1
    assert place.attempts[read_manifest(Store(place.root))[0].attempt] == 2


def _cannot_swap_the_manifest(place: Place) -> None:
    assert place.save(2) == [OK] * 2
    for op, what in (("look", MANIFEST), ("read", MANIFEST), ("write", MANIFEST)):
        assert place.save(2, overwrite=True, luck=FAULTS, spoil=_when(0, op, FULL, what)) == [FAILED] * 2
    spoil = _after("write", TimeoutError("the answer is lost"), MANIFEST)
    assert place.save(2, overwrite=True, luck=FAULTS, spoil=spoil) == [FAILED] * 2
    assert place.attempts[read_manifest(Store(place.root))[0].attempt] == 5


def _cannot_delete_the_replaced(place: Place) -> None:
    for luck, outcome in ((LUCKY, OK), (LUCKY, OK), (FAULTS, OK)):
        spoil = _when(0, "delete", FULL)
        assert place.save(2, overwrite=True, luck=luck, spoil=spoil) == [outcome] * 2
    assert place.attempts[read_manifest(Store(place.root))[0].attempt] == 3


def _late_rank(place: Place) -> None:
    def spoil(event: Event, act: Callable[[], Any]) -> Any:
        if (event.attempt, event.rank, event.op) == (1, 1, "fill"):
            assert place.given_up.wait(20)
        return act()

    assert place.save(3, luck=frozenset({"late"}), spoil=spoil, timeout_s=1.0) == [LATE] * 3
    assert place.given_up.is_set()
    assert Event(1, 1, "close", "data/1/model-00001-000.safetensors") in place.events
    assert place.save(2) == [OK] * 2


def _stopped_rank(place: Place) -> None:
    spoil = _when(0, "close", Stopped())
    assert place.save(3, luck=frozenset({"fault", "stop"}), spoil=spoil) == [STOPPED, FAILED, FAILED]
    assert place.save(2) == [OK] * 2


SAVES = [
    _fresh,
    _alone,
    _again,
    _overwriting,
    _rank_cannot_capture,
    _rank_0_cannot_capture,
    _cannot_look,
    _rank_cannot_write,
    _rank_0_cannot_write,
    _cannot_clean_up,
    _cannot_write_a_table,
    _cannot_create_the_manifest,
    _created_but_failed,
    _created_but_refused,
    _lost_race,
    _cannot_swap_the_manifest,
    _cannot_delete_the_replaced,
    _late_rank,
    _stopped_rank,
]


@pytest.mark.parametrize("saves", SAVES, ids=lambda saves: saves.__name__.strip("_"))
def test_what_saves_really_do_is_a_path_of_the_model(saves: Callable[[Place], None], tmp_path: Path) -> None:
    """In the same order, with the same outcome on each rank, the same files and the same manifest."""
    place = Place(tmp_path)
    saves(place)
    assert place.ends(place.events), place.events


@pytest.mark.parametrize("overwrite", [False, True])
def test_no_other_order_is_a_path_of_the_model(overwrite: bool, tmp_path: Path) -> None:
    """Neither without one of the events, nor with two neighbours of one rank swapped."""
    place = Place(tmp_path)
    for _ in range(3 if overwrite else 1):
        assert place.save(3, overwrite=overwrite) == [OK] * 3
    events = place.events
    assert place.ends(events)
    assert len(events) == (96 if overwrite else 31)
    for index in range(len(events)):
        assert not place.ends([*events[:index], *events[index + 1 :]]), events[index]
    for first, second in _neighbours(events):
        swapped = list(events)
        swapped.insert(first, swapped.pop(second))
        assert not place.ends(swapped), (events[first], events[second])


def _neighbours(events: Sequence[Event]) -> Iterator[tuple[int, int]]:
    last: dict[tuple[int, int], int] = {}
    for index, event in enumerate(events):
        key = (event.attempt, event.rank)
        if key in last:
            yield last[key], index
        last[key] = index
