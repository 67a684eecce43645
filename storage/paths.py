"""Names: paths inside a store, URLs of stores, and the names that are hidden.

A path inside a store is relative POSIX: parts joined by ``/``, none of them empty, ``.`` or ``..``. ``""`` is the
root and names no object.

Hidden names: while a local object is being written its bytes lie beside it under ``.storage-<32 hex digits>.tmp``.
No listing shows such a name, and no path may contain one. A process that is killed leaves them behind;
``delete_tree`` of a directory above removes them.
"""

import os
import re
import uuid
from pathlib import Path
from typing import Final

from storage.errors import UnsafePath, UnsupportedURL

__all__ = [
    "byte_order",
    "check_object",
    "check_prefix",
    "is_hidden",
    "is_local",
    "join",
    "local_root",
    "new_hidden_name",
    "normalise_url",
]

_HIDDEN: Final = re.compile(r"\.storage-[0-9a-f]{32}\.tmp")
_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_ONE_SLASH: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/(?!/)(.*)", re.DOTALL)
_LOCAL_SCHEMES: Final = ("file://", "local://")
_LOCALHOST: Final = "file://localhost/"  # the same as file:///


def check_prefix(path: str) -> str:
    """Check a path inside a store; ``""`` is the root, one trailing ``/`` is dropped.

    Raises:
        UnsafePath: Absolute, escaping, not canonical, or reserved.
    """
    if path == "":
        return path
    trimmed = path.removesuffix("/")
    if path.startswith("/"):
        raise UnsafePath(f"path {path!r} is absolute: give it relative to the store")
    if "\0" in path or "\\" in path:
        raise UnsafePath(f"path {path!r} contains a NUL or a backslash: put '/' between its parts")
    for part in trimmed.split("/"):
        if part in ("", ".", ".."):
            raise UnsafePath(f"path {path!r} contains {part!r}: write it without '.', '..' and '//'")
        if is_hidden(part):
            raise UnsafePath(
                f"path {path!r} contains {part!r}, a name reserved for unfinished writes: choose another"
            )
    return trimmed


def check_object(path: str) -> str:
    """Check a path that must name an object, so is neither the root nor ends in ``/``.

    Raises:
        UnsafePath: As for ``check_prefix``, or no object name.
    """
    if path == "" or path.endswith("/"):
        raise UnsafePath(f"path {path!r} names a directory: name an object in it")
    return check_prefix(path)


def join(root: str, path: str) -> str:
    """``root/path``, either of which may be empty."""
    return f"{root.rstrip('/')}/{path}" if root and path else root or path


def byte_order(path: str) -> bytes:
    """Sort key: the UTF-8 bytes of a path, the order in which S3 lists."""
    return path.encode("utf-8", "surrogateescape")


def is_hidden(name: str) -> bool:
    """Whether one part of a path is the name of an unfinished write."""
    return _HIDDEN.fullmatch(name) is not None


def new_hidden_name() -> str:
    """A name for an unfinished write that nobody else uses."""
    return f".storage-{uuid.uuid4().hex}.tmp"


def is_local(url: str) -> bool:
    """Whether a URL or plain path lies on this machine's file system."""
    return url.startswith(_LOCAL_SCHEMES) or not _SCHEME.match(url)


def local_root(url: str) -> Path:
    """Absolute path of a local URL or plain path; ``~`` is the home directory. Symbolic links stay."""
    if url.startswith(_LOCALHOST):
        url = url.removeprefix(_LOCALHOST[:-1])
    for scheme in _LOCAL_SCHEMES:
        url = url.removeprefix(scheme)
    return Path(os.path.abspath(Path(url).expanduser()))  # noqa: PTH100 - Path.resolve would follow links


def normalise_url(url: str | os.PathLike[str]) -> str:
    """The form of a URL that this package shows: absolute path if local, else without a trailing ``/``.

    Raises:
        UnsupportedURL: Empty, a chain of file systems (``a::b``), or a scheme with one slash (``s3:/b``).
    """
    text = os.fspath(url)
    if not text:
        raise UnsupportedURL("the URL is empty: give a path, or scheme://...")
    if "::" in text:
        raise UnsupportedURL(f"URL {text!r} chains file systems ('::'): name the innermost one")
    if typed := _ONE_SLASH.match(text):
        scheme, rest = typed.groups()
        meant = f"{scheme}://{'/' if f'{scheme}://' in _LOCAL_SCHEMES else ''}{rest}"
        raise UnsupportedURL(f"URL {text!r} has one slash: write {meant} (or ./{text} for a local path)")
    if is_local(text):
        return str(local_root(text))
    scheme, _, rest = text.partition("://")
    return f"{scheme}://{rest.rstrip('/')}"
