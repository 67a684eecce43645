"""Every operation under every fault ends with the right bytes or with a classified error, and in time.

Whatever happens, no partial object is visible to others. The outcomes are printed as a table at the end of the run.
"""

import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import storage.s3_upload
from storage import (
    AlreadyExists,
    Corrupt,
    NoSpace,
    NotFound,
    PermissionDenied,
    RetryPolicy,
    Stalled,
    StorageError,
    Store,
    Throttled,
    Transient,
    drain,
)
from tests.storage.disks import tmpfs
from tests.storage.operations import OPERATIONS, PART_BYTES, Operation, visible_is_whole
from tests.storage.proxy import Fault, FaultProxy
from tests.storage.seaweed import S3Server
from tests.storage.uploads import abort_uploads, unfinished_uploads

pytestmark = pytest.mark.chaos

PATIENT = RetryPolicy(first_delay_s=0.02, max_delay_s=0.1, attempt_timeout_s=0.4, deadline_s=30)
BRIEF = RetryPolicy(max_attempts=3, first_delay_s=0.01, attempt_timeout_s=5, deadline_s=15)
CURT = RetryPolicy(first_delay_s=0.01, attempt_timeout_s=0.2, deadline_s=0.6)
SLACK_S = 10.0  # a busy machine is no fault of ours

# A fault that passes: it happens once, and the operation must come out right.
ONCE: dict[str, Callable[[Operation], bool]] = {
    "error 500": lambda one: True,
    "error 503": lambda one: True,
    "lost-answer": lambda one: True,
    "silence": lambda one: True,
    "reset-request": lambda one: one.uploads,
    "stall-request": lambda one: one.uploads,
    "reset-answer": lambda one: one.downloads,
    "truncate": lambda one: one.downloads,
    "stall-answer": lambda one: one.downloads,
}

# A fault that lasts, under which policy, and what it must be called.
FOR_EVER: dict[str, tuple[RetryPolicy, type[StorageError]]] = {
    "error 500": (BRIEF, Transient),
    "error 503": (BRIEF, Throttled),
    "lost-answer": (BRIEF, Transient),
    "silence": (CURT, Stalled),
}


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage.s3_upload, "FIRST_PART_BYTES", PART_BYTES)


@pytest.fixture
def direct(s3: S3Server) -> Iterator[Store]:
    """The store as others see it, without faults."""
    store = Store(f"s3://{s3.bucket}/faults-{uuid.uuid4().hex}", s3.storage_options)
    Operation.prepare(store)
    yield store
    abort_uploads(s3, store)


@pytest.fixture
def note(
    request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> Callable[..., None]:
    """Put a cell into the table."""
    return lambda *cell: record_property("fault_cell", cell)


def behind(proxy: FaultProxy, s3: S3Server, direct: Store, engine: str, policy: RetryPolicy) -> Store:
    """The same store through the proxy."""
    options = {**s3.storage_options, "engine": engine, "client_kwargs": {"endpoint_url": proxy.url}}
    return Store(direct.url, options, retry=policy)


def fault(name: str, operation: Operation, times: int) -> Fault:
    method, query = operation.request
    target = {"method": method, "query": query} if times == 1 else {}
    if name.startswith("error"):
        status = int(name.removeprefix("error "))
        code = {500: "InternalError", 503: "SlowDown"}[status]
        return Fault(kind="error", status=status, code=code, times=times, **target)
    return Fault(kind=name, after_bytes=100, times=times, **target)  # type: ignore[arg-type]


def outcome(operation: Operation, store: Store, policy: RetryPolicy) -> StorageError | None:
    """Run it, hold it to its deadline, and give the classified error; any other fails the test."""
    began = time.monotonic()
    error = None
    try:
        operation.run(store)
    except StorageError as raised:
        error = raised
    assert error is None or (error.path.startswith(store.url) and error.reason)
    # Once for the work and once for the clean-up.
    assert time.monotonic() - began < 2 * policy.deadline_s + SLACK_S
    return error


def cases(applies: Callable[[Operation], bool] = lambda one: True) -> list[tuple[str, Operation]]:
    return [
        pytest.param(engine, one, id=f"{engine}-{one.name}")  # type: ignore[misc]
        for one in OPERATIONS
        for engine in one.engines
        if applies(one)
    ]


def once_cases() -> list[object]:
    return [
        pytest.param(engine, one, name, id=f"{engine}-{one.name}-{name}")
        for name, applies in ONCE.items()
        for one in OPERATIONS
        if applies(one)
        for engine in one.engines
    ]


@pytest.mark.parametrize(("engine", "operation", "name"), once_cases())
def test_a_fault_that_passes_is_survived(
    proxy: FaultProxy,
    s3: S3Server,
    direct: Store,
    note: Callable[..., None],
    engine: str,
    operation: Operation,
    name: str,
) -> None:
    store = behind(proxy, s3, direct, engine, PATIENT)
    store.exists("object")  # connected; what follows is the operation only
    proxy.heal()
    proxy.inject(fault(name, operation, times=1))
    error = outcome(operation, store, PATIENT)
    assert proxy.num_faults == 1, "the fault must have happened"
    assert error is None
    assert operation.done(direct)
    assert visible_is_whole(direct)
    if not (
        operation.name == "writer:begin"
        and name in ("lost-answer", "silence", "reset-answer", "truncate", "stall-answer")
    ):
        # Where the id of an upload got lost nobody can abort it: the rule of the bucket does.
        assert not unfinished_uploads(s3, direct)
    note(f"s3 {engine}", f"{name}, once", operation.name, "right")


@pytest.mark.parametrize("name", FOR_EVER)
@pytest.mark.parametrize(("engine", "operation"), cases(lambda one: not one.name.startswith("writer:c")))
def test_a_fault_that_lasts_is_classified(
    proxy: FaultProxy,
    s3: S3Server,
    direct: Store,
    note: Callable[..., None],
    engine: str,
    operation: Operation,
    name: str,
) -> None:
    policy, expected = FOR_EVER[name]
    store = behind(proxy, s3, direct, engine, policy)
    proxy.heal()
    proxy.inject(fault(name, operation, times=1_000_000))
    error = outcome(operation, store, policy)
    proxy.heal()
    assert type(error) is expected, error
    assert visible_is_whole(direct)
    note(f"s3 {engine}", f"{name}, for ever", operation.name, type(error).__name__)


@pytest.mark.parametrize("name", ["latency 30 ms", "bandwidth 16 MB/s"])
@pytest.mark.parametrize(
    ("engine", "operation"), cases(lambda one: one.name not in ("writer:begin", "writer:part"))
)
def test_a_slow_network_is_no_error(
    proxy: FaultProxy,
    s3: S3Server,
    direct: Store,
    note: Callable[..., None],
    engine: str,
    operation: Operation,
    name: str,
) -> None:
    store = behind(proxy, s3, direct, engine, PATIENT)
    proxy.heal()
    proxy.latency_s, proxy.bytes_per_s = (0.03, None) if name.startswith("latency") else (0.0, 16e6)
    error = outcome(operation, store, PATIENT)
    proxy.heal()
    assert error is None
    assert operation.done(direct)
    assert visible_is_whole(direct)
    note(f"s3 {engine}", name, operation.name, "right")


@pytest.fixture(scope="module", params=["dead endpoint", "wrong credentials", "missing bucket"])
def refused(
    request: pytest.FixtureRequest, s3: S3Server
) -> Iterator[tuple[str, str, dict[str, object], type[StorageError]]]:
    """A store that nothing can be done with, and why."""
    url, options = f"s3://{s3.bucket}/refused", s3.storage_options
    if request.param == "wrong credentials":
        yield request.param, url, {**options, "secret": "wrong"}, PermissionDenied
    elif request.param == "missing bucket":
        yield request.param, "s3://no-such-bucket/refused", options, NotFound
    else:
        with socket.socket() as held:  # bound, not listening: connections are refused
            held.bind(("127.0.0.1", 0))
            endpoint = f"http://127.0.0.1:{held.getsockname()[1]}"
            yield request.param, url, {**options, "client_kwargs": {"endpoint_url": endpoint}}, Transient


@pytest.mark.parametrize(
    ("engine", "operation"), cases(lambda one: one.name not in ("writer:part", "writer:complete"))
)
def test_a_store_that_refuses_says_why(
    refused: tuple[str, str, dict[str, object], type[StorageError]],
    s3: S3Server,
    note: Callable[..., None],
    engine: str,
    operation: Operation,
) -> None:
    name, url, options, expected = refused
    error = outcome(operation, Store(url, {**options, "engine": engine}, retry=BRIEF), BRIEF)
    assert type(error) is expected, error
    assert s3.secret not in str(error)
    note(f"s3 {engine}", name, operation.name, type(error).__name__)


FORGOTTEN = {"kind": "error", "status": 404, "code": "NoSuchUpload", "method": "POST", "query": "uploadId"}
"""What servers that forget an upload when it is completed answer to the next attempt; ours remembers it."""


def test_an_upload_completed_unseen_is_recognised(proxy: FaultProxy, s3: S3Server, direct: Store) -> None:
    [operation] = [one for one in OPERATIONS if one.name == "writer:complete"]
    store = behind(proxy, s3, direct, "s3fs", PATIENT)
    proxy.heal()
    proxy.inject(fault("lost-answer", operation, times=1))
    proxy.inject(Fault(**FORGOTTEN))  # type: ignore[arg-type]
    assert outcome(operation, store, PATIENT) is None
    assert proxy.num_faults == 2
    assert operation.done(direct)


def test_an_upload_that_is_gone_is_no_success(proxy: FaultProxy, s3: S3Server, direct: Store) -> None:
    [operation] = [one for one in OPERATIONS if one.name == "writer:complete"]
    store = behind(proxy, s3, direct, "s3fs", PATIENT)
    proxy.heal()
    proxy.inject(fault("error 500", operation, times=1))
    proxy.inject(Fault(**FORGOTTEN))  # type: ignore[arg-type]
    error = outcome(operation, store, PATIENT)
    assert type(error) is NotFound
    assert "NoSuchUpload" in error.reason
    assert not operation.done(direct)
    assert visible_is_whole(direct)


@pytest.mark.usefixtures("recording")
def test_full_speed_at_once_when_throttling_ends(proxy: FaultProxy, s3: S3Server, direct: Store) -> None:
    store = behind(proxy, s3, direct, "obstore", PATIENT)
    ranges = [(f"small/{number}", 0, 5) for number in range(12)]
    for path, *_ in ranges:
        direct.write(path, b"12345")
    proxy.heal()
    proxy.inject(Fault(kind="error", status=503, code="SlowDown", times=24))
    throttled = store.read_ranges(ranges)
    spans = drain()
    assert proxy.num_requests == len(ranges) + 24
    at_once = store.read_ranges(ranges)
    assert proxy.num_requests == 2 * len(ranges) + 24
    [only] = drain()
    assert throttled == at_once
    waits = [one for one in spans if one.name == "storage.backoff"]
    assert {one.attributes["cause"] for one in waits} == {"Throttled"}
    [operation] = [one for one in spans if one.name == "storage.read_ranges"]
    assert operation.attributes["num_retries"] == len(waits) == 24
    assert "num_retries" not in only.attributes


def test_a_file_read_to_its_end_is_one_request(proxy: FaultProxy, s3: S3Server, direct: Store) -> None:
    store = behind(proxy, s3, direct, "obstore", PATIENT)
    proxy.heal()
    with store.open("object") as file:
        file.seek(1000)
        before = proxy.num_requests
        assert file.read() == direct.read("object")[1000:]
    assert proxy.num_requests == before + 1


# -- local disks

DISKS = {
    "disk full": ("size=8m", NoSpace),
    "no inodes": ("size=64m,nr_inodes=12", NoSpace),
    "read-only": ("size=64m", PermissionDenied),
}
ROOM = {"disk full": {"delete", "delete_tree"}, "no inodes": {"delete", "delete_tree"}, "read-only": set()}
"""Changes that need none."""

LOCAL = [one for one in OPERATIONS if one.name not in ("writer:begin", "writer:part")]


def _fill(ballast: Path) -> None:
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(1 << 16)):
            pass


def _use_up_names(directory: Path) -> None:
    for number in range(100):
        (directory / str(number)).touch()


@pytest.fixture(params=list(DISKS))
def sick_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Store]]:
    """A real file system with something wrong."""
    name = request.param
    options, _ = DISKS[name]
    with tmpfs(tmp_path / "disk", options) as mount:
        store = Store(mount / "root", retry=BRIEF)
        Operation.prepare(store)
        if name == "disk full":
            _fill(mount / "ballast")
        elif name == "no inodes":
            with pytest.raises(OSError, match="space"):
                _use_up_names(mount)
        else:
            subprocess.run(["mount", "-o", "remount,ro", str(mount)], check=True)
        yield name, store


@pytest.mark.parametrize("operation", LOCAL, ids=[one.name for one in LOCAL])
def test_a_sick_disk(sick_disk: tuple[str, Store], note: Callable[..., None], operation: Operation) -> None:
    name, store = sick_disk
    error = outcome(operation, store, BRIEF)
    if operation.writes and operation.name not in ROOM[name]:
        assert type(error) is DISKS[name][1], error
    else:
        assert error is None
        assert operation.done(store)
    assert visible_is_whole(store)
    hidden = list(Path(store.url).rglob(".storage-*"))
    assert hidden == [], "nothing is left of a failed write"
    note("local", name, operation.name.split(":")[0], type(error).__name__ if error else "right")


@pytest.mark.parametrize("name", ["write", "create", "writer:complete"])
def test_a_directory_in_the_way(tmp_path: Path, note: Callable[..., None], name: str) -> None:
    store = Store(tmp_path / "root")
    store.write("object/x", b"")
    store.write("new/x", b"")
    [operation] = [one for one in OPERATIONS if one.name == name]
    error = outcome(operation, store, RetryPolicy())
    assert type(error) is AlreadyExists
    assert [one.path for one in store.list()] == ["new/x", "object/x"]
    note("local", "directory in the way", name.split(":")[0], "AlreadyExists")


def test_a_file_cut_short_underneath(tmp_path: Path, note: Callable[..., None]) -> None:
    store = Store(tmp_path)
    Operation.prepare(store)
    (tmp_path / "object").write_bytes(b"short")
    [operation] = [one for one in OPERATIONS if one.name == "read_ranges"]
    error = outcome(operation, store, RetryPolicy())
    assert type(error) is Corrupt
    note("local", "file cut short", "read_ranges", "Corrupt")
