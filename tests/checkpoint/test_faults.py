"""Storage that fails in the middle of a save: full, read-only, or a server that loses requests and answers.

Whatever happens, what is visible afterwards is complete, and what was there before is as it was.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch

from checkpoint.boxes import Box
from checkpoint.errors import NotACheckpoint, RankFailed
from checkpoint.manager import committed_steps, step_dir
from checkpoint.stored import StoredCheckpoint
from checkpoint.verify import verify
from storage import NoSpace, PermissionDenied, RetryPolicy, Store
from tests.checkpoint.simulation import OPTIONS, load_simulated, random_bits, save_simulated
from tests.storage.disks import tmpfs
from tests.storage.proxy import Fault, FaultProxy, fault_proxy
from tests.storage.seaweed import S3Server, s3_server

pytestmark = pytest.mark.chaos

ROWS = [[Box((64 * rank, 0), (64, 100))] for rank in range(2)]
WHOLE = [[Box.whole((128, 100))]]
CURT = RetryPolicy(max_attempts=2, first_delay_s=0.01, attempt_timeout_s=1.0, deadline_s=3)


def tensor(step: int) -> torch.Tensor:
    return random_bits((128, 100), torch.float32, seed=step)


def save(store: Store, step: int, *, background: bool = False, overwrite: bool = False) -> None:
    options = replace(OPTIONS, step=step, overwrite=overwrite)
    save_simulated(
        store.sub(step_dir(step)), 2, {"t": tensor(step)}, {"t": ROWS}, background=background, options=options
    )


def kinds_of(group: BaseExceptionGroup[BaseException]) -> set[str]:
    """What kinds of errors the ranks ran into."""
    found = set()
    for one in group.exceptions:
        if isinstance(one, BaseExceptionGroup):
            found |= kinds_of(one)
        else:
            found.add(one.kind if isinstance(one, RankFailed) else type(one).__name__)
    return found


def failures(store: Store, step: int, **options: bool) -> set[str]:
    """Save; what kinds of errors the ranks ran into."""
    try:
        save(store, step, **options)
    except BaseExceptionGroup as group:
        return kinds_of(group)
    return set()


def assert_whole(store: Store, step: int) -> None:
    """A step is committed, verifies, and holds the values of that step."""
    checkpoint = StoredCheckpoint.open(store.sub(step_dir(step)))
    assert verify(checkpoint).problems == ()
    assert checkpoint.manifest.step == step
    load_simulated(store.sub(step_dir(step)), 1, {"t": tensor(step)}, {"t": WHOLE})


@pytest.mark.parametrize("background", [False, True])
def test_a_disk_that_is_full_at_any_point_of_a_save(tmp_path: Path, background: bool) -> None:
    """Its room ends in a payload file, in a table, at the manifest: nothing is visible.

    Nothing is left either, unless it ended at the manifest: then all files are whole.
    """
    with tmpfs(tmp_path / "disk", "size=1m") as mount:
        root = Store(mount / "run")
        save(root, 1)
        outcomes, seen = [], set[str]()
        for step, kilobytes in enumerate(range(0, 132, 4), start=2):
            status = os.statvfs(mount)
            with (mount / "filler").open("wb") as filler:
                os.posix_fallocate(filler.fileno(), 0, status.f_bavail * status.f_bsize - (kilobytes << 10))
            kinds = failures(root, step, background=background)
            assert kinds <= {NoSpace.__name__}
            outcomes.append(not kinds)
            assert committed_steps(root) == ([1, step] if outcomes[-1] else [1])
            left = {one.path.rpartition("/")[2] for one in root.list(step_dir(step))}
            assert outcomes[-1] or not left or left >= {"objects.json", "model-00000-000.safetensors"}
            assert not any(name.startswith(".") for name in left)
            seen |= left if kinds else set()
            assert_whole(root, 1)
            (mount / "filler").unlink()
            if outcomes[-1]:
                assert_whole(root, step)
            root.delete_tree(step_dir(step))
        assert not outcomes[0], "some found no room at all"
        assert outcomes[-1], "some found enough"
        assert seen, "some found enough for all but the manifest"


@pytest.mark.skipif(
    os.geteuid() == 0, reason="root may write anywhere; the mount below is read-only for it too"
)
def test_a_directory_without_the_right_to_write(tmp_path: Path) -> None:
    save(Store(tmp_path), 1)
    tmp_path.chmod(0o500)
    try:
        refuses(Store(tmp_path))
    finally:
        tmp_path.chmod(0o700)


def test_a_file_system_that_is_read_only(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", "size=1m") as mount:
        save(Store(mount), 1)
        os.system(f"mount -o remount,ro {mount}")
        refuses(Store(mount))


def refuses(root: Store) -> None:
    assert failures(root, 2) == {PermissionDenied.__name__}
    assert committed_steps(root) == [1]
    assert_whole(root, 1)


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[FaultProxy]:
    address = urlsplit(s3.endpoint_url)
    with fault_proxy(str(address.hostname), int(address.port or 80)) as running:
        yield running


_FAULTS = [
    Fault(kind="error", status=500),
    Fault(kind="error", status=503, code="SlowDown"),
    Fault(kind="error", status=403, code="AccessDenied"),
    Fault(kind="lost-answer"),
    Fault(kind="reset-request", after_bytes=100),
    Fault(kind="silence"),
]
_TARGETS = ["model-00001-000", "stored.parquet", "manifest.json"]


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 1000])
@pytest.mark.parametrize("target", _TARGETS)
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_server_that_loses_what_is_sent(
    s3: S3Server, proxy: FaultProxy, target: str, times: int, overwrite: bool
) -> None:
    """Once or for ever, for payload, a table and the manifest."""
    direct = Store(f"s3://{s3.bucket}/{uuid.uuid4().hex}", s3.storage_options)
    options = {**s3.storage_options, "client_kwargs": {"endpoint_url": proxy.url}}
    behind = Store(direct.url, options, retry=CURT)
    save(direct, 1)
    outcomes = set()
    for step, fault in enumerate(_FAULTS, start=2):
        if overwrite:
            save(direct, step)
        old = _attempt(direct, step)
        proxy.inject(replace(fault, method="PUT", query=target, times=times))
        kinds = failures(behind, step, overwrite=overwrite)
        assert kinds <= {"Transient", "Throttled", "Stalled", "PermissionDenied", "AlreadyCommitted"}
        outcomes.add("failed" if kinds else "saved")
        assert kinds or _attempt(direct, step) not in (None, old)
        assert proxy.num_faults, "the fault happened"
        proxy.heal()
        # A save whose last answer was lost may have succeeded; nothing is ever half there.
        if _attempt(direct, step) is not None:
            assert_whole(direct, step)
        assert_whole(direct, 1)
    assert ("saved" in outcomes) == (times == 1)
    assert "failed" in outcomes or times == 1


def _attempt(store: Store, step: int) -> str | None:
    try:
        return StoredCheckpoint.open(store.sub(step_dir(step))).manifest.attempt
    except NotACheckpoint:
        return None


def test_a_file_in_the_way_is_reported_and_left_alone(tmp_path: Path) -> None:
    """A file where the directory of the step must be."""
    save(Store(tmp_path), 1)
    (tmp_path / step_dir(2)).write_text("in the way")
    assert failures(Store(tmp_path), 2)
    assert committed_steps(Store(tmp_path)) == [1]
    assert_whole(Store(tmp_path), 1)
    assert (tmp_path / step_dir(2)).read_text() == "in the way"
