"""Saving, from captured state to a committed checkpoint.

::

    main thread   ── round "plan" ──► staged ──► returns (async)
    background                          └──► written ── round "commit" ──► committed
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from checkpoint.engine.commit import Attempt, already_committed, commit, encode_vote
from checkpoint.engine.coordination import Coordinator
from checkpoint.engine.memory import Bytes
from checkpoint.engine.staging import StagingPool
from checkpoint.engine.write import FileLayout, lay_out, stage, staging_bytes, write_files
from checkpoint.errors import AsyncSaveFailed, ObjectsDiffer, RanksFailed
from checkpoint.format.digest import digest_hex
from checkpoint.format.manifest import MANIFEST
from checkpoint.format.objects import decode_objects, encode_objects, first_difference
from checkpoint.frameworks.values import CapturedState
from checkpoint.handle import SaveHandle, SaveReport
from checkpoint.planner import Plan, describe, make_plan
from storage import Store
from storage.errors import StorageError
from storage.spans import span

_logger = logging.getLogger("checkpoint")

# Rank 0 may serve the store that the others read the outcome from; it gives them this long before it moves on.
_LINGER_S: Final = 10.0

_EXIT_WAIT_S: Final = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveOptions:
    """How to save; equal on all ranks.

    Attributes:
        step: Step number for the manifest.
        overwrite: Replace a checkpoint that is committed at the place.
        timeout_s: Longest wait for other ranks, in each stage.
        user_metadata: JSON-able values for the manifest.
    """

    step: int | None
    overwrite: bool
    timeout_s: float
    user_metadata: Mapping[str, object]


@dataclass(kw_only=True, slots=True)
class _Job:
    """A planned save on its way."""

    store: Store
    options: SaveOptions
    handle: SaveHandle
    name: str
    attempt: Attempt
    layouts: list[FileLayout]
    rank_objects: Mapping[str, object]
    plan: Plan | None  # on rank 0
    objects: bytes
    on_commit: Callable[[], None] | None
    images: list[Bytes] | None = None  # None: straight from the tensors
    failure: BaseException | None = None  # what happened before the background part
    done: Callable[[], None] = lambda: None


class Saver:
    """Saves of one rank: planning in the caller's thread, at most two saves in flight, one being written.

    Args:
        coordinator: This rank's seat.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._background = coordinator.fork()
        self._run_id = uuid.uuid4().hex
        self._pool = StagingPool()
        self._in_flight: list[SaveHandle] = []
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        # Ends the thread; when the process ends _at_exit does, and waits for it.
        weakref.finalize(self, self._jobs.put, None).atexit = False

    def save(
        self,
        store: Store,
        capture: Callable[[], CapturedState],
        options: SaveOptions,
        *,
        background: bool,
        on_commit: Callable[[], None] | None = None,
    ) -> SaveHandle:
        """Save; see ``checkpoint.save`` and ``checkpoint.async_save``.

        Args:
            store: The checkpoint directory.
            capture: Describes the state; its errors reach all ranks.
            options: How.
            background: Return when the state is staged. Otherwise the handle is done on return.
            on_commit: Called after the commit, on rank 0 only, by the thread that committed.

        Raises:
            AsyncSaveFailed: An earlier save failed unseen; this one was not begun.
            CheckpointError: Planning failed, on all ranks alike.
        """
        name = self._coordinator.next_call("save")
        with span("checkpoint.plan", path=store.url):
            job = self._plan(name, store, capture, options, on_commit)
        if background:
            self._stage(job)
            self._in_flight = [one for one in self._in_flight if not one.done() or one.unseen_failure]
            self._in_flight.append(job.handle)
            self._start()
            self._jobs.put(job)
        else:
            _finish(job, self._coordinator)
        return job.handle

    def wait(self, timeout_s: float) -> None:
        """Wait for the saves in flight.

        Raises:
            TimeoutError: They are not done in time; names the first.
            AsyncSaveFailed: One of them failed unseen.
        """
        deadline = time.monotonic() + timeout_s
        for handle in self._in_flight:
            if not handle.wait(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"{handle.url}: still being saved after {timeout_s:g} s")
        try:
            self._raise_unseen()
        finally:
            self._in_flight.clear()

    def _plan(
        self,
        name: str,
        store: Store,
        capture: Callable[[], CapturedState],
        options: SaveOptions,
        on_commit: Callable[[], None] | None,
    ) -> _Job:
        captured: CapturedState | None = None
        encoded: dict[str, bytes] = {}
        plan: Plan | None = None

        def local() -> bytes:
            nonlocal captured
            self._raise_unseen()
            captured = capture()
            for group, tree in captured.objects.items():
                encoded[group] = encode_objects(tree, group)
            digests = {group: digest_hex(data) for group, data in encoded.items()}
            # Whatever shapes the outcome must be the same everywhere, so it takes part in the vote.
            vote = {
                "objects": digests,
                "url": store.url,
                "step": options.step,
                "overwrite": options.overwrite,
            }
            return _pack(vote, describe(captured.tensors))

        def decide(messages: list[bytes]) -> list[bytes]:
            nonlocal plan
            votes, rows = zip(*map(_unpack, messages), strict=True)
            differing = _differing(votes)
            if differing is not None:
                return [_pack({"differ": differing}, b"")] * len(messages)
            if not options.overwrite and store.exists(MANIFEST):
                raise already_committed(store)
            plan = make_plan(rows)
            header = {"attempt": uuid.uuid4().hex, "run_id": self._run_id}
            return [_pack(header, plan.positions_of(rank).tobytes()) for rank in range(len(messages))]

        try:
            answer = self._coordinator.round(name, "plan", local, decide, timeout_s=options.timeout_s)
        except Exception as error:
            self._note_seen(error, options.timeout_s)
            raise
        assert captured is not None
        header, payload = _unpack(answer)
        if "differ" in header:
            self._raise_difference(name, header["differ"], encoded, options)
        positions = np.frombuffer(payload, dtype=np.int64)
        return _Job(
            store=store,
            options=options,
            handle=SaveHandle(store.url),
            name=header["attempt"],
            attempt=Attempt(
                attempt=header["attempt"],
                run_id=header["run_id"],
                step=options.step,
                overwrite=options.overwrite,
                user_metadata=options.user_metadata,
            ),
            layouts=lay_out(self._coordinator.rank, captured.tensors, positions),
            rank_objects=captured.rank_objects,
            plan=plan,
            objects=encode_objects(captured.objects, "state"),
            on_commit=on_commit,
        )

    def _raise_unseen(self) -> None:
        for handle in self._in_flight:
            failure = handle.unseen_failure
            if failure is not None:
                raise AsyncSaveFailed(f"{handle.url}: its asynchronous save failed: {failure}") from failure

    def _note_seen(self, error: Exception, timeout_s: float) -> None:
        """After an earlier failure was raised on all ranks, do not raise it again on those that had yet to see it."""
        failed_earlier = isinstance(error, AsyncSaveFailed) or (
            isinstance(error, RanksFailed)
            and any(one.kind == AsyncSaveFailed.__name__ for one in error.members)
        )
        if failed_earlier:
            for handle in self._in_flight:
                handle.wait(timeout_s)
                handle.mark_seen()
            self._in_flight.clear()

    def _raise_difference(
        self, name: str, groups: list[str], encoded: Mapping[str, bytes], options: SaveOptions
    ) -> None:
        """Find out together which path of the global objects differs, and raise it."""

        def local() -> bytes:
            return json.dumps(
                {group: encoded[group].decode() for group in groups if group in encoded}
            ).encode()

        def decide(messages: list[bytes]) -> bytes:
            raise _objects_differ([json.loads(message) for message in messages], groups)

        self._coordinator.round(name, "objects", local, decide, timeout_s=options.timeout_s)

    def _stage(self, job: _Job) -> None:
        """Copy what the job writes; a failure is told to the other ranks by the background part."""
        try:
            with span("checkpoint.stage", path=job.store.url):
                buffer = self._pool.take(staging_bytes(job.layouts), job.options.timeout_s)
                job.done = partial(self._pool.give_back, buffer)
                job.images = stage(job.layouts, buffer)
        except Exception as error:
            job.failure = error

    def _start(self) -> None:
        if self._thread is None:
            # A daemon, so that a process may exit without waiting for ever; _at_exit waits within bounds. What is
            # cut off then was never visible.
            self._thread = threading.Thread(
                target=_run, args=(self._jobs, self._background), name="checkpoint-save", daemon=True
            )
            for ended in [thread for thread in _threads if not thread.is_alive()]:
                del _threads[ended]
            self._thread.start()
            _threads[self._thread] = self._jobs
            _running.add(self)


_running: weakref.WeakSet[Saver] = weakref.WeakSet()
_threads: dict[threading.Thread, queue.SimpleQueue[_Job | None]] = {}


def _at_exit() -> None:
    for saver in list(_running):
        try:
            saver.wait(_EXIT_WAIT_S)
        except Exception as error:  # nobody is left to raise it to
            _logger.error("a checkpoint was lost at exit: %s", error)
    # A thread that let go of its connection while the interpreter is being torn down would abort the process.
    for thread, jobs in list(_threads.items()):
        jobs.put(None)
        thread.join(_EXIT_WAIT_S)


# Not atexit: its handlers run when the executors that writing needs refuse work already. These run before that, the
# last registered first, and concurrent.futures has been imported by now.
threading._register_atexit(_at_exit)  # type: ignore[attr-defined]


def _run(jobs: queue.SimpleQueue[_Job | None], coordinator: Coordinator) -> None:
    while (job := jobs.get()) is not None:
        try:
            _finish(job, coordinator)
        except BaseException as error:
            job.handle.resolve(error)
        del job  # an idle thread holds on to nothing


def _finish(job: _Job, coordinator: Coordinator) -> None:
    """Write, vote, commit; resolves the handle or raises."""

    def local() -> bytes:
        try:
            if job.failure is not None:
                raise job.failure
            data = job.store.sub(job.attempt.data_dir)
            written = write_files(data, job.layouts, job.images)
            return encode_vote(written, job.rank_objects)
        finally:
            job.images = None
            job.done()

    voted = False

    def decide(votes: list[bytes]) -> bytes:
        nonlocal voted
        voted = True
        assert job.plan is not None
        num_bytes = commit(job.store, job.attempt, job.plan, job.objects, votes)
        report = SaveReport(
            url=job.store.url,
            step=job.options.step,
            attempt=job.attempt.attempt,
            num_tensors=len(job.plan.tensors),
            num_bytes=num_bytes,
        )
        return json.dumps(asdict(report)).encode()

    try:
        answer = coordinator.round(
            job.name, "write", local, decide, timeout_s=job.options.timeout_s, linger_s=_LINGER_S
        )
    except RanksFailed:
        # All ranks have reported, so nobody writes any more; before the votes were in nothing can be committed.
        if coordinator.rank == 0 and not voted:
            _clean_up(job)
        raise
    except Exception:
        if coordinator.world_size == 1 and not voted:
            _clean_up(job)
        raise
    if job.on_commit is not None and coordinator.rank == 0:
        job.on_commit()
    job.handle.resolve(SaveReport(**json.loads(answer)))


def _clean_up(job: _Job) -> None:
    try:
        job.store.delete_tree(job.attempt.data_dir)
    except StorageError as error:
        _logger.warning("left over from a failed save: %s", error)


def _differing(votes: Sequence[dict[str, Any]]) -> list[str] | None:
    """Groups whose objects are not equal on all ranks; None if all are.

    Raises:
        ObjectsDiffer: The ranks were called with different arguments.
    """
    first = votes[0]
    for rank, vote in enumerate(votes):
        for name in ("url", "step", "overwrite"):
            if vote[name] != first[name]:
                raise ObjectsDiffer(
                    f"save was called with {name}={vote[name]!r} on rank {rank} but {first[name]!r} on rank 0; "
                    "all ranks must save the same thing to the same place"
                )
    objects = [vote["objects"] for vote in votes]
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


def _unpack(message: bytes) -> tuple[dict[str, Any], bytes]:
    end = 8 + int.from_bytes(message[:8], "little")
    return json.loads(message[8:end]), message[end:]
