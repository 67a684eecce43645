"""What a user gets wrong ends in one line that names what, where and what to do."""

import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from storage import (
    NotFound,
    PermissionDenied,
    RetryPolicy,
    StorageError,
    Store,
    Transient,
    UnsafePath,
    UnsupportedURL,
)
from tests.storage.seaweed import S3Server

BRIEF = RetryPolicy(max_attempts=2, first_delay_s=0.01, deadline_s=20)

CALLS: dict[str, Callable[[Store], object]] = {
    "read": lambda store: store.read("x"),
    "read_ranges": lambda store: store.read_ranges([("x", 0, 1)]),
    "write": lambda store: store.write("x", b"1"),
    "create": lambda store: store.create("x", b"1"),
    "list": lambda store: store.list(),
}


@pytest.mark.parametrize(
    ("url", "remedy"),
    [
        ("nosuch://x", "nosuch:// is unknown: give a path or one of the known schemes, such as s3://"),
        ("S3://bucket/x", r"S3:// is unknown \(is it s3://\?\)"),
        ("gs://bucket/x", "no driver for gs://: pip install gcsfs"),
        ("gcs://bucket/x", "no driver for gcs://: pip install gcsfs"),
        ("az://container/x", "no driver for az://: pip install adlfs"),
        ("abfs://container/x", "no driver for abfs://: pip install adlfs"),
        ("smb://host/x", 'no driver for smb://: SMB requires "smbprotocol"'),
        ("s3:/bucket/x", r"has one slash: write s3://bucket/x \(or ./s3:/bucket/x for a local path\)"),
        ("file:/tmp/x", r"has one slash: write file:///tmp/x \("),
        ("s3://", "names no bucket: write s3://bucket/prefix"),
        ("simplecache::s3://bucket/x", "chains file systems .*: name the innermost one"),
        ("", "the URL is empty: give a path, or scheme://"),
    ],
)
def test_a_url_that_cannot_be_opened(url: str, remedy: str) -> None:
    with pytest.raises(UnsupportedURL, match=remedy) as caught:
        Store(url)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(
    ("path", "remedy"),
    [
        ("/etc/passwd", "is absolute: give it relative to the store"),
        ("../x", r"contains '\.\.': write it without"),
        ("a/../../x", r"contains '\.\.': write it without"),
        ("a//b", "contains '': write it without"),
        ("./a", r"contains '\.': write it without"),
        ("a\\b", "put '/' between its parts"),
        ("a\0b", "put '/' between its parts"),
        ("", "names a directory: name an object in it"),
        ("a/", "names a directory: name an object in it"),
        (f"a/.storage-{'0' * 32}.tmp", "a name reserved for unfinished writes: choose another"),
    ],
)
@pytest.mark.parametrize("root", ["local", "memory"])
def test_a_path_outside_the_root(tmp_path: Path, root: str, path: str, remedy: str) -> None:
    store = Store(tmp_path / "root" if root == "local" else "memory://outside")
    calls: list[Callable[[], object]] = [
        lambda: store.read(path),
        lambda: store.read_ranges([(path, 0, 1)]),
        lambda: store.write(path, b"1"),
        lambda: store.create(path, b"1"),
        lambda: store.writer(path),
        lambda: store.open(path),
        lambda: store.stat(path),
        lambda: store.delete(path),
    ]
    if path not in ("", "a/"):
        calls += [lambda: store.sub(path), lambda: store.list(path), lambda: store.delete_tree(path)]
    for call in calls:
        with pytest.raises(UnsafePath, match=remedy):
            call()
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(params=["wrong secret", "wrong key", "missing bucket", "dead endpoint"])
def refused(
    request: pytest.FixtureRequest, s3: S3Server
) -> Iterator[tuple[str, dict[str, object], type[StorageError], str]]:
    """URL, options, and what is said about them."""
    url, options = f"s3://{s3.bucket}/refused", s3.storage_options
    denied = "check the credentials, and what they allow"
    if request.param == "wrong secret":
        yield url, {**options, "secret": "not-the-secret"}, PermissionDenied, denied
    elif request.param == "wrong key":
        yield url, {**options, "key": "nobody"}, PermissionDenied, denied
    elif request.param == "missing bucket":
        yield "s3://no-such-bucket/x", options, NotFound, r"\(NoSuchBucket\): make it, or correct the URL"
    else:
        with socket.socket() as held:  # bound, not listening: connections are refused
            held.bind(("127.0.0.1", 0))
            endpoint = f"http://127.0.0.1:{held.getsockname()[1]}"
            remedy = r"connect.*\(tried 2 times in .* s\): check that the server is up and its address right"
            yield url, {**options, "client_kwargs": {"endpoint_url": endpoint}}, Transient, remedy


@pytest.mark.parametrize("engine", ["obstore", "s3fs"])
def test_a_server_that_refuses(
    refused: tuple[str, dict[str, object], type[StorageError], str], s3: S3Server, engine: str
) -> None:
    url, options, kind, remedy = refused
    store = Store(url, {**options, "engine": engine}, retry=BRIEF)
    for name, call in CALLS.items():
        with pytest.raises(StorageError) as caught:
            call(store)
        text = str(caught.value)
        assert type(caught.value) is kind, (name, text)
        assert re.search(remedy, text), (name, text)
        assert text.startswith(url)
        assert "\n" not in text
        assert s3.secret not in text
        assert "not-the-secret" not in text
