"""The formats that sources may have, by name, and how a format is told from what a path names.

Others add theirs by an entry point of the group ``omniload.sources``: its name is the format's, and what it points to a
`Format`::

    [project.entry-points."omniload.sources"]
    records = "my_package.records:FORMAT"
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, cast

from omniload.errors import MixtureError

if TYPE_CHECKING:
    from omniload.sources.listing import Listing
    from omniload.sources.protocol import Source
    from storage import Store

ENTRY_POINTS = "omniload.sources"


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """How the files of a format are found and read."""

    reader: str
    """``package.module:Class``, imported when first needed; called with a name and a `Listing`, it gives a `Source`."""
    endings: tuple[str, ...]
    """What the names of its files end with, in lower case; without a dot in front, the whole name."""
    companions: tuple[str, ...] = ()
    """Endings of files that belong to one of those and are no files of their own: to one of the same name but for the
    ending, or, if its files have whole names, to those in the folder."""
    markers: tuple[str, ...] = ()
    """Names of files that say that the folder they lie in is of this format, whatever else lies there."""
    without_ending: bool = False
    """Whether a path may leave the ending away, or have that of a companion."""
    speaks_for_folder: bool = False
    """Whether one of its files right in a folder stands for all that lies below."""
    known_by_size: tuple[str, ...] = ()
    """Endings of files of which there may be too many to open each: their size stands for what is in them."""
    leaves_out: str | None = None
    """``package.module:function`` that does what `left_out` says."""

    def match(self, path: str) -> int:
        """How many characters of a file's name are those of its format; 0 if it is none of its files."""
        file_name = path.lower().rpartition("/")[2]
        return max(
            (
                len(ending)
                for ending in self.endings
                if (file_name.endswith(ending) if ending.startswith(".") else file_name == ending)
            ),
            default=0,
        )

    def open(self, name: str, listing: Listing) -> Source:
        """A reader of these files; reads no rows."""
        return cast("Callable[[str, Listing], Source]", _imported(self.reader))(name, listing)

    def left_out(self, folder: Store, paths: list[str], where: str) -> set[str]:
        """Those of the files below a folder that are none of the dataset's, though their names do not tell.

        Raises:
            MixtureError: the folder is not one dataset.
            SourceNotFound: a file of the dataset is missing.
            CorruptSource: what lists its files cannot be read.
        """
        if self.leaves_out is None:
            return set()
        return cast("Callable[[Store, list[str], str], set[str]]", _imported(self.leaves_out))(
            folder, paths, where
        )


def _imported(name: str) -> object:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


_PACKED = ("", ".gz", ".zst")
_NO_DATA = (  # what Hugging Face keeps beside data
    "dataset_dict.json",
    "dataset_info.json",
    "dataset_infos.json",
    "state.json",
)
_IMAGES = (
    *(".avif", ".bmp", ".gif", ".jfif", ".jp2", ".jpeg", ".jpg"),
    *(".png", ".ppm", ".tga", ".tif", ".tiff", ".webp"),
)

_BUILT_IN = {
    "arrow": Format(
        reader="omniload.sources.arrow:ArrowSource",
        endings=(".arrow", ".feather", ".ipc"),
        markers=("state.json", "dataset_dict.json"),
        leaves_out="omniload.sources.saved_dataset:left_out",
    ),
    "imagefolder": Format(
        reader="omniload.sources.imagefolder:open_folder",
        endings=("metadata.jsonl", *_IMAGES),
        markers=("metadata.jsonl",),
        known_by_size=_IMAGES,
    ),
    "jsonl": Format(
        reader="omniload.sources.jsonl:JsonlSource",
        endings=tuple(stem + packed for stem in (".jsonl", ".ndjson", ".json") for packed in _PACKED),
    ),
    "mds": Format(
        reader="omniload.sources.mds:MdsSource",
        endings=("index.json",),
        companions=tuple(f".mds{packed}" for packed in ("", ".br", ".bz2", ".gz", ".snappy", ".zstd")),
        markers=("index.json",),
        speaks_for_folder=True,
    ),
    "megatron": Format(
        reader="omniload.sources.megatron:MegatronSource",
        endings=(".idx",),
        companions=(".bin",),
        without_ending=True,
    ),
    "parquet": Format(reader="omniload.sources.parquet:ParquetSource", endings=(".parquet", ".pq")),
    "text": Format(
        reader="omniload.sources.text:TextSource", endings=tuple(f".txt{packed}" for packed in _PACKED)
    ),
    "webdataset": Format(
        reader="omniload.sources.webdataset:WebDatasetSource",
        endings=(".tar", ".tar.gz", ".tgz", ".tar.zst"),
    ),
}


@cache
def formats() -> dict[str, Format]:
    """All formats by name: those built in, and those of installed packages.

    Raises:
        MixtureError: an installed one has the name of another, or is no `Format`.
    """
    found = dict(_BUILT_IN)
    for point in entry_points(group=ENTRY_POINTS):
        loaded = point.load()
        where = f"entry point '{point.name}' of {ENTRY_POINTS} ({point.value})"
        if not isinstance(loaded, Format):
            raise MixtureError(f"{where}: is of type {type(loaded).__name__}, not omniload.sources.Format")
        if point.name in found:
            raise MixtureError(f"{where}: there is a format of this name already; rename one")
        found[point.name] = loaded
    return found


def named(name: str, where: str) -> Format:
    """The format of this name.

    Raises:
        MixtureError: there is none; ``where`` says who wants it.
    """
    known = formats()
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean '{close[0]}'?" if close else f"known are: {', '.join(sorted(known))}"
        raise MixtureError(f"{where}: no format '{name}'; {hint}")
    return known[name]


def format_of(paths: list[str], *, of_folder: bool = False) -> str:
    """Tell the one format of some files by their names; the longest ending counts.

    Args:
        paths: paths or URLs.
        of_folder: whether they are all that lies in a folder, so that some may be no data.

    Raises:
        MixtureError: none or several, or a file of no known format that was named.
    """
    found: dict[str, str] = {}
    unknown = list(paths[:1])
    all_paths = set(paths)
    for path in paths:
        best = max(((one.match(path), name) for name, one in formats().items()))
        if best[0]:
            if not (of_folder and _is_no_data(path, path[: -best[0]], formats()[best[1]], all_paths)):
                found.setdefault(best[1], path)
        elif not of_folder and not any(path.lower().endswith(one.companions) for one in formats().values()):
            unknown.insert(0, path)
            found.clear()
            break
    if not found:
        raise MixtureError(
            f"cannot tell the format of {unknown[0]} from its extension; set format: to one of"
            f" {', '.join(sorted(formats()))}"
        )
    if len(found) > 1:
        examples = ", ".join(f"{path} ({name})" for name, path in sorted(found.items()))
        raise MixtureError(
            f"files of several formats: {examples}; make each a source of its own, or set format:"
        )
    return next(iter(found))


def _is_no_data(path: str, stem: str, chosen: Format, beside: set[str]) -> bool:
    """Whether a file in a folder is known to be of no use, or of one only with a companion that is not there."""
    if path.rpartition("/")[2] in _NO_DATA:
        return True
    return chosen.without_ending and beside.isdisjoint(stem + companion for companion in chosen.companions)
