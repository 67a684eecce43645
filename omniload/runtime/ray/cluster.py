"""Joining a Ray cluster, or starting one of the job's own."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Mapping
from typing import Any

import ray

from omniload.errors import LoaderStopped, LoaderTimeout, PlaceError, kind_and_message
from omniload.runtime.options import RayOptions
from omniload.runtime.ray.note import Note
from omniload.runtime.ray.reaper import Reaper, descendants
from storage.background import BackgroundThread

logger = logging.getLogger(__name__)

_AUTH_MODE = "RAY_AUTH_MODE"
_RETRY_S = 0.05
_LOOK_S = 0.5
"""How often a process looks whether the one that runs its cluster is there."""
_LEAVING_S = 20.0
"""How long leaving a cluster that is gone is waited for."""
_NICENESS = "RAY_worker_niceness"
_SETTINGS = {"enable_timeline": False, "event_stats": False, "task_events_report_interval_ms": 0}
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
        note: of the rank 0 that runs it, on this machine; None if it is there whatever becomes of any rank.
        here: whether that rank is this process.
        reaper: ends what is left of the cluster if this process, which started it, is killed.
    """

    def __init__(self, note: Note | None = None, *, here: bool = False, reaper: Reaper | None = None) -> None:
        self.ends_here = here
        """Whether it ends with this process."""
        self._note = note
        self._reaper = reaper
        self._ending = threading.Event()
        self._watching: BackgroundThread | None = None
        if note is not None and not here:
            note.take_part()
            self._watching = BackgroundThread(
                self._watch, name="omniload-cluster", ask_to_end=self._ending.set
            )
            self._watching.start()

    @property
    def lost(self) -> bool:
        """Whether the process that ran it is gone, and the cluster with it."""
        return not self.ends_here and self._note is not None and self._note.read() is None

    @property
    def has_others(self) -> bool:
        """Whether other processes are in it that it ends under if this one ends."""
        return self.ends_here and self._note is not None and self._note.others

    def check(self) -> None:
        """Raises LoaderStopped if the cluster is lost, or left: whatever called Ray then would start another."""
        if self.lost:
            # An error that nobody catches Ray tells the cluster, for which it would wait if this were still in it.
            if self._watching is not None:
                self._watching.join(_LEAVING_S)
            raise LoaderStopped(
                "rank 0, which ran the Ray cluster of the job, is gone, and the actors with it; start the job again,"
                " from a saved state"
            )
        if not ray.is_initialized():
            raise LoaderStopped("this process left the Ray cluster; make a loader anew to go on")

    def end(self) -> None:
        """Tell of it no more, and end it if this process started it."""
        assert self._note is not None, "of the process that tells of it"
        self._note.withdraw()  # first, so that others that are in it all the same leave it by themselves
        if self._reaper is not None:
            ray.shutdown()
            self._reaper.end()

    def forget(self) -> None:
        """In a child that was forked: hold nothing by which others see that this process lives."""
        if self._note is not None:
            self._note.let_go()
        if self._reaper is not None:
            self._reaper.forget()

    def _watch(self) -> None:
        """Leave the cluster when it is lost. Else Ray would end this process a minute later, whatever it does then."""
        assert self._note is not None, "which is watched"
        while not self._ending.wait(_LOOK_S):
            if self.lost:
                logger.warning(
                    "ray: rank 0, which ran the Ray cluster of the job, is gone; rank %s goes on without, but for its"
                    " loaders, which raise LoaderStopped",
                    os.environ.get("RANK"),
                )
                # Calls that this interrupts, and later ones, would have Ray start another.
                ray._private.auto_init_hook.enable_auto_connect = False
                ray.shutdown()
                self._note.let_go()
                return


_joined: Cluster | None = None
"""The one that this process is in, if it ends with a rank of the job."""


def current() -> Cluster:
    """The one that this process is in."""
    return _joined or Cluster()


def end() -> None:
    """End the cluster that ends with this process, if there is one."""
    global _joined
    if _joined is not None and _joined.ends_here:
        _joined.end()
        _joined = None


def _forget() -> None:
    global _joined
    if _joined is not None:
        _joined.forget()
        _joined = None


os.register_at_fork(after_in_child=_forget)


def join(options: RayOptions, job: str, timeout_s: float) -> Cluster:
    """Connect this process to a cluster, if it is not, or start one for the job.

    Raises:
        LoaderStopped: the process that ran the cluster of the job is gone.
        LoaderTimeout: rank 0, which is to start one, does not come.
        PlaceError: the ranks are on several machines, and there is no cluster over them.
    """
    global _joined
    address = options.address or os.environ.get("RAY_ADDRESS")
    if _joined is not None and (ray.is_initialized() or _joined.lost):
        _joined.check()
        return _joined
    note, first = Note(job), int(os.environ.get("RANK", "0")) == 0
    if ray.is_initialized():
        if address:
            return Cluster()
        if first and _world_size() > 1:
            _tell(note)  # or the others would wait for one that is never started
            _joined = Cluster(note, here=True)
        elif not first and (said := note.read()) is not None:
            _joined = _joined_by(note, said)
        return current()
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
        _tell(note)
        _joined = Cluster(note, here=True, reaper=Reaper(descendants() - before))
        return _joined
    said = note.wait(timeout_s)
    if said["auth"] == "token":
        _authenticate()
    _connect(said["address"])
    _joined = _joined_by(note, said)
    return current()


def _tell(note: Note) -> None:
    """Tell the other ranks where the cluster is that this process is in."""
    node: Any = ray._private.worker._global_node
    address = ray.get_runtime_context().gcs_address
    note.write({"address": address, "auth": os.environ.get(_AUTH_MODE), "runs_it": node.is_head()})


def _joined_by(note: Note, said: Mapping[str, Any]) -> Cluster | None:
    """The cluster that this process is in now, if it is one that ends with the process that wrote the note."""
    same = said["address"] == ray.get_runtime_context().gcs_address
    return Cluster(note) if same and said["runs_it"] else None


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


def system_config() -> dict[str, Any]:
    """Of Ray's own options, those that a cluster of a job is started with.

    Ray's workers yield to everything else (niceness 15, a thirtieth of the processor beside a busy process). Actors
    that load do not: where ranks keep the processors busy, they would be starved, and all ranks wait for them then.
    What the user sets goes before.
    """
    return {**_SETTINGS, **({} if _NICENESS in os.environ else {"worker_niceness": 0})}  # Ray adds to it


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
                _system_config=system_config(),
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
