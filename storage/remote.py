"""Finding the driver of a remote URL."""

from typing import Any

from storage.backend import Backend
from storage.errors import UnsupportedURL

__all__ = ["open_filesystem", "open_remote"]

_S3_SCHEMES = ("s3", "s3a")


def open_filesystem(url: str, storage_options: dict[str, object]) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the URL's path in it.

    Raises:
        UnsupportedURL: Unknown scheme, driver not installed, or options it does not take.
    """
    import fsspec  # drivers load only when a remote URL is used
    from fsspec.core import url_to_fs

    scheme = url.partition("://")[0]
    if scheme in _S3_SCHEMES:
        # Another process may have replaced what a cached listing describes.
        storage_options = {"use_listings_cache": False, **storage_options}
    try:
        filesystem, path = url_to_fs(url, **storage_options)
    except ImportError as error:
        raise UnsupportedURL(f"{url}: no driver for {scheme}://: {error}") from error
    except (ValueError, TypeError) as error:
        known = ", ".join(sorted(fsspec.available_protocols()))
        raise UnsupportedURL(f"{url}: cannot open {scheme}://: {error}; known schemes: {known}") from error
    return filesystem, path


def open_remote(url: str, storage_options: dict[str, object]) -> Backend:
    """The backend of a URL that is not local.

    Raises:
        UnsupportedURL: As ``open_filesystem``.
    """
    filesystem, root = open_filesystem(url, storage_options)
    if url.partition("://")[0] in _S3_SCHEMES:
        from storage.s3 import S3Backend

        return S3Backend(filesystem, root)
    from storage.fsspec_backend import FsspecBackend

    return FsspecBackend(filesystem, root)
