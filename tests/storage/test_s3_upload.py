"""Large objects are sent from where they lie, and faults on the way of their parts leave nothing behind."""

import uuid
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

import storage.s3_upload
from storage import RetryPolicy, Store, Throttled, Transient
from tests.storage.conformance import MIB, content
from tests.storage.proxy import Fault, FaultProxy, Kind, fault_proxy
from tests.storage.seaweed import S3Server
from tests.storage.uploads import unfinished_uploads

pytestmark = pytest.mark.chaos

DATA = content(33 * MIB)
POLICY = RetryPolicy(max_attempts=4, first_delay_s=0.01, attempt_timeout_s=2, deadline_s=60)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that there are seven of them."""
    monkeypatch.setattr(storage.s3_upload, "FIRST_PART_BYTES", 5 * MIB)


@pytest.fixture(scope="module")
def proxy(s3: S3Server) -> Iterator[FaultProxy]:
    address = urlsplit(s3.endpoint_url)
    with fault_proxy(str(address.hostname), int(address.port or 80)) as running:
        yield running


@pytest.fixture
def direct(s3: S3Server) -> Store:
    """The store as others see it."""
    return Store(f"s3://{s3.bucket}/{uuid.uuid4().hex}", s3.storage_options)


def behind(proxy: FaultProxy, s3: S3Server, direct: Store, engine: str, policy: RetryPolicy) -> Store:
    """The same store through the proxy."""
    proxy.heal()
    options = {**s3.storage_options, "client_kwargs": {"endpoint_url": proxy.url}, "engine": engine}
    return Store(direct.url, options, retry=policy)


@pytest.fixture(params=["s3fs", "obstore"])
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def store(s3: S3Server, proxy: FaultProxy, direct: Store, engine: str) -> Store:
    return behind(proxy, s3, direct, engine, POLICY)


@pytest.mark.parametrize("num_views", [1, 3, 1000])
def test_views_may_end_anywhere_in_a_part(store: Store, direct: Store, num_views: int) -> None:
    step = -(-len(DATA) // num_views)
    store.write("a", [memoryview(DATA)[begin : begin + step] for begin in range(0, len(DATA), step)])
    assert direct.read("a") == DATA
    assert direct.stat("a").etag.endswith("-7"), "it must have had seven parts"  # type: ignore[union-attr]


def test_memory_is_the_callers_again_after_the_write(store: Store, direct: Store) -> None:
    memory = bytearray(DATA)
    store.write("a", memory)
    memory[:] = bytes(len(memory))
    memory.clear()  # refused while anybody looks at it
    assert direct.read("a") == DATA


@pytest.mark.parametrize("kind", ["error", "lost-answer", "reset-request", "stall-request"])
def test_a_part_that_fails_is_sent_again_whole(
    store: Store, direct: Store, proxy: FaultProxy, s3: S3Server, kind: Kind
) -> None:
    proxy.inject(Fault(kind=kind, method="PUT", query="partNumber", times=3, after_bytes=2 * MIB))
    store.write("a", DATA)
    assert proxy.num_faults == 3
    assert direct.read("a") == DATA
    assert unfinished_uploads(s3, direct) == {}


def test_a_part_that_never_gets_through_ends_the_upload(
    store: Store, direct: Store, proxy: FaultProxy, s3: S3Server
) -> None:
    direct.write("a", b"before")
    proxy.inject(Fault(kind="error", status=503, code="SlowDown", query="partNumber=4", times=1000))
    with pytest.raises(Throttled):
        store.write("a", DATA)
    assert proxy.num_faults == POLICY.max_attempts
    assert direct.read("a") == b"before"
    assert unfinished_uploads(s3, direct) == {}


def test_the_first_part_goes_up_beside_the_last_ones(store: Store, direct: Store, proxy: FaultProxy) -> None:
    """However often it fails, and whatever becomes of the others meanwhile."""
    proxy.inject(Fault(kind="error", query="partNumber=1", times=2))
    proxy.inject(Fault(kind="reset-request", query="partNumber=7", times=1))
    with store.writer("a", header_bytes=64) as writer:
        writer.write(DATA)
        writer.set_header(b"h" * 64)
    assert proxy.num_faults == 3
    assert direct.read("a") == b"h" * 64 + DATA


@pytest.mark.parametrize(
    ("config", "whole", "part"),
    [
        ({}, {"sha256", "crc32"}, {"sha256"}),
        ({"s3": {"payload_signing_enabled": False}}, {"crc32"}, {"crc32"}),
        ({"request_checksum_calculation": "when_required"}, {"sha256"}, {"sha256"}),
    ],
)
def test_no_body_goes_unchecked(
    s3: S3Server, direct: Store, config: dict[str, object], whole: set[str], part: set[str]
) -> None:
    store = Store(direct.url, {**s3.storage_options, "config_kwargs": config, "engine": "s3fs"})
    store.write("connected", b"")
    seen: dict[str, set[str]] = {}

    def look(request: Any, event_name: str, **_: object) -> None:
        headers = request.headers
        hashed = headers["X-Amz-Content-SHA256"] != b"UNSIGNED-PAYLOAD"
        checks = {"sha256": hashed, "crc32": "x-amz-checksum-crc32" in headers}
        seen[event_name.rpartition(".")[2]] = {name for name, there in checks.items() if there}

    events = store._backend._filesystem._s3.meta.events  # type: ignore[attr-defined]
    events.register("before-send.s3", look)
    store.write("whole", b"1")
    store.write("parts", DATA)
    assert (seen["PutObject"], seen["UploadPart"]) == (whole, part)
    assert direct.read("parts") == DATA


def test_a_body_cut_short_never_becomes_the_object(
    s3: S3Server, engine: str, direct: Store, proxy: FaultProxy
) -> None:
    """Not even until the next attempt: nobody is there to make one if the process was killed."""
    once = behind(proxy, s3, direct, engine, RetryPolicy(max_attempts=1))
    direct.write("small", b"before")
    direct.write("large", b"before")
    for path, data in (("small", DATA[: 4 * MIB]), ("large", DATA)):
        proxy.inject(Fault(kind="reset-request", method="PUT", after_bytes=MIB, times=1))
        with pytest.raises(Transient):
            once.write(path, data)
    assert proxy.num_faults == 2
    assert direct.read("small") == direct.read("large") == b"before"
    assert unfinished_uploads(s3, direct) == {}
