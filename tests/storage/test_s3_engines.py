"""Two engines for S3: which one is chosen, and that options and environment mean the same to both."""

import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import s3fs

from storage import (
    BadRequest,
    Corrupt,
    NotFound,
    PermissionDenied,
    RetryPolicy,
    Store,
    glob,
)
from storage.s3 import S3Backend
from storage.s3_obstore import S3ObstoreBackend
from tests.storage.conformance import MIB, content
from tests.storage.proxy import Fault, FaultProxy, fault_proxy
from tests.storage.seaweed import S3Server

ENGINES = ("s3fs", "obstore")


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def url(s3: S3Server) -> str:
    return f"s3://{s3.bucket}/{uuid.uuid4().hex}"


@pytest.fixture
def no_aws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """An environment without any AWS settings."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return monkeypatch


def test_obstore_is_the_default(url: str, s3: S3Server) -> None:
    assert type(Store(url, s3.storage_options)._backend) is S3ObstoreBackend
    assert type(Store(url, s3.storage_options).sub("x")._backend) is S3ObstoreBackend


@pytest.mark.parametrize(
    ("options", "lost"),
    [
        ({"s3_additional_kwargs": {"ServerSideEncryption": "aws:kms"}}, "s3_additional_kwargs"),
        ({"client_kwargs": {"verify": False}}, r"client_kwargs\.verify"),
        ({"config_kwargs": {"proxies": {}, "retries": {"max_attempts": 2}}}, r"config_kwargs\.proxies"),
    ],
)
def test_what_only_s3fs_can_honour_is_never_dropped(options: dict[str, object], lost: str) -> None:
    assert type(Store("s3://bucket/x", options)._backend) is S3Backend
    with pytest.raises(BadRequest, match=f"does not know {lost}"):
        Store("s3://bucket/x", {**options, "engine": "obstore"})


def test_an_engine_that_there_is_not_is_refused() -> None:
    with pytest.raises(BadRequest, match="engine 'boto': choose one of obstore, s3fs"):
        Store("s3://bucket/x", {"engine": "boto"})
    with pytest.raises(BadRequest, match="engine"):
        Store("memory://x", {"engine": "obstore"})


def test_globbing_takes_the_same_options(url: str, s3: S3Server, engine: str) -> None:
    options = {**s3.storage_options, "engine": engine}
    Store(url, options).write("a.bin", b"1")
    assert [one.path for one in glob(f"{url}/*.bin", options)] == [f"{url}/a.bin"]


def test_a_profile_brings_credentials_and_endpoint(
    url: str, s3: S3Server, engine: str, no_aws: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config").write_text(
        f"[profile lab]\nregion = eu-central-1\nendpoint_url = {s3.endpoint_url}\n"
        f"aws_access_key_id = {s3.key}\naws_secret_access_key = {s3.secret}\n"
    )
    by_option = Store(url, {"profile": "lab", "engine": engine})
    by_option.write("a", b"1")
    no_aws.setenv("AWS_PROFILE", "lab")
    s3fs.S3FileSystem.clear_instance_cache()
    by_environment = Store(url, {"engine": engine})
    assert by_environment.read("a") == b"1"


def test_given_options_are_not_mixed_with_the_environment(
    url: str, s3: S3Server, engine: str, no_aws: pytest.MonkeyPatch
) -> None:
    no_aws.setenv("AWS_SESSION_TOKEN", "of other credentials")
    no_aws.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    store = Store(url, {**s3.storage_options, "engine": engine})
    store.write("a", b"1")
    assert store.read("a") == b"1"


def test_without_credentials_the_error_says_what_to_set(
    url: str, s3: S3Server, engine: str, no_aws: pytest.MonkeyPatch
) -> None:
    store = Store(url, {"endpoint_url": s3.endpoint_url, "engine": engine})
    for call in (lambda: store.read("a"), lambda: store.write("a", b"1")):
        with pytest.raises(PermissionDenied, match="AWS_PROFILE"):
            call()


def test_anonymous_requests_carry_no_signature(url: str, s3: S3Server, engine: str) -> None:
    """The server refuses them because it knows who is missing, not because a signature is wrong."""
    store = Store(url, {"anon": True, "endpoint_url": s3.endpoint_url, "engine": engine})
    with pytest.raises(PermissionDenied, match=r"Access ?Denied"):
        store.read("a")


def test_engines_read_what_the_other_wrote(url: str, s3: S3Server) -> None:
    stores = [Store(url, {**s3.storage_options, "engine": name}) for name in ENGINES]
    for writer, reader in (stores, reversed(stores)):
        for name in ("key#0,0:1,2", "100%", "ünï/cödé", "a+b&c=d"):
            writer.write(name, name.encode())
            assert reader.read(name) == name.encode()
            assert reader.read_ranges([(name, 1, 4)]) == [name.encode()[1:4]]
            assert reader.stat(name) == writer.stat(name)


def test_markers_of_empty_folders_are_no_objects(url: str, s3: S3Server, engine: str) -> None:
    """Consoles make them: empty objects whose keys end in a slash."""
    store = Store(url, {**s3.storage_options, "engine": engine})
    store.write("full/x", b"1")
    prefix = url.removeprefix(f"s3://{s3.bucket}/")
    filesystem = s3fs.S3FileSystem(**s3.storage_options)
    filesystem.call_s3("put_object", Bucket=s3.bucket, Key=f"{prefix}/empty/", Body=b"")
    assert [one.path for one in store.list()] == ["full/x"]
    with pytest.raises(NotFound):
        store.stat("empty")


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[FaultProxy]:
    target = urlsplit(s3.endpoint_url)
    with fault_proxy(str(target.hostname), int(target.port or 0)) as running:
        yield running


@pytest.mark.parametrize("num_bytes", [0, 1, 8 * MIB - 1, 8 * MIB, 8 * MIB + 1, 24 * MIB, 33 * MIB + 7])
def test_whole_reads_are_exact_around_the_size_of_a_part(
    url: str, s3: S3Server, engine: str, num_bytes: int
) -> None:
    store = Store(url, {**s3.storage_options, "engine": engine})
    store.write("a", content(num_bytes))
    assert store.read("a") == content(num_bytes)


def test_a_whole_read_is_never_of_two_versions(url: str, s3: S3Server, engine: str) -> None:
    """Objects of one value each, replaced again and again while they are read."""
    store = Store(url, {**s3.storage_options, "engine": engine}, retry=RetryPolicy(first_delay_s=0.01))
    versions = [bytes([value]) * (20 * MIB) for value in range(2)]
    store.write("a", versions[0])
    done = threading.Event()

    def replace_it() -> None:
        for i in range(1, 13):
            store.write("a", versions[i % 2])
        done.set()

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(replace_it)
        seen = set()
        while not done.is_set() and not writing.done():
            data = store.read("a")
            assert data in versions
            seen.add(data[0])
        writing.result()
    assert seen


def test_a_write_that_the_server_took_and_does_not_have_is_noticed(
    url: str, s3: S3Server, engine: str, proxy: FaultProxy
) -> None:
    """However the object was stored, the server is asked for it afterwards."""
    options = {**s3.storage_options, "client_kwargs": {"endpoint_url": proxy.url}, "engine": engine}
    store = Store(url, options)

    def stream(path: str) -> None:
        with store.writer(path, header_bytes=4) as writer:
            writer.write(content(17 * MIB))
            writer.set_header(b"head")

    calls: list[Callable[[str], None]] = [
        lambda path: store.write(path, b"1"),
        lambda path: store.write(path, content(33 * MIB)),
        lambda path: store.create(path, b"1"),
        stream,
    ]
    for number, call in enumerate(calls):
        proxy.inject(Fault(kind="error", method="HEAD", status=404))
        with pytest.raises(Corrupt, match="does not have it"):
            call(f"{number}")
        proxy.heal()


FORKING = """
import os, signal, sys
from storage import BadRequest, Store
url, options = sys.argv[1], {"key": sys.argv[2], "secret": sys.argv[3], "endpoint_url": sys.argv[4]}
Store(url, options).write("a", b"1")
pid = os.fork()
if not pid:
    signal.alarm(60)
    try:
        Store(url, {**options, "engine": "obstore"})
    except BadRequest as error:
        print(error)
    print(Store(url, options).read("a"), flush=True)
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
print(Store(url, options).read("a"))
"""


def test_a_store_opened_after_a_fork_works(url: str, s3: S3Server) -> None:
    """Though the parent used the default engine, whose threads the child has not got."""
    command = [sys.executable, "-c", FORKING, url, s3.key, s3.secret, s3.endpoint_url]
    found = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    refusal, *read = found.stdout.splitlines()
    assert "forked" in refusal
    assert read == ["b'1'", "b'1'"]
