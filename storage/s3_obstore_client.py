"""Opening obstore the way s3fs is open: one meaning of ``storage_options`` and of the environment for both.

obstore knows no profiles, no ``~/.aws/config`` and no endpoints of botocore. So s3fs resolves them, and what it found
is handed on. Options that would be lost on the way are named by ``only_s3fs_knows``.
"""

import os
import re
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from botocore import UNSIGNED  # type: ignore[import-untyped]
from botocore.credentials import RefreshableCredentials  # type: ignore[import-untyped]
from botocore.exceptions import ClientError, NoCredentialsError  # type: ignore[import-untyped]
from fsspec.asyn import sync
from obstore.store import S3Store

from storage.parallel import NUM_THREADS, STALL_TIMEOUT_S

if TYPE_CHECKING:
    from obstore.store import ClientConfig, S3Config, S3Credential

__all__ = ["ObstoreClient", "lost_by_fork", "only_s3fs_knows"]

_PASSED_ON: Final[dict[str, frozenset[str] | None]] = {
    "anon": None,
    "endpoint_url": None,
    "key": None,
    "max_concurrency": None,  # of s3fs's own loops, which nothing here uses
    "password": None,
    "profile": None,
    "secret": None,
    "token": None,
    "use_listings_cache": None,  # nothing here uses it either
    "use_ssl": None,
    "username": None,
    "client_kwargs": frozenset(
        {
            "aws_access_key_id",
            "aws_secret_access_key",
            "aws_session_token",
            "endpoint_url",
            "region_name",
            "use_ssl",
        }
    ),
    "config_kwargs": frozenset(
        {"connect_timeout", "max_pool_connections", "read_timeout", "region_name", "retries"}
    ),
}
"""Options that keep their meaning; for those that are mappings, the keys that do."""

_RENEWAL: Final = timedelta(minutes=10)
"""How long obstore may use credentials that expire before it asks again; botocore decides whether to renew them."""

_BOTOCORE_ATTEMPTS: Final = 5
"""Attempts at one request unless the configuration says otherwise (botocore's legacy mode)."""

_AWS_HOST: Final = re.compile(r"s3(\.[a-z0-9-]+)?\.amazonaws\.com")


_opened = False
_lost = False


def lost_by_fork() -> bool:
    """Whether obstore was used before this process was forked: its threads are gone, and its calls would hang."""
    return _lost


def only_s3fs_knows(storage_options: Mapping[str, object]) -> list[str]:
    """The names of options that obstore could not honour, sorted; those inside a mapping as ``outer.inner``."""
    lost = []
    for name, value in storage_options.items():
        known = _PASSED_ON.get(name, frozenset())
        if name not in _PASSED_ON:
            lost.append(name)
        elif known is not None and isinstance(value, Mapping):
            lost += [f"{name}.{inner}" for inner in value if inner not in known]
    return sorted(lost)


class ObstoreClient:
    """The ``S3Store`` of one bucket, opened when first used: finding credentials may take network calls.

    Safe to use from many threads.

    Args:
        filesystem: An ``s3fs.S3FileSystem``.
        bucket: Name of the bucket.
    """

    def __init__(self, filesystem: Any, bucket: str) -> None:
        self._filesystem = filesystem
        self._bucket = bucket
        self._lock = threading.Lock()
        self._store: S3Store | None = None

    def __reduce__(self) -> tuple[type["ObstoreClient"], tuple[Any, str]]:
        return type(self), (self._filesystem, self._bucket)

    def store(self, timeout_s: float) -> S3Store:
        """The open store.

        Args:
            timeout_s: Longest wait for what opening takes.

        Raises:
            TimeoutError: It took longer.
            botocore.exceptions.BotoCoreError: The configuration names no usable credentials, or contradicts itself.
        """
        global _opened
        with self._lock:
            if self._store is None:
                _opened = True
                self._store = sync(self._filesystem.loop, self._open, timeout=timeout_s)
            return self._store

    async def _open(self) -> S3Store:
        client = await self._filesystem.set_session()
        settings = client.meta.config
        config: S3Config = {
            "virtual_hosted_style_request": False,
            # The hash that signs a body, once more as its checksum: there are servers that compare nothing else, and
            # would show what arrived of an object before a connection broke.
            "checksum_algorithm": "SHA256",
            **await _place(client, self._bucket),
        }
        provider = None
        if settings.signature_version is UNSIGNED:
            config["skip_signature"] = True
        else:
            provider = await _provider(client._request_signer._credentials, self._filesystem.loop)
        attempts = settings.retries.get("total_max_attempts", _BOTOCORE_ATTEMPTS)
        return S3Store(
            self._bucket,
            config=config,
            client_options=_client_options(client),
            retry_config={"max_retries": attempts - 1},
            credential_provider=provider,
        )


async def _place(client: Any, bucket: str) -> "S3Config":
    """Endpoint and region of a bucket."""
    endpoint = client.meta.endpoint_url
    region = client.meta.region_name
    if not _AWS_HOST.fullmatch(urlsplit(endpoint).hostname or ""):
        # Both names, because the second, if only the environment has it, would win.
        return {"endpoint": endpoint, "aws_endpoint_url_s3": endpoint, "region": region}
    # botocore follows AWS to the region of the bucket, obstore must be told.
    try:
        answer = await client.head_bucket(Bucket=bucket)
    except (
        ClientError
    ) as error:  # refusals name the region too; others come again with the first real request
        answer = error.response
    headers = answer["ResponseMetadata"].get("HTTPHeaders", {})
    return {"region": headers.get("x-amz-bucket-region", region)}


def _client_options(client: Any) -> "ClientConfig":
    settings = client.meta.config
    return {
        "allow_http": urlsplit(client.meta.endpoint_url).scheme == "http",
        "connect_timeout": timedelta(seconds=settings.connect_timeout),
        "read_timeout": timedelta(seconds=settings.read_timeout),
        # Of a whole request, the body included. A shorter one would break slow links instead of stuck ones.
        "timeout": timedelta(seconds=STALL_TIMEOUT_S),
        "pool_max_idle_per_host": str(NUM_THREADS),
    }


async def _provider(credentials: Any, loop: Any) -> "Callable[[], S3Credential]":
    """What obstore calls, on threads of its own, for credentials and again shortly before they expire.

    Also for those that never change: given as settings, they would be mixed with a session token of the environment.
    """
    if credentials is None:
        raise NoCredentialsError
    expires = isinstance(credentials, RefreshableCredentials)

    def current() -> "S3Credential":
        frozen = sync(loop, credentials.get_frozen_credentials, timeout=STALL_TIMEOUT_S)
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + _RENEWAL if expires else None,
        }

    return current


def _note_fork() -> None:
    global _lost
    _lost = _lost or _opened


os.register_at_fork(after_in_child=_note_fork)
