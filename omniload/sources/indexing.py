"""What can be prepared for a file ahead of a run, so that it can be entered in the middle at once."""

from __future__ import annotations

from typing import Literal, TypeAlias

from omniload.sources.compressed import decompressed, packing_of
from omniload.sources.listing import Listing
from omniload.sources.rewrite import Cut, cut_at, cut_lines, is_rewritten, rewrite
from omniload.sources.sidecar import load
from omniload.sources.tar_bytes import StreamedBytes
from omniload.sources.webdataset import INDEX_KIND, cut_rows, load_index

Outcome: TypeAlias = Literal["nothing to build", "built", "there already", "rewritten", "needs --rewrite"]

_UNKNOWN_SIZE = 2**63 - 1


def index_file(format_name: str, listing: Listing, file: int, *, may_rewrite: bool) -> Outcome:
    """Build the side-car index of a file, or make a compressed file of rows seekable. Other formats need nothing.

    Safe to call from many threads and processes; for one file a call that has nothing to do reads only its end.

    Args:
        format_name: format of the source.
        listing: its files.
        file: index of the file.
        may_rewrite: whether a compressed file may be replaced, as `omniload.sources.rewrite` says.

    Raises:
        CorruptSource: the file is damaged.
        StorageError: something could not be read or written.
    """
    store, entry = listing.store, listing.files[file]
    if packing_of(entry.path) is None:
        if format_name != "webdataset":
            return "nothing to build"
        if load(store, entry, INDEX_KIND) is not None:
            return "there already"
        load_index(store, entry)
        return "built"
    if format_name not in ("jsonl", "text", "webdataset"):
        return "nothing to build"
    if is_rewritten(store, entry):
        return "there already"
    if not may_rewrite:
        return "needs --rewrite"
    cut: Cut = cut_lines
    if format_name == "webdataset":
        stream = StreamedBytes(decompressed(store, entry))
        *starts, _ = cut_rows(stream, _UNKNOWN_SIZE, entry.url)
        cut = cut_at(starts)
    rewrite(store, entry, cut)
    return "rewritten"
