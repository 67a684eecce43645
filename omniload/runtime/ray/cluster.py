"""Joining a Ray cluster, or starting one of the job's own."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import signal
import threading
import time
from pathlib import Path
from typing import IO, Any

import ray

from omniload.errors import LoaderStopped, LoaderTimeout, PlaceError, kind_and_message
from omniload.observing.job_dir import job_dir
from omniload.runtime.options import RayOptions
from omniload.runtime.ray.reaper import Reaper, descendants

logger = logging.getLogger(__name__)

_AUTH_MODE = "RAY_AUTH_MODE"
_RETRY_S = 0.05
_QUIET = {
    "enable_timeline": False,
    "event_stats": False,
    "task_events_report_interval_ms": 0,
}
"""Ray keeps no record of every call for a dashboard that is not there."""
_TORCHRUN = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")


def job_name(given: str | None) -> str:
    """The name that the ranks of a job share: the one given, or one made of what the launcher told all of them.

    Raises:
        PlaceError: there are several ranks and nothing says which belong together.
    """
    if given is not None:
        return given
    if os.environ.get("MASTER_PORT"):
        said = json.dumps([os.environ.get(name, "") for name in _TORCHRUN])
        return hashlib.blake2b(said.encode(), digest_size=6).hexdigest()
    if _world_size() > 1:
        raise PlaceError(
            "ray: the ranks of the job have no name in common (there is no MASTER_PORT, as torchrun sets it); pass"
            " ray=RayOptions(job=...), the same on every rank and of no other job"
        )
    return f"{os.getpid():x}-{time.time_ns():x}"


class Cluster:
    """The cluster that this process is connected to.

    Args:
        note: where a process of this machine tells the other ranks of the job where it is; None if none does.
        lock: of the note, if that is this process.
        reaper: ends what is left of the cluster if this process, which runs it, is killed.
    """

    def __init__(
        self, note: Path | None = None, lock: IO[str] | None = None, reaper: Reaper | None = None
    ) -> None:
        self._note = note
        self._lock = lock
        self._reaper = reaper

    @property
    def lost(self) -> bool:
        """Whether the process that told of it is gone, and the cluster with it."""
        return self._lock is None and self._note is not None and _said(self._note) is None

    def check(self) -> None:
        """Raises LoaderStopped if the cluster is lost, or left: whatever called Ray then would start another."""
        if not ray.is_initialized():
            raise LoaderStopped("this process left the Ray cluster; make a loader anew to go on")
        if self.lost:
            raise LoaderStopped(
                "rank 0, which ran the Ray cluster of the job, is gone, and the actors with it; start the job again,"
                " from a saved state"
            )

    def end(self) -> None:
        """Tell of it no more, and end it if this process runs it."""
        assert self._note is not None, "of the process that tells of it"
        assert self._lock is not None, "of the process that tells of it"
        if self._reaper is not None:
            ray.shutdown()
        self._note.unlink(missing_ok=True)
        self._lock.close()
        if self._reaper is not None:
            self._reaper.end()

    def forget(self) -> None:
        """In a child that was forked: hold nothing by which others see that this process lives."""
        if self._lock is not None:
            self._lock.close()
        if self._reaper is not None:
            self._reaper.forget()


_told: Cluster | None = None
"""The one that this process told the other ranks of; for them it ends with the process."""


def told() -> bool:
    """Whether other ranks are in a cluster that ends with this process."""
    return _told is not None


def end() -> None:
    """End the cluster that this process runs."""
    global _told
    if _told is not None:
        _told.end()
        _told = None


def _forget() -> None:
    global _told
    if _told is not None:
        _told.forget()
        _told = None


os.register_at_fork(after_in_child=_forget)


def join(options: RayOptions, job: str, timeout_s: float) -> Cluster:
    """Connect this process to a cluster, if it is not, or start one for the job.

    Raises:
        LoaderTimeout: rank 0, which is to start one, does not come.
        PlaceError: the ranks are on several machines, and there is no cluster over them.
    """
    global _told
    note, first = job_dir(job) / "ray.json", int(os.environ.get("RANK", "0")) == 0
    address = options.address or os.environ.get("RAY_ADDRESS")
    if ray.is_initialized():
        if _told is None and first and _world_size() > 1 and not address:
            _told = Cluster(note, _write(note))  # or the others would wait for one that is never started
        return _told or Cluster(note if _said(note) is not None else None)
    if address:
        _connect(address)
        return Cluster()
    if int(os.environ.get("LOCAL_WORLD_SIZE", _world_size())) != _world_size():
        raise PlaceError(
            "ray: the ranks are on several machines; start a cluster over them (ray start) and set RAY_ADDRESS"
        )
    if first:
        before = descendants()
        _start(options, timeout_s)
        _end_unneeded()
        _told = Cluster(note, _write(note), Reaper(descendants() - before))
        return _told
    said = _wait_for(note, timeout_s)
    if said["auth"] == "token":
        _authenticate()
    _connect(said["address"])
    return Cluster(note)


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _connect(address: str) -> None:
    _init(address=address)


def _init(**options: Any) -> None:
    """Connect, or start; what the process does when it is told to end stays as it was, and is not Ray's to say."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        ray.init(log_to_driver=False, logging_level=logging.WARNING, configure_logging=False, **options)
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                if handler is not None:
                    signal.signal(number, handler)


def _start(options: RayOptions, timeout_s: float) -> None:
    """Start a cluster, again where the machine is too busy for the time that Ray gives it.

    Raises:
        LoaderTimeout: it did not start in time.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            _init(
                address="local",
                include_dashboard=False,
                object_store_memory=options.object_store_bytes,
                _system_config=_QUIET,
            )
            return
        except Exception as error:
            ray.shutdown()
            if not any(word in str(error).lower() for word in ("timed out", "timeout", "connect")):
                raise LoaderStopped(f"ray: no cluster could be started: {kind_and_message(error)}") from error
            if time.monotonic() > deadline:
                raise LoaderTimeout(
                    f"ray: no cluster could be started within {timeout_s:g} s ({kind_and_message(error)})"
                ) from error
            logger.warning("ray: a cluster did not start, trying again: %s", error)
            time.sleep(_RETRY_S)


def _end_unneeded() -> None:
    """End services of Ray that do nothing for a cluster of one job on one machine, and hold 150 MiB.

    They scale the number of nodes, copy what actors print to the driver, and report usage. Ray has no option for it.
    """
    node: Any = ray._private.worker._global_node
    for end_one in (node.kill_monitor, node.kill_log_monitor, node.kill_dashboard):
        end_one(check_alive=False)


def _authenticate() -> None:
    """Show the user's token to the cluster.

    A process that starts one does so by itself. One that joins, by an address that it is given, does not, and Ray has
    read the setting when it was imported.
    """
    from ray._private.authentication import authentication_token_setup

    authentication_token_setup.maybe_enable_token_auth_if_token_available()


def _write(note: Path) -> IO[str]:
    """Write down where the cluster is; the file is locked as long as this process lives."""
    written = note.with_suffix(f".{os.getpid()}")
    file = written.open("w")
    fcntl.flock(file, fcntl.LOCK_EX)
    said = {"address": ray.get_runtime_context().gcs_address, "auth": os.environ.get(_AUTH_MODE)}
    file.write(json.dumps(said))
    file.flush()
    written.replace(note)
    return file


def _said(note: Path) -> dict[str, Any] | None:
    """What a note says, if who wrote it is still there."""
    try:
        with note.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:  # it is
                said: dict[str, Any] = json.load(file)
                return said
    except FileNotFoundError:
        pass
    return None


def _wait_for(note: Path, timeout_s: float) -> dict[str, Any]:
    """What rank 0 wrote down, once it has."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        said = _said(note)
        if said is not None:
            return said
        time.sleep(_RETRY_S)
    raise LoaderTimeout(
        f"ray: rank 0 did not start a cluster within {timeout_s:g} s ({note} does not name one)"
    )
