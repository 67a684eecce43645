"""Every error this package raises on purpose.

::

    StorageError (OSError)
    ├── NotFound (FileNotFoundError)         no object of that name, or no such bucket
    ├── AlreadyExists (FileExistsError)      create-if-absent lost; a directory or file is in the way
    ├── PermissionDenied (PermissionError)   credentials missing, wrong or insufficient; read-only mount
    ├── NoSpace                              disk or quota full; nothing of the write is left behind
    ├── Throttled                            the server asks to slow down; the same call may succeed later
    ├── Transient (ConnectionError)          connection, time-out or server fault; the same call may succeed
    ├── Stalled (TimeoutError)               no part of an operation finished within the time allowed
    ├── Corrupt                              fewer bytes than the caller was promised
    └── Unsupported                          the file system cannot give the guarantee that was asked for

    BadRequest (ValueError)                  the call itself is wrong; nothing was attempted
    ├── UnsafePath                           absolute, escaping or otherwise unusable path
    └── UnsupportedURL                       unknown scheme, or its driver is not installed

A ``StorageError`` carries ``path`` (full path or URL of the object), ``reason`` (one line), and the error it was
made from as ``__cause__``.

An error leads by its traceback to the frames that it came through. Who has a name for one that it raises deletes the
name: frame and error would hold each other, and buffers of the callers with them, until garbage is collected.
"""

import errno

__all__ = [
    "AlreadyExists",
    "BadRequest",
    "Corrupt",
    "NoSpace",
    "NotFound",
    "PermissionDenied",
    "Stalled",
    "StorageError",
    "Throttled",
    "Transient",
    "UnsafePath",
    "Unsupported",
    "UnsupportedURL",
    "classify",
    "from_http_status",
]


class StorageError(OSError):
    """An operation on one object or prefix failed.

    Attributes:
        path: Full local path or URL of what the operation was about.
        reason: One line saying what went wrong.
    """

    # OSError.__new__ turns (errno, text) pairs into subclasses of its own choice; a single preformatted
    # argument keeps our class, and the two attributes keep it picklable.
    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason

    def __reduce__(self) -> tuple[type["StorageError"], tuple[str, str]]:
        return type(self), (self.path, self.reason)


class NotFound(StorageError, FileNotFoundError):
    """No object of that name, or no such bucket."""


class AlreadyExists(StorageError, FileExistsError):
    """Create-if-absent found an object of that name, or a directory (file) stands where a file (directory) must."""


class PermissionDenied(StorageError, PermissionError):
    """Credentials are missing, wrong or insufficient, or the mount is read-only."""


class NoSpace(StorageError):
    """Disk or quota full. What the write had stored so far is removed."""


class Throttled(StorageError):
    """The server asks to slow down."""


class Transient(StorageError, ConnectionError):
    """A connection, time-out or server fault: the same call may succeed when repeated."""


class Stalled(StorageError, TimeoutError):
    """No part of an operation finished within the time allowed."""


class Corrupt(StorageError):
    """An object holds fewer bytes than the caller was promised."""


class Unsupported(StorageError):
    """The file system cannot give the guarantee that was asked for."""


class BadRequest(ValueError):
    """The call is wrong whatever the store holds; nothing was attempted."""


class UnsafePath(BadRequest):
    """A path that is absolute, leaves the store or is reserved."""


class UnsupportedURL(BadRequest):
    """A URL whose scheme is unknown or whose driver is not installed."""


_BY_ERRNO: dict[int, type[StorageError]] = {
    errno.ENOSPC: NoSpace,
    errno.EDQUOT: NoSpace,
    errno.EACCES: PermissionDenied,
    errno.EPERM: PermissionDenied,
    errno.EROFS: PermissionDenied,
    errno.ENOTDIR: NotFound,
    errno.EISDIR: NotFound,
    errno.EAGAIN: Transient,
    errno.ESTALE: Transient,
}

_BY_TYPE: tuple[tuple[type[BaseException], type[StorageError]], ...] = (
    (FileNotFoundError, NotFound),
    (FileExistsError, AlreadyExists),
    (PermissionError, PermissionDenied),
    (TimeoutError, Transient),
    (ConnectionError, Transient),
)


def classify(error: BaseException, path: str) -> StorageError | None:
    """Turn an error of the operating system or of a driver into one of ours.

    Args:
        error: What was raised.
        path: Full path or URL of the object the operation was about.

    Returns:
        The classified error, ``error`` itself if it is one already, or None if it is no I/O error at all (a bug or
        a wrong argument, which must not be disguised).
    """
    if isinstance(error, StorageError):
        return error
    reason = _one_line(error)
    for builtin, ours in _BY_TYPE:
        if isinstance(error, builtin):
            return ours(path, reason)
    status = getattr(error, "status", getattr(error, "status_code", None))  # aiohttp, Azure, Google, Hub
    if isinstance(status, int) and status >= 400:
        return from_http_status(status, path, reason)
    if isinstance(error, OSError):
        return _BY_ERRNO.get(error.errno or 0, StorageError)(path, reason)
    return None


def from_http_status(status: int, path: str, reason: str) -> StorageError:
    """Classify an HTTP error status (>= 400) that says nothing more precise."""
    if status in (401, 403):
        return PermissionDenied(path, f"{reason}: check the credentials, and what they allow")
    if status in (404, 410):
        return NotFound(path, reason)
    if status == 412:
        return AlreadyExists(path, reason)
    if status == 416:
        return Corrupt(path, reason)
    if status in (429, 503):
        return Throttled(path, reason)
    if status == 507:
        return NoSpace(path, reason)
    if status in (408, 409, 425) or status >= 500:
        return Transient(path, reason)
    return StorageError(path, reason)


def _one_line(error: BaseException) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    text = " ".join(text.split())
    return text or type(error).__name__
