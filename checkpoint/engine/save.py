"""Saving, from captured state to a committed checkpoint.

::

    main thread   ── round "plan" ──► staged ──► returns (async)
    background                          └──► written ── round "commit" ──► committed
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Final

import torch

from checkpoint.engine.commit import Attempt, commit, remove_data
from checkpoint.engine.coordination import Coordinator
from checkpoint.engine.files import FileLayout, views_of
from checkpoint.engine.metadata import TableEncoder
from checkpoint.engine.options import SaveOptions
from checkpoint.engine.planning import SavePlanner
from checkpoint.engine.staging import StagingPool, stage, staging_bytes
from checkpoint.engine.votes import encode_vote
from checkpoint.engine.write import Live, Source, Staged, write_files
from checkpoint.errors import AsyncSaveFailed, CoordinationTimeout, RanksFailed
from checkpoint.format.manifest import stored_metadata
from checkpoint.frameworks.values import CapturedState
from checkpoint.handle import SaveHandle, SaveReport
from storage import Store
from storage.background import BackgroundThread
from storage.spans import span

_logger = logging.getLogger("checkpoint")

# Rank 0 may serve the store that the others read the outcome from; it gives them this long before it moves on.
_LINGER_S: Final = 10.0

_EXIT_WAIT_S: Final = 60.0

# Of the time-out, the part in which writing in the background leaves the cores to training; then it takes its share.
_PATIENCE: Final = 0.25


@dataclass(kw_only=True, slots=True)
class _Job:
    """A planned save on its way."""

    store: Store
    options: SaveOptions
    handle: SaveHandle
    name: str
    attempt: Attempt
    layouts: list[FileLayout]
    views: list[list[torch.Tensor]]
    rank_objects: Mapping[str, object]
    tables: TableEncoder | None  # on rank 0
    objects: bytes
    on_commit: Callable[[], None] | None
    sources: list[Source] = field(default_factory=list)  # where the bytes come from, once it is known
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
        self._planner = SavePlanner(coordinator)
        self._pool = StagingPool()
        self._in_flight: list[SaveHandle] = []
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        # Ends the thread, unless the process ends, which sees to that itself.
        weakref.finalize(self, self._jobs.put, None).atexit = False

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which commits."""
        return self._coordinator.rank == 0

    def next_call(self) -> str:
        """A name for the rounds of one save, to be taken before anything can fail; equal on all ranks."""
        return self._coordinator.next_call("save")

    def checking_arguments(self, name: str, timeout_s: float) -> AbstractContextManager[None]:
        """What is raised in it fails the save of this name on all ranks: to the others, this one failed to plan."""
        return self._coordinator.checking(name, "plan", timeout_s)

    def save(
        self,
        store: Store,
        capture: Callable[[], CapturedState],
        options: SaveOptions,
        *,
        background: bool,
        on_commit: Callable[[], None] | None = None,
        name: str | None = None,
    ) -> SaveHandle:
        """Save; see ``checkpoint.save`` and ``checkpoint.async_save``.

        Args:
            store: The checkpoint directory.
            capture: Describes the state; its errors reach all ranks.
            options: How.
            background: Return when the state is staged. Otherwise the handle is done on return.
            on_commit: Called after the commit, on rank 0 only, by the thread that committed.
            name: Of the call, if the caller has taken one with :meth:`next_call`.

        Raises:
            AsyncSaveFailed: An earlier save failed unseen; this one was not begun.
            CheckpointError: Planning failed, on all ranks alike.
        """
        name = name or self.next_call()
        with span("checkpoint.plan", path=store.url):
            job = self._plan(name, store, capture, options, on_commit)
        if background:
            self._stage(job)
            job.views = []
            self._in_flight = [one for one in self._in_flight if not one.done() or one.unseen_failure]
            self._in_flight.append(job.handle)
            self._start()
            self._jobs.put(job)
        else:
            job.sources = [Live(*one) for one in zip(job.layouts, job.views, strict=True)]
            _finish(job, self._coordinator, background=False)
        return job.handle

    def prepare(
        self, store: Store, capture: Callable[[], CapturedState], options: SaveOptions, name: str
    ) -> None:
        """Do ahead, together with all ranks, what only the first asynchronous save of a state has to do.

        That is a plan, which is kept, and in the background staging memory, which else is had page by page.

        Args:
            store: The directory of the checkpoints.
            capture: As for :meth:`save`.
            options: As for :meth:`save`.
            name: Of the call, from :meth:`next_call`.

        Raises:
            AsyncSaveFailed, CheckpointError: As :meth:`save`.
        """
        job = self._plan(name, store, capture, options, None)
        self._pool.prepare(staging_bytes(job.layouts))

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
        user_metadata: dict[str, object] = {}

        def checked_capture() -> CapturedState:
            nonlocal user_metadata
            self._raise_unseen()
            if self.leads:
                # The caller may change it while the save is in flight.
                user_metadata = stored_metadata(options.user_metadata)
            return capture()

        try:
            planned = self._planner.plan(name, store, checked_capture, options)
        except Exception as error:
            self._note_seen(error, options.timeout_s)
            raise
        return _Job(
            store=store,
            options=options,
            handle=SaveHandle(store.url),
            name=planned.attempt,
            attempt=Attempt(
                attempt=planned.attempt,
                run_id=planned.run_id,
                step=options.step,
                overwrite=options.overwrite,
                user_metadata=user_metadata,
            ),
            layouts=planned.layouts,
            views=views_of(planned.layouts, planned.captured.tensors),
            rank_objects=planned.captured.rank_objects,
            tables=planned.tables,
            objects=planned.objects,
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

    def _stage(self, job: _Job) -> None:
        """Copy what the job writes; a failure is told to the other ranks by the background part."""
        try:
            with span("checkpoint.stage", path=job.store.url):
                # Training would wait for the saves before this one: they leave the cores to it no longer.
                if self._pool.exhausted:
                    for handle in self._in_flight:
                        handle.awaited.set()
                buffer = self._pool.take(staging_bytes(job.layouts), job.options.timeout_s)
                job.done = partial(self._pool.give_back, buffer)
                images = stage(job.layouts, job.views, buffer)
                job.sources = [Staged(*one) for one in zip(job.layouts, images, strict=True)]
        except Exception as error:
            job.failure = error

    def _start(self) -> None:
        if self._thread is None:
            # When the process ends it is waited for within bounds; what is cut off then was never visible.
            self._thread = BackgroundThread(
                partial(_run, self._jobs, self._background),
                name="checkpoint-save",
                ask_to_end=partial(self._jobs.put, None),
                exit_wait_s=_EXIT_WAIT_S,
            )
            self._thread.start()
            _running.add(self)


_running: weakref.WeakSet[Saver] = weakref.WeakSet()


def _at_exit() -> None:
    for saver in list(_running):
        try:
            saver.wait(_EXIT_WAIT_S)
        except Exception as error:  # nobody is left to raise it to
            _logger.error("a checkpoint was lost at exit: %s", error)


# Not atexit: its handlers run when the executors that writing needs refuse work already. These run before that, the
# last registered first: this one, then that of storage.background, which ends the threads.
threading._register_atexit(_at_exit)  # type: ignore[attr-defined]

# The threads that save are in the parent: a forked worker of a data loader would wait for them in vain when it ends.
os.register_at_fork(after_in_child=_running.clear)


def _run(jobs: queue.SimpleQueue[_Job | None], coordinator: Coordinator) -> None:
    while (job := jobs.get()) is not None:
        try:
            _finish(job, coordinator, background=True)
        except BaseException as error:
            job.handle.resolve(error)
        del job  # an idle thread holds on to nothing


def _finish(job: _Job, coordinator: Coordinator, *, background: bool) -> None:
    """Write, vote, commit; resolves the handle or raises."""

    def local() -> bytes:
        try:
            if job.failure is not None:
                raise job.failure
            data = job.store.sub(job.attempt.data_dir)
            written = write_files(
                data,
                job.layouts,
                job.sources,
                patience_s=job.options.timeout_s * _PATIENCE if background else None,
                awaited=job.handle.awaited,
            )
            return encode_vote(written, job.rank_objects)
        finally:
            job.sources = []
            job.done()

    voted = False

    def decide(votes: list[bytes]) -> bytes:
        nonlocal voted
        voted = True
        assert job.tables is not None
        num_bytes = commit(job.store, job.attempt, job.tables, job.objects, votes)
        report = SaveReport(
            url=job.store.url,
            step=job.options.step,
            attempt=job.attempt.attempt,
            num_tensors=len(job.tables.plan.tensors),
            num_bytes=num_bytes,
        )
        return json.dumps(asdict(report)).encode()

    try:
        answer = coordinator.round(
            job.name, "write", local, decide, timeout_s=job.options.timeout_s, linger_s=_LINGER_S
        )
    except CoordinationTimeout:
        raise  # who has not reported may still be writing
    except Exception:
        # All ranks have reported, so nobody writes any more; before the votes were in nothing can be committed.
        if coordinator.rank == 0 and not voted:
            remove_data(job.store, job.attempt.data_dir)
        raise
    if job.on_commit is not None and coordinator.rank == 0:
        job.on_commit()
    job.handle.resolve(SaveReport(**json.loads(answer)))
