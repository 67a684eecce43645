"""Finding the driver of a remote URL."""

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Final, cast

from storage.backend import Backend
from storage.errors import BadRequest, StorageError, UnsupportedURL, classify
from storage.retry import Retrier
from storage.retrying import RetryingBackend

__all__ = ["classify_of", "open_filesystem", "open_remote"]

_S3_SCHEMES: Final = ("s3", "s3a")
_ENGINES: Final = ("obstore", "s3fs")
_COMMON: Final = "s3://, gs://, az://, hf:// and memory://"
_ONE_ATTEMPT: Final = {"connect_timeout": 10, "retries": {"total_max_attempts": 1}}


def open_filesystem(url: str, storage_options: dict[str, object]) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the URL's path in it.

    Args:
        url: Not local.
        storage_options: Of its driver. ``engine``, which chooses how bytes of ``s3://`` are moved, is left out.

    Raises:
        UnsupportedURL: Unknown scheme, driver not installed, or options it does not take.
    """
    import fsspec  # drivers load only when a remote URL is used
    from fsspec.core import url_to_fs

    scheme = url.partition("://")[0]
    if scheme in _S3_SCHEMES:
        # Another process may have replaced what a cached listing describes.
        storage_options = {"use_listings_cache": False, **storage_options}
        storage_options.pop("engine", None)
        # Requests are repeated here, by one policy, and not below it too.
        given = cast("Mapping[str, object]", storage_options.get("config_kwargs") or {})
        storage_options["config_kwargs"] = {**_ONE_ATTEMPT, **given}
    try:
        filesystem, path = url_to_fs(url, **storage_options)
    except ImportError as error:
        raise UnsupportedURL(f"{url}: no driver for {scheme}://: {_how_to_install(scheme, error)}") from error
    except (ValueError, TypeError) as error:
        if scheme in fsspec.available_protocols():
            raise UnsupportedURL(f"{url}: cannot open {scheme}://: {error}") from error
        raise UnsupportedURL(
            f"{url}: {scheme}:// is unknown{_meant(scheme, fsspec.available_protocols())}: give a path or one of the "
            f"known schemes, such as {_COMMON}, or install the fsspec driver that registers it"
        ) from error
    except OSError as error:  # a driver that connects when it is made
        classified = classify(error, url)
        assert classified is not None
        try:
            raise classified from error
        finally:
            del classified
    if scheme in _S3_SCHEMES:
        filesystem.retries = 1  # attempts of s3fs itself
    return filesystem, path


def _how_to_install(scheme: str, error: ImportError) -> str:
    """What to do about a driver that cannot be imported."""
    from fsspec.registry import known_implementations

    package = known_implementations[scheme]["class"].partition(".")[0].replace("_", "-")
    return str(error) if package == "fsspec" else f"pip install {package}"


def _meant(scheme: str, known: Sequence[str]) -> str:
    close = get_close_matches(scheme.lower(), known, n=1)
    return f" (is it {close[0]}://?)" if close else ""


def classify_of(url: str) -> Callable[[BaseException, str], StorageError | None]:
    """What reads the errors that the file system of a URL raises; see ``storage.errors.classify``."""
    if url.partition("://")[0] in _S3_SCHEMES:
        from storage.s3_errors import classify_s3

        return classify_s3
    return classify


def open_remote(url: str, storage_options: dict[str, object], retrier: Retrier) -> Backend:
    """The backend of a URL that is not local; it repeats what fails for a reason that passes.

    Raises:
        UnsupportedURL: As ``open_filesystem``.
        BadRequest: An engine that there is not, or that could not honour the other options.
    """
    filesystem, root = open_filesystem(url, storage_options)
    if url.partition("://")[0] in _S3_SCHEMES:
        return _open_s3(url, filesystem, root, storage_options, retrier)
    if "engine" in storage_options:
        raise BadRequest(
            f"{url}: storage_options 'engine' means nothing here: it chooses the engine of s3://"
        )
    from storage.fsspec_backend import FsspecBackend

    return RetryingBackend(FsspecBackend(filesystem, root), url, retrier)


def _open_s3(
    url: str, filesystem: Any, root: str, storage_options: dict[str, object], retrier: Retrier
) -> Backend:
    from storage.s3 import S3Backend
    from storage.s3_obstore import S3ObstoreBackend
    from storage.s3_obstore_client import lost_by_fork, only_s3fs_knows

    others = {name: value for name, value in storage_options.items() if name != "engine"}
    lost = only_s3fs_knows(others)
    # Where the faster engine would drop something that was asked for, the other one is the default.
    engine = storage_options.get("engine", "s3fs" if lost or lost_by_fork() else "obstore")
    if engine not in _ENGINES:
        raise BadRequest(f"{url}: engine {engine!r}: choose one of {', '.join(_ENGINES)}")
    if engine == "s3fs":
        return S3Backend(filesystem, root, retrier)
    if lost:
        raise BadRequest(f"{url}: engine 'obstore' does not know {', '.join(lost)}: use engine 's3fs'")
    if lost_by_fork():
        raise BadRequest(
            f"{url}: engine 'obstore' was used before this process was forked: spawn, or use engine 's3fs'"
        )
    return S3ObstoreBackend(filesystem, root, retrier)
