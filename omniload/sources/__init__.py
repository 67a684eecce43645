"""Readers of datasets: where the rows are and in which order they come."""

from __future__ import annotations

from omniload.errors import MixtureError
from omniload.mixture import RowRange, SourceSpec
from omniload.sources.columns import SomeColumns
from omniload.sources.formats import Format, named
from omniload.sources.listing import Listing, list_files
from omniload.sources.memory import InMemorySource
from omniload.sources.protocol import OPEN_END, BadRow, FileEntry, RawBlock, Source
from omniload.sources.rows import SomeRows
from omniload.sources.torch_open import open_dataset

__all__ = [
    "BadRow",
    "FileEntry",
    "Format",
    "InMemorySource",
    "Listing",
    "RawBlock",
    "Source",
    "open_source",
]


def open_source(name: str, spec: SourceSpec) -> Source:
    """List the files of a source and choose the reader for their format; reads no rows, unless to find ``rows``.

    Raises:
        SourceNotFound: a path matches nothing.
        MixtureError: the format cannot be told from the extensions, or is not known; no row is in ``rows``; the
            dataset cannot be made.
        ColumnMissing: not all of ``read_columns`` are there.
    """
    source: Source
    if spec.dataset is not None:
        source = open_dataset(name, spec.dataset, spec.args)
        if spec.rows != RowRange() and source.num_blocks(0) == OPEN_END:
            raise MixtureError(
                f"source '{name}': rows: an iterable dataset has no rows by number; let the dataset choose them"
            )
    else:
        format_name, listing = list_files(name, spec.path, spec.storage_options, spec.format)
        source = named(format_name, f"source '{name}'").open(name, listing)
    if spec.read_columns is not None:
        source = SomeColumns(source, spec.read_columns)
    start, stop = spec.rows.start, spec.rows.stop
    return source if (start, stop) == (0, None) else SomeRows(source, start, stop)
