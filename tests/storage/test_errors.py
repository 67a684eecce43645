"""Errors keep their class, path and cause, and bugs are not disguised as I/O."""

import copy
import errno

import botocore.exceptions
import pytest

import storage.errors as errors
from storage.s3_errors import classify_s3


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (FileNotFoundError(errno.ENOENT, "gone"), errors.NotFound),
        (NotADirectoryError(errno.ENOTDIR, "file"), errors.NotFound),
        (FileExistsError(), errors.AlreadyExists),
        (PermissionError(errno.EACCES, "no"), errors.PermissionDenied),
        (OSError(errno.EROFS, "read-only"), errors.PermissionDenied),
        (OSError(errno.ENOSPC, "full"), errors.NoSpace),
        (OSError(errno.EDQUOT, "quota"), errors.NoSpace),
        (TimeoutError("slow"), errors.Transient),
        (ConnectionResetError("reset"), errors.Transient),
        (OSError(errno.EIO, "bad sector"), errors.StorageError),
    ],
)
def test_builtin_errors_are_classified(raised: OSError, expected: type[errors.StorageError]) -> None:
    classified = errors.classify(raised, "a/b")
    assert type(classified) is expected
    assert classified.path == "a/b"
    assert str(classified).startswith("a/b: ")
    assert classified.reason


def test_what_is_classified_stays_itself() -> None:
    error = errors.Corrupt("x", "short")
    assert errors.classify(error, "y") is error
    assert classify_s3(error, "y") is error


@pytest.mark.parametrize("bug", [TypeError("x"), ValueError("x"), AssertionError(), KeyError("x")])
def test_bugs_are_not_io(bug: Exception) -> None:
    assert errors.classify(bug, "x") is None
    assert classify_s3(bug, "x") is None


@pytest.mark.parametrize(
    ("code", "status", "expected"),
    [
        ("NoSuchKey", 404, errors.NotFound),
        ("404", None, errors.NotFound),
        ("AccessDenied", 403, errors.PermissionDenied),
        ("ExpiredToken", 400, errors.PermissionDenied),
        ("SlowDown", 503, errors.Throttled),
        ("Throttling", 400, errors.Throttled),
        ("TooManyRequests", 429, errors.Throttled),
        ("InternalError", 500, errors.Transient),
        ("RequestTimeout", 400, errors.Transient),
        ("ConditionalRequestConflict", 409, errors.Transient),
        ("PreconditionFailed", 412, errors.AlreadyExists),
        ("InvalidRange", 416, errors.Corrupt),
        ("InsufficientStorage", 507, errors.NoSpace),
        ("InvalidArgument", 400, errors.StorageError),
    ],
)
def test_s3_codes_are_classified_behind_what_s3fs_makes_of_them(
    code: str, status: int | None, expected: type[errors.StorageError]
) -> None:
    response = {"Error": {"Code": code, "Message": "why"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    raised = OSError("translated")
    raised.__cause__ = botocore.exceptions.ClientError(response, "GetObject")
    assert type(classify_s3(raised, "s3://b/k")) is expected


def test_missing_credentials_say_what_to_set() -> None:
    classified = classify_s3(botocore.exceptions.NoCredentialsError(), "s3://b/k")
    assert isinstance(classified, errors.PermissionDenied)
    assert "AWS_PROFILE" in classified.reason


def test_errors_can_cross_a_process_boundary() -> None:
    error = copy.copy(errors.NoSpace("a/b", "full"))
    assert (type(error), error.path, error.reason) == (errors.NoSpace, "a/b", "full")


def test_reasons_are_one_line() -> None:
    classified = errors.classify(OSError("one\n  two\n"), "x")
    assert str(classified) == "x: one two"
