"""S3 against a real server: conformance, uploads that leave nothing behind, classified errors."""

import socket
import uuid

import pytest
import s3fs

import storage.s3_upload
from storage import NotFound, PermissionDenied, RetryPolicy, Store, Transient, UnsupportedURL, glob
from storage.s3 import S3Backend
from storage.s3_obstore import S3ObstoreBackend
from tests.storage.conformance import MIB, BackendConformance, content
from tests.storage.seaweed import S3Server

ENGINES = {"s3fs": S3Backend, "obstore": S3ObstoreBackend}


@pytest.fixture(params=list(ENGINES))
def engine(request: pytest.FixtureRequest) -> str:
    """Everything below holds for both."""
    return str(request.param)


@pytest.fixture
def options(s3: S3Server, engine: str) -> dict[str, object]:
    return {**s3.storage_options, "engine": engine}


@pytest.fixture
def store(s3: S3Server, engine: str, options: dict[str, object]) -> Store:
    store = Store(f"s3://{s3.bucket}/{uuid.uuid4().hex}/", options)
    assert type(store._backend) is ENGINES[engine]
    return store


class TestS3(BackendConformance):
    pass


def unfinished_uploads(server: S3Server) -> list[str]:
    filesystem = s3fs.S3FileSystem(**server.storage_options)
    answer = filesystem.call_s3("list_multipart_uploads", Bucket=server.bucket)
    return [upload["Key"] for upload in answer.get("Uploads") or []]


def test_an_aborted_upload_leaves_no_parts(store: Store, s3: S3Server) -> None:
    writer = store.writer("f", header_bytes=8)
    writer.write(content(40 * MIB))
    assert any(key.endswith("/f") for key in unfinished_uploads(s3)), "the upload must have begun"
    writer.abort()
    assert unfinished_uploads(s3) == []
    assert not store.exists("f")


def test_the_first_part_is_uploaded_last(store: Store) -> None:
    """Parts 2 and 3 are on the server, part 1 is not, until the writer closes."""
    writer = store.writer("f", header_bytes=8)
    writer.write(content(40 * MIB))
    sink = writer._sink
    assert isinstance(sink, storage.s3_upload.S3Sink)
    sink._upload._group.finish()
    assert sorted(sink._upload._etags) == [2]
    writer.set_header(b"12345678")
    writer.close()
    assert store.read("f") == b"12345678" + content(40 * MIB)


def test_a_failing_upload_aborts_and_is_classified(store: Store, s3: S3Server) -> None:
    """The upload is ended behind the writer's back, so that its next part is refused."""
    writer = store.writer("f")
    writer.write(content(17 * MIB))
    sink = writer._sink
    assert isinstance(sink, storage.s3_upload.S3Sink)
    assert sink._upload._id is not None
    sink._target.abort(sink._upload._id)
    with pytest.raises(NotFound, match="NoSuchUpload"):
        writer.close()
    assert unfinished_uploads(s3) == []
    assert not store.exists("f")


def test_part_sizes_suit_the_protocol() -> None:
    sizes = [storage.s3_upload.part_bytes(number) for number in range(1, 10_001)]
    assert min(sizes) >= 5 * MIB
    assert max(sizes) <= 5 << 30
    assert sum(sizes) > 900 << 30
    assert len(set(sizes[:2000])) == 1


@pytest.mark.parametrize("num_bytes", [1, 33 * MIB, 160_000 * MIB, 160_000 * MIB + 1, 5 << 40])
def test_parts_of_a_known_size_are_equal_and_few_enough(num_bytes: int) -> None:
    size = storage.s3_upload.equal_part_bytes(num_bytes)
    assert 5 * MIB <= size <= 5 << 30
    assert num_bytes <= 10_000 * size
    assert size == storage.s3_upload.FIRST_PART_BYTES or num_bytes > 10_000 * size // 2, (
        "no larger than need be"
    )


def test_etags_change_with_the_content(store: Store) -> None:
    store.write("x", b"1")
    first = store.stat("x").etag
    store.write("x", b"2")
    assert first
    assert store.stat("x").etag not in (None, first)
    assert [one.etag for one in store.list()] == [store.stat("x").etag]


def test_a_missing_bucket_is_named_and_not_an_empty_listing(options: dict[str, object]) -> None:
    missing = Store("s3://no-such-bucket/x", options)
    for call in (missing.list, missing.list_dirs, lambda: missing.write("a", b""), lambda: missing.read("a")):
        with pytest.raises(NotFound, match="s3://no-such-bucket/x"):
            call()


@pytest.mark.parametrize("wrong", ["key", "secret"])
def test_wrong_credentials_are_denied_and_not_shown(
    s3: S3Server, options: dict[str, object], wrong: str
) -> None:
    store = Store(f"s3://{s3.bucket}/x", {**options, wrong: "not-this-one"})
    for call in (
        store.list,
        lambda: store.read("a"),
        lambda: store.write("a", b""),
        lambda: store.create("a", b""),
    ):
        with pytest.raises(PermissionDenied) as caught:
            call()
        assert s3.secret not in f"{caught.value}{caught.value.__cause__}{store!r}"


def test_a_dead_endpoint_is_transient(engine: str) -> None:
    with socket.socket() as held:  # bound, not listening: connections are refused
        held.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        options = {"key": "k", "secret": "s", "endpoint_url": url, "engine": engine}
        store = Store("s3://bucket/x", options, retry=RetryPolicy(max_attempts=1))
        for call in (lambda: store.write("a", b""), lambda: store.read("a"), store.list):
            with pytest.raises(Transient, match=r"s3://bucket/x.*connect"):
                call()


def test_the_environment_names_the_endpoint(
    s3: S3Server, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint_url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.secret)
    store = Store(f"s3://{s3.bucket}/{uuid.uuid4().hex}", {"engine": engine})
    store.write("x", b"1")
    assert store.read("x") == b"1"


def test_glob_sorts_and_gives_full_urls(store: Store, s3: S3Server) -> None:
    for name in ["d/b.parquet", "d/a.parquet", "d/e/c.parquet", "d/x.json"]:
        store.write(name, b"123")
    found = glob(f"{store.url}/d/*.parquet", s3.storage_options)
    assert [(one.path, one.size) for one in found] == [
        (f"{store.url}/d/a.parquet", 3),
        (f"{store.url}/d/b.parquet", 3),
    ]
    assert all(one.etag for one in found)


def test_s3_without_a_bucket_is_refused() -> None:
    with pytest.raises(UnsupportedURL, match="bucket"):
        Store("s3://")
