"""Reading the errors of botocore, aiohttp and S3 servers.

s3fs turns a ``ClientError`` into a builtin exception and keeps it as the cause; the code in it is more precise than
the builtin, so it is read first.
"""

from collections.abc import Iterator
from typing import Final

import aiohttp
import botocore.exceptions as boto  # type: ignore[import-untyped]

from storage.errors import (
    AlreadyExists,
    PermissionDenied,
    StorageError,
    Throttled,
    Transient,
    classify,
    from_http_status,
)

__all__ = ["classify_s3", "from_s3_code", "http_status"]

# Codes whose HTTP status alone would mislead (most of these come as 400).
_BY_CODE: Final[dict[str, type[StorageError]]] = {
    "PreconditionFailed": AlreadyExists,
    "AuthorizationHeaderMalformed": PermissionDenied,
    "ExpiredToken": PermissionDenied,
    "InvalidToken": PermissionDenied,
    "TokenRefreshRequired": PermissionDenied,
    "BandwidthLimitExceeded": Throttled,
    "RequestLimitExceeded": Throttled,
    "SlowDown": Throttled,
    "Throttling": Throttled,
    "ThrottlingException": Throttled,
    "BadDigest": Transient,
    "IncompleteBody": Transient,
    "RequestTimeout": Transient,
    "XAmzContentSHA256Mismatch": Transient,
}

_NO_CREDENTIALS: Final = (
    boto.NoCredentialsError,
    boto.PartialCredentialsError,
    boto.CredentialRetrievalError,
    boto.TokenRetrievalError,
    boto.UnauthorizedSSOTokenError,
    boto.ProfileNotFound,
)

_CONNECTION: Final = (
    boto.HTTPClientError,
    boto.ConnectionError,
    boto.IncompleteReadError,
    aiohttp.ClientError,
)


def classify_s3(error: BaseException, path: str) -> StorageError | None:
    """As ``storage.errors.classify``, by S3 error code where there is one.

    Args:
        error: What a call through s3fs raised.
        path: URL of the object the operation was about.
    """
    if isinstance(error, StorageError):
        return error
    for one in _chain(error):
        if isinstance(one, boto.ClientError):
            return from_s3_code(*_response(one), path)
        if isinstance(one, _NO_CREDENTIALS):
            return PermissionDenied(path, f"{one}: set AWS_PROFILE or pass storage_options key and secret")
        if isinstance(one, _CONNECTION):
            return Transient(path, str(one) or type(one).__name__)
        if isinstance(one, boto.BotoCoreError):
            return StorageError(path, str(one))
    return classify(error, path)


def from_s3_code(status: int, code: str, message: str, path: str) -> StorageError:
    """Classify the answer of an S3 server.

    Args:
        status: HTTP status (>= 400).
        code: S3's own; empty or the status again if the answer had none.
        message: The server's words.
        path: URL of the object the operation was about.
    """
    reason = message if code.isdigit() or not code else f"{message} ({code})"
    if code == "NoSuchBucket":
        reason += ": make it, or correct the URL"
    if code in _BY_CODE:
        return _BY_CODE[code](path, reason)
    return from_http_status(status, path, reason)


def http_status(error: BaseException) -> int | None:
    """The HTTP status of the S3 answer that an error came from, if it came from one."""
    for one in _chain(error):
        if isinstance(one, boto.ClientError):
            return _response(one)[0]
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    one: BaseException | None = error
    while one is not None:
        yield one
        one = one.__cause__


def _response(error: boto.ClientError) -> tuple[int, str, str]:
    answer = error.response.get("Error", {})
    code = str(answer.get("Code", ""))
    message = " ".join(str(answer.get("Message") or error).split())
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    if status is None:
        status = int(code) if code.isdigit() else 400
    return int(status), code, message
