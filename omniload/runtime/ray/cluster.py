"""Joining a Ray cluster, or starting one of the job's own."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

import ray

from omniload.errors import LoaderTimeout, PlaceError
from omniload.observing.job_dir import job_dir
from omniload.runtime.options import RayOptions

logger = logging.getLogger(__name__)

_AUTH_MODE = "RAY_AUTH_MODE"
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


def join(options: RayOptions, job: str, timeout_s: float) -> bool:
    """Connect this process to a cluster, if it is not; whether it started one for the job.

    Raises:
        LoaderTimeout: rank 0, which is to start one, does not come.
        PlaceError: the ranks are on several machines, and there is no cluster over them.
    """
    if ray.is_initialized():
        return False
    address = options.address or os.environ.get("RAY_ADDRESS")
    if address:
        _connect(address)
        return False
    if int(os.environ.get("LOCAL_WORLD_SIZE", _world_size())) != _world_size():
        raise PlaceError(
            "ray: the ranks are on several machines; start a cluster over them (ray start) and set RAY_ADDRESS"
        )
    note = job_dir(job) / "ray.json"
    if int(os.environ.get("RANK", "0")) == 0:
        _start(options)
        written = note.with_suffix(f".{os.getpid()}")
        said = {
            "address": ray.get_runtime_context().gcs_address,
            "pid": os.getpid(),
            "auth": os.environ.get(_AUTH_MODE),
        }
        written.write_text(json.dumps(said))
        written.replace(note)
        return True
    said = _noted(note, timeout_s)
    if said["auth"] == "token":
        _authenticate()
    _connect(said["address"])
    return False


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _connect(address: str) -> None:
    ray.init(address, log_to_driver=False, logging_level=logging.WARNING, configure_logging=False)


def _start(options: RayOptions) -> None:
    ray.init(
        address="local",
        include_dashboard=False,
        object_store_memory=options.object_store_bytes,
        log_to_driver=False,
        logging_level=logging.WARNING,
        configure_logging=False,
    )


def _authenticate() -> None:
    """Show the user's token to the cluster. A process that starts one does so by itself; one that joins, by an address
    that it was given, does not, and Ray read the setting when it was imported."""
    from ray._private.authentication import authentication_token_setup

    authentication_token_setup.maybe_enable_token_auth_if_token_available()


def _noted(note: Path, timeout_s: float) -> dict[str, Any]:
    """What rank 0 wrote down, once it has."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            said: dict[str, Any] = json.loads(note.read_text())
            os.kill(said["pid"], 0)
            return said
        except (OSError, ValueError, KeyError):  # not there yet, or left by a job that is gone
            time.sleep(0.05)
    raise LoaderTimeout(
        f"ray: rank 0 did not start a cluster within {timeout_s:g} s ({note} does not name one)"
    )
