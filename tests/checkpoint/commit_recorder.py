"""Real saves, recorded in the words of the model: what they do to storage and what messages they exchange."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from torch._C._distributed_c10d import HashStore

from checkpoint.boxes import Box
from checkpoint.engine.coordination import Coordinator
from checkpoint.engine.save import SaveOptions, Saver
from checkpoint.errors import AlreadyCommitted, CoordinationTimeout
from checkpoint.format.manifest import MANIFEST, read_manifest
from checkpoint.frameworks.values import CapturedState
from storage import FileStat, Store, Writer
from tests.checkpoint.commit_model import Model, follow
from tests.checkpoint.commit_programs import (
    FAILED,
    LATE,
    OK,
    REFUSED,
    STOPPED,
    VOTED_DOWN,
    Event,
    Job,
    State,
)
from tests.checkpoint.simulation import held, run_ranks

T = TypeVar("T")


class Stopped(BaseException):
    """Like a signal: the rank does not go on."""


See = Callable[[str, str], Event]
Spoil = Callable[[Event, Callable[[], Any]], Any]

_ATTEMPT_DIR = re.compile("data/([0-9a-f]{32})")
_MESSAGE = re.compile("/(plan|write)/(from|to)/([0-9]+)$")


class Place:
    """A directory, and what saves into it really do, in the words of the model."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.jobs: list[Job] = []
        self.events: list[Event] = []
        self.verdicts: dict[int, list[str]] = {}
        self.attempts: dict[str, int] = {}
        self.given_up = threading.Event()  # when a rank was told of a time-out
        self._lock = threading.Lock()

    def save(
        self,
        world_size: int,
        *,
        overwrite: bool = False,
        luck: frozenset[str] = frozenset(),
        spoil: Spoil = lambda _, act: act(),
        timeout_s: float = 20,
    ) -> list[str]:
        """Really save; how it went, by rank. ``spoil`` does or fails each operation on storage."""
        job = Job(attempt=len(self.jobs) + 1, world_size=world_size, overwrite=overwrite, luck=luck)
        self.jobs.append(job)
        keys = HashStore()
        options = SaveOptions(step=1, overwrite=overwrite, timeout_s=timeout_s, user_metadata={})
        tensor = torch.arange(4.0 * world_size).view(world_size, 4)

        def fn(coordinator: Coordinator) -> str:
            rank = coordinator.rank
            see = partial(self._see, job.attempt, rank)
            seat = Coordinator(RecordedKeys(keys, see), rank, world_size)  # type: ignore[arg-type]
            store = RecordedStore(self.root, see, spoil)

            def capture() -> CapturedState:
                spoil(Event(job.attempt, rank, "capture", ""), lambda: None)
                part = held("t", tensor, [Box((rank, 0), (1, 4))])
                return CapturedState(tensors=[part], objects={"model": {}}, rank_objects={})

            try:
                Saver(seat).save(store, capture, options, background=False)
            except AlreadyCommitted:
                return REFUSED
            except CoordinationTimeout:
                self.given_up.set()
                return LATE
            except Stopped:
                return STOPPED
            except Exception:
                return FAILED
            return OK

        self.verdicts[job.attempt] = run_ranks(world_size, fn)
        return self.verdicts[job.attempt]

    def _see(self, attempt: int, rank: int, op: str, what: str) -> Event:
        with self._lock:
            event = Event(attempt, rank, op, self._named(what, attempt))
            self.events.append(event)
        return event

    def _named(self, path: str, attempt: int = 0) -> str:
        """A path with the number of its attempt in place of the id; who first uses an id owns it."""
        return _ATTEMPT_DIR.sub(lambda found: f"data/{self.attempts.setdefault(found[1], attempt)}", path)

    def ends(self, events: Sequence[Event]) -> list[State]:
        """The ends of those paths of the model that have these events and end as it really ended."""
        store = Store(self.root)
        manifest = None
        if store.exists(MANIFEST):
            found = read_manifest(store)[0]
            manifest = (self.attempts[found.attempt], found.replaces and self.attempts[found.replaces])
        files = {self._named(one.path) for one in store.list("data")}
        verdicts = [verdict for job in self.jobs for verdict in self.verdicts[job.attempt]]
        return [
            end
            for end in follow(Model(jobs=self.jobs), events)
            if end.manifest == manifest
            and {path for path, _ in end.files if "/." not in path} == files
            and [FAILED if one == VOTED_DOWN else one for one in end.verdicts] == verdicts
        ]


class RecordedStore(Store):
    """Tells what is about to be done, and has ``spoil`` do it."""

    def __init__(self, root: Path, see: See, spoil: Spoil) -> None:
        super().__init__(root)
        self._inside, self._see, self._spoil = "", see, spoil

    def sub(self, path: str) -> Store:
        below = super().sub(path)
        below.__class__ = RecordedStore
        assert isinstance(below, RecordedStore)
        below._inside, below._see, below._spoil = f"{self._inside}{path}/", self._see, self._spoil
        return below

    def _do(self, op: str, path: str, act: Callable[[], T]) -> T:
        done: T = self._spoil(self._see(op, self._inside + path), act)
        return done

    def stat(self, path: str) -> FileStat:
        return self._do("look", path, partial(super().stat, path))

    def read(self, path: str) -> bytes:
        return self._do("read", path, partial(super().read, path))

    def write(self, path: str, data: Any) -> None:
        self._do("write", path, partial(super().write, path, data))

    def create(self, path: str, data: Any) -> None:
        self._do("create", path, partial(super().create, path, data))

    def delete_tree(self, prefix: str) -> None:
        self._do("delete", prefix, partial(super().delete_tree, prefix))

    def writer(self, path: str, header_bytes: int = 0) -> Any:
        writer = self._do("open", path, partial(super().writer, path, header_bytes))
        return _RecordedWriter(writer, partial(self._do, path=path))


class _RecordedWriter:
    def __init__(self, writer: Writer, do: Callable[..., Any]) -> None:
        self._writer = writer
        self._do = do
        self.set_header = writer.set_header

    @property
    def num_bytes(self) -> int:
        return self._writer.num_bytes

    def write(self, data: Any) -> None:
        self._do("fill", act=partial(self._writer.write, data))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._do("close", act=self._writer.close)
        else:
            self._writer.__exit__(kind, error, trace)


class RecordedKeys:
    """A c10d store that tells the messages that a rank sends, before, and those that it reads, after."""

    def __init__(self, keys: HashStore, see: See) -> None:
        self._keys, self._see = keys, see

    def __getattr__(self, name: str) -> Any:
        return getattr(self._keys, name)

    def clone(self) -> Self:
        return self

    def set(self, key: str, value: Any) -> None:
        if message := _MESSAGE.search(key):
            stage, way, rank = message.groups()
            mark = value[4:5].decode()  # after the number of parts: + for ok, - for failed
            self._see(*((f"answer{mark}", f"{stage} to {rank}") if way == "to" else (f"post{mark}", stage)))
        self._keys.set(key, value)

    def delete_key(self, key: str) -> bool:
        done = self._keys.delete_key(key)
        if message := _MESSAGE.search(key):
            stage, way, rank = message.groups()
            if way == "to":
                self._see("hear", stage)
            elif rank == "1":  # rank 0 has waited for all before it reads the first
                self._see("gather", stage)
        return done
