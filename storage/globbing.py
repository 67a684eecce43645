"""Which files a data source consists of."""

import os
from collections.abc import Mapping
from typing import Any

from storage.backend import FileStat
from storage.paths import byte_order, is_hidden, is_local, normalise_url
from storage.remote import classify_of, open_filesystem
from storage.retry import DEFAULT_POLICY, Attempt, Retrier

__all__ = ["glob"]


def glob(
    url_pattern: str | os.PathLike[str], storage_options: Mapping[str, object] | None = None
) -> list[FileStat]:
    """The files that a URL or pattern names, sorted by the bytes of their URLs: the same list on every host.

    Args:
        url_pattern: A path or URL; ``*`` (within a directory), ``**`` (any depth), ``?`` and ``[...]`` match. A file
            that has exactly this name is taken as such, whatever characters it holds.
        storage_options: Passed to the driver.

    Returns:
        ``FileStat`` whose ``path`` is a full URL (an absolute path if local). Directories are left out; nothing
        found is an empty list.

    Raises:
        StorageError: The listing failed.
        UnsupportedURL: Unknown scheme.
    """
    url = normalise_url(url_pattern)
    filesystem, path = open_filesystem(url, dict(storage_options or {}))
    filesystem.invalidate_cache()

    def look(_: Attempt) -> dict[str, dict[str, Any]]:
        exact = filesystem.isfile(path)
        found: dict[str, dict[str, Any]] = (
            {path: filesystem.info(path)} if exact else filesystem.glob(path, detail=True)
        )
        return found

    try:
        found = Retrier(DEFAULT_POLICY).call(look, url, classify_of(url))
    except FileNotFoundError:
        return []
    files = [
        FileStat(
            path=name if is_local(url) else str(filesystem.unstrip_protocol(name)),
            size=int(info["size"]),
            etag=str(info["ETag"]).strip('"') if info.get("ETag") else None,
        )
        for name, info in found.items()
        if info["type"] == "file" and not is_hidden(name.rpartition("/")[2])
    ]
    return sorted(files, key=lambda file: byte_order(file.path))
