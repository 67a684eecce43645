"""Readers of datasets: where the rows are and in which order they come."""

from __future__ import annotations

from collections.abc import Callable

from omniload.errors import MixtureError
from omniload.mixture import SourceSpec
from omniload.sources.jsonl import JsonlSource
from omniload.sources.listing import Listing, list_files
from omniload.sources.memory import InMemorySource
from omniload.sources.parquet import ParquetSource
from omniload.sources.protocol import BadRow, FileEntry, RawBlock, Source

__all__ = [
    "BadRow",
    "FileEntry",
    "InMemorySource",
    "JsonlSource",
    "ParquetSource",
    "RawBlock",
    "Source",
    "open_source",
]

_READERS: dict[str, Callable[[str, Listing], Source]] = {"parquet": ParquetSource, "jsonl": JsonlSource}
_ENDINGS = {
    "parquet": (".parquet", ".pq"),
    "jsonl": tuple(
        stem + packed for stem in (".jsonl", ".ndjson", ".json") for packed in ("", ".gz", ".zst")
    ),
}


def open_source(name: str, spec: SourceSpec) -> Source:
    """List the files of a source and choose the reader for their format; reads no rows.

    Raises:
        SourceNotFound: a path matches nothing.
        MixtureError: the format cannot be told from the extensions.
    """
    listing = list_files(name, spec.path, spec.storage_options)
    return _READERS[spec.format or _format_of(name, listing)](name, listing)


def _format_of(name: str, listing: Listing) -> str:
    found: dict[str, str] = {}
    for entry in listing.files:
        format_ = next((f for f, ends in _ENDINGS.items() if entry.path.lower().endswith(ends)), None)
        if format_ is None:
            raise MixtureError(
                f"source '{name}': cannot tell the format of {entry.url} from its extension; "
                f"set format: {' or '.join(_ENDINGS)}"
            )
        found.setdefault(format_, entry.url)
    if len(found) > 1:
        raise MixtureError(
            f"source '{name}': files of several formats ({', '.join(found.values())}); make each a source of its own"
        )
    return next(iter(found))
