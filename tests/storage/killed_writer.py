"""A process that writes for ever, to be killed at any time, and the proof that what it wrote is whole.

Run as ``python -m tests.storage.killed_writer``: a parent that never touches a store reads lines of JSON (a URL,
options and a number to begin from) and forks a child for each, which writes. So a child costs milliseconds and not the
seconds that importing takes. The answer is the child's process id.

Objects say what they are: a line with kind, version and length, then that many bytes of the version's value.
"""

import itertools
import json
import os
import signal
import sys

import storage.s3  # drivers are loaded here, once
import storage.s3_upload
from storage import Store

__all__ = ["PART_BYTES", "check_whole"]

PART_BYTES = 5 << 20
"""Size of the first part of an upload here: the least that S3 allows."""


def _body(version: int, num_bytes: int) -> bytes:
    return bytes([version % 251]) * (num_bytes + 7_919 * (version % 50))


def _head(kind: str, version: int, body: bytes) -> bytes:
    return f"{kind} {version} {len(body)}".ljust(63).encode() + b"\n"


def write_for_ever(store: Store, first: int, streamed_bytes: int, acknowledge: int) -> None:
    """Replace, stream, create and commit, over and over; write each version that is done to a file descriptor."""
    for version in itertools.count(first):
        body = _body(version, 20_000)
        store.write("replaced", [_head("write", version, body), body])
        long = _body(version, streamed_bytes)
        with store.writer(f"streamed/{first % 7}", header_bytes=64) as writer:
            writer.write(long)
            writer.set_header(_head("stream", version, long))
        # A directory that counts once its manifest is there: whoever sees the manifest must see the rest.
        for name in ("a", "b/c"):
            store.write(f"commit/{version}/{name}", [_head("write", version, body), body])
        store.create(f"commit/{version}/manifest", [_head("create", version, body), body])
        os.write(acknowledge, f"{version}\n".encode())


def check_whole(store: Store, seen: dict[str, str | None]) -> None:
    """Fail unless every visible object and every committed directory is complete.

    Args:
        store: Where.
        seen: Objects checked before, with their tags; those are not read again. Added to.
    """
    found = store.list()
    paths = {one.path for one in found}
    for one in found:
        if one.path.endswith("/manifest"):
            directory = one.path.removesuffix("manifest")
            assert {f"{directory}a", f"{directory}b/c"} <= paths, (
                f"{directory} is committed without all its files"
            )
        if one.path.startswith("commit/") and one.path in seen:
            continue
        data = store.read(one.path)
        kind, version, length = data[:63].decode().split()
        assert kind in ("write", "stream", "create"), one.path
        assert len(data) == 64 + int(length), one.path
        assert data[64:] == bytes([int(version) % 251]) * int(length), one.path
        seen[one.path] = one.etag


def main() -> None:
    """Fork a writer for each line of the standard input."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    storage.s3_upload.FIRST_PART_BYTES = PART_BYTES  # type: ignore[misc]
    for line in sys.stdin:
        task = json.loads(line)
        child = os.fork()
        if not child:
            store = Store(task["url"], task["options"])
            acknowledge = os.open(task["acknowledge"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            write_for_ever(store, task["first"], task["streamed_bytes"], acknowledge)
        sys.stdout.write(f"{child}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
