"""Where the jobs of this machine publish their numbers, and how others find them.

::

    $OMNILOAD_RUNTIME_DIR, or omniload-<uid> in the folder for temporary files; nobody else may write there
    └── <job>/
        ├── stats.json      the last numbers, replaced as a whole about once a second
        └── events.jsonl    what happened (see `omniload.observing.events`)

A job that ended removes its stats.json; one that was killed leaves it, and is recognised by its age or its process.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from socket import gethostname
from typing import Annotated, Final, Literal

from pydantic import Field, TypeAdapter

from omniload.errors import JobNotFound, ObservingError
from omniload.observing.stats import JobStats
from omniload.suggest import suggest

logger = logging.getLogger(__name__)

STALE_AFTER_S: Final = 30.0
"""Age at which numbers no longer tell how the job is."""

_STATS: Final = "stats.json"
_EVENTS: Final = "events.jsonl"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_REMEDY: Final = "set OMNILOAD_RUNTIME_DIR to a folder of yours"
_OTHERS_MAY_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """What a job published last."""

    stats: JobStats
    """The numbers."""
    host: str
    """Machine of the process that published them."""
    pid: int
    """That process."""
    age_s: float
    """Seconds since."""
    gone: bool
    """Whether that process was of this machine and is no more."""

    @property
    def stale(self) -> str | None:
        """Why the numbers no longer tell how the job is; None if they do."""
        if self.gone:
            return f"its process {self.pid} is gone"
        if self.age_s > STALE_AFTER_S:
            return f"not updated for {self.age_s:,.0f} s"
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class _File:
    """The content of stats.json."""

    version: Literal[1] = 1
    host: str
    pid: Annotated[int, Field(strict=True, ge=1, lt=2**31)]
    stats: JobStats


_FILE: Final = TypeAdapter(_File)


def runtime_dir() -> Path:
    """The folder of all jobs; it need not be there."""
    named = os.environ.get("OMNILOAD_RUNTIME_DIR")
    return Path(named) if named else Path(tempfile.gettempdir()) / f"omniload-{os.geteuid()}"


def job_dir(job: str) -> Path:
    """The folder of a job, made if it is not there.

    Raises:
        ValueError: no job can have this name.
        ObservingError: the folder cannot be made, or others may write there.
    """
    if not _NAME.fullmatch(job):
        raise ValueError(
            f"job: {job!r} cannot be a name; take at most 100 of A-Z a-z 0-9 . _ -, a letter or digit first"
        )
    root = runtime_dir()
    _make(root)
    _check_owner(root)
    _make(root / job)
    return root / job


def events_path(job: str) -> Path:
    """The file of a job's events; its folder is made if it is not there.

    Raises:
        ValueError: no job can have this name.
        ObservingError: the folder cannot be made, or others may write there.
    """
    return job_dir(job) / _EVENTS


def publish(stats: JobStats) -> None:
    """Replace the published numbers of a job. Readers see the old ones or the new, never a part.

    Raises:
        ValueError: no job can have this name.
        ObservingError: they cannot be written.
    """
    folder = job_dir(stats.job)
    content = _FILE.dump_json(_File(host=gethostname(), pid=os.getpid(), stats=stats))
    hidden: str | None = None
    try:
        # Not durable: after a power cut there is no job to tell of.
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".", delete=False) as file:
            hidden = file.name
            file.write(content)
        Path(hidden).replace(folder / _STATS)
    except OSError as error:
        if hidden is not None:
            Path(hidden).unlink(missing_ok=True)
        raise ObservingError(
            f"job '{stats.job}': {folder / _STATS} cannot be written ({error.strerror})"
        ) from None


def withdraw(job: str) -> None:
    """Say that a job has ended: its numbers are no longer published. Its events stay.

    Raises:
        ValueError: no job can have this name.
        ObservingError: the numbers cannot be removed.
    """
    path = job_dir(job) / _STATS
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise ObservingError(f"job '{job}': {path} cannot be removed ({error.strerror})") from None


def read(job: str) -> Published:
    """What a job published last.

    Raises:
        JobNotFound: it published nothing, or has ended.
        ObservingError: it cannot be read.
    """
    found = _read(job) if job in _names() else None
    if found is None:
        known = [one.stats.job for one in list_jobs()]
        raise JobNotFound(f"no job '{job}' publishes in {runtime_dir()}{suggest(job, known)}")
    return found


def list_jobs() -> list[Published]:
    """What every job published last, by name; those whose numbers are stale are among them.

    What cannot be read is left out, with a warning.

    Raises:
        ObservingError: the folder is not ours.
    """
    found = []
    for name in _names():
        try:
            published = _read(name)
        except ObservingError as error:
            logger.warning("left out: %s", error)
        else:
            found += [published] if published else []
    return found


def _names() -> list[str]:
    """Of the jobs that have a folder."""
    root = runtime_dir()
    try:
        names = [path.name for path in root.iterdir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ObservingError(f"{root} cannot be read ({error.strerror}); {_REMEDY}") from None
    _check_owner(root)
    return sorted(filter(_NAME.fullmatch, names))


def _read(job: str) -> Published | None:
    path = runtime_dir() / job / _STATS
    try:
        with path.open("rb") as file:
            age_s = time.time() - os.fstat(file.fileno()).st_mtime
            content = file.read()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ObservingError(f"job '{job}': {path} cannot be read ({error.strerror})") from None
    try:
        found = _FILE.validate_json(content)
    except ValueError:
        raise ObservingError(
            f"job '{job}': {path} is damaged, or of another version of omniload; use the job's version"
        ) from None
    gone = found.host == gethostname() and not _is_alive(found.pid)
    return Published(stats=found.stats, host=found.host, pid=found.pid, age_s=age_s, gone=gone)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError:
        raise ObservingError(f"{folder} is no folder; remove it, or {_REMEDY}") from None
    except OSError as error:
        raise ObservingError(f"{folder} cannot be made ({error.strerror}); {_REMEDY}") from None


def _check_owner(root: Path) -> None:
    # Of a symbolic link, too: who owns it can make it lead elsewhere.
    for status in (root.lstat(), root.stat()):
        if status.st_uid != os.geteuid():
            raise ObservingError(f"{root} belongs to user {status.st_uid}, not to you; {_REMEDY}")
    if root.stat().st_mode & _OTHERS_MAY_WRITE:
        raise ObservingError(f"others may write to {root}; chmod 700 it, or {_REMEDY}")


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it is somebody else's
    return True
