"""Folders of images, as in the ``imagefolder`` builder of Hugging Face datasets.

With a ``metadata.jsonl`` beside them a row is one of its lines, in which ``file_name`` (relative to it) becomes
``image``, ``<name>_file_name`` becomes ``<name>``, and lists ``file_names`` and ``<name>_file_names`` become lists
``images`` and ``<name>``; images that no line names are no rows. Without one a row is an image, with the name of its
folder as ``label`` if it lies in one. An image is ``{"bytes", "path"}``, as it is in the file and undecoded.

No image is opened before a row of it is asked for, and none is kept. Of each the name and size are known from the
listing, some hundred bytes of memory; sizes (and etags, where the server has them) stand for their content in the
fingerprint.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from omniload.errors import SourceNotFound
from omniload.sources.jsonl import parse_object
from omniload.sources.lines import LineBlock, LineSource
from omniload.sources.listing import Listing
from omniload.sources.protocol import BadRow, FileEntry, Row, Source
from storage import Store

_METADATA = "metadata.jsonl"
_METADATA_BLOCK_BYTES = 4 << 10
_BLOCK_IMAGES = 16
"""Images per block, of which a window has some; as many may be in memory at once, and so for lines of 4 KiB."""

_Wanted: TypeAlias = tuple[dict[str, Any], str, int]
"""An image without its bytes yet, its path in the store and its size."""


def open_folder(name: str, listing: Listing) -> Source:
    """The reader for a folder, by whether it has a ``metadata.jsonl``.

    Args:
        name: name of the source.
        listing: its images and metadata; or its metadata alone, then what lies below their folders is listed.

    Raises:
        SourceNotFound: there is no image.
    """
    metadata = tuple(file for file in listing.files if _is_metadata(file.path))
    if not metadata:
        return LabelledImages(name, listing)
    images = {file.path: file for file in listing.files if not _is_metadata(file.path)}
    sizes = {path: file.size for path, file in images.items()}
    listed = "".join(f"{path}\0{file.size}\0{file.digest}\0" for path, file in images.items())
    if not images:
        sizes, listed = _beside(metadata, listing)
    if not sizes:
        raise SourceNotFound(
            f"source '{name}': no images beside {metadata[0].url}; set path: to their folder, or format: jsonl to read"
            " it by itself"
        )
    return DescribedImages(name, replace(listing, files=metadata, also=listed), sizes)


def _beside(metadata: Sequence[FileEntry], listing: Listing) -> tuple[dict[str, int], str]:
    """The images below the folders of metadata that was named by itself: their sizes, and what tells them apart."""
    found = {
        file.path: file
        for folder in {posixpath.dirname(one.path) for one in metadata}
        for file in listing.store.list(folder)
        if not _is_metadata(file.path)
    }
    images = {path: found[path].size for path in sorted(found, key=str.encode)}
    listed = "".join(f"{path}\0{size}\0{found[path].etag or ''}\0" for path, size in images.items())
    return images, listed


class DescribedImages:
    """Images with a ``metadata.jsonl``; a row is known by the byte offset of its line, a block is 4 KiB of lines.

    Args:
        name: name of the source.
        listing: the metadata.
        images: bytes of each image, by its path in the store.
    """

    def __init__(self, name: str, listing: Listing, images: Mapping[str, int]) -> None:
        self._lines = LineSource(name, listing, parse_object, block_bytes=_METADATA_BLOCK_BYTES)
        self.name = name
        self.files: Sequence[FileEntry] = listing.files
        self._store = listing.store
        self._sizes = images

    @property
    def fingerprint(self) -> str:
        """Hex digest of everything the rows and their order depend on."""
        return self._lines.fingerprint

    def num_blocks(self, file: int) -> int:
        """Byte ranges of the metadata."""
        return self._lines.num_blocks(file)

    def schema(self, file: int) -> pa.Schema | None:
        """Keys of the first rows; None if none of the first lines is one. The types are not checked: all null."""
        schema = self._lines.schema(file)
        return schema and pa.schema([(_column(name) or name, pa.null()) for name in schema.names])

    def read_block(self, file: int, block: int, columns: Iterable[str] | None = None) -> DescribedBlock:
        """Read some lines, and no image yet; images that are not among the columns will not be read."""
        return DescribedBlock(
            self._lines.read_block(file, block),
            self._store,
            posixpath.dirname(self.files[file].path),
            self._sizes,
            None if columns is None else frozenset(columns),
        )

    def row_ids(self, file: int, block: int) -> np.ndarray:
        """``int64[rows]``: byte offset of each line."""
        return self._lines.row_ids(file, block)

    def close(self) -> None:
        """Nothing stays open."""


class DescribedBlock:
    """Lines of metadata, whose images are read when rows are asked for.

    Args:
        lines: the lines.
        store: where the images lie.
        folder: what their names are relative to, in the store.
        sizes: bytes of each image, by its path in the store.
        columns: images to read; None: all.
    """

    def __init__(
        self,
        lines: LineBlock,
        store: Store,
        folder: str,
        sizes: Mapping[str, int],
        columns: frozenset[str] | None,
    ) -> None:
        self._lines = lines
        self._store = store
        self._folder = folder
        self._sizes = sizes
        self._columns = columns
        self.row_ids = lines.row_ids

    @property
    def num_rows(self) -> int:
        """Lines in the block."""
        return self._lines.num_rows

    @property
    def num_bytes(self) -> int:
        """Host memory held by the block."""
        return self._lines.num_bytes

    @property
    def table(self) -> None:
        """The rows are no columns."""
        return None

    def rows(self, indices: np.ndarray) -> list[Row | BadRow]:
        """The rows at ``indices`` with their images; one that names no image, or one that is missing, is a `BadRow`."""
        wanted: list[_Wanted] = []
        rows = [
            row if isinstance(row, BadRow) else self._with_images(row, wanted)
            for row in self._lines.rows(indices)
        ]
        _read(self._store, wanted)
        return rows

    def _with_images(self, row: Row, wanted: list[_Wanted]) -> Row | BadRow:
        """The row as it will be, its images added to those wanted."""
        made: Row = {}
        of_row: list[_Wanted] = []
        for key, value in row.items():
            column = _column(key)
            if column is None or value is None:
                made[column or key] = value
                continue
            names = value if isinstance(value, list) else [value]
            images: list[Row] = []
            for name in names:
                path = posixpath.normpath(posixpath.join(self._folder, name)) if isinstance(name, str) else ""
                if path not in self._sizes:
                    return BadRow(reason=f"'{key}': no image {name!r} in the folder")
                images.append({"bytes": b"", "path": name})
                if self._columns is None or column in self._columns:
                    of_row.append((images[-1], path, self._sizes[path]))
            made[column] = images if isinstance(value, list) else images[0]
        if not any(map(_column, row)):
            return BadRow(reason="no 'file_name'")
        wanted += of_row
        return made


class LabelledImages:
    """Images without metadata, presented as one file; a row is known by its place in the sorted listing.

    Args:
        name: name of the source.
        listing: the images.
    """

    def __init__(self, name: str, listing: Listing) -> None:
        self.name = name
        self._listing = listing
        size = sum(image.size for image in listing.files)
        url = listing.store.url
        self.files: Sequence[FileEntry] = [
            FileEntry(path="", url=url, size=size, find_digest=partial(getattr, listing, "fingerprint"))
        ]
        self._store = listing.store
        self._images = [(image.path, image.size) for image in listing.files]

    @property
    def fingerprint(self) -> str:
        """Hex digest of everything the rows and their order depend on."""
        return f"{self._listing.fingerprint}-{_BLOCK_IMAGES}"

    def num_blocks(self, file: int) -> int:
        """Runs of 16 images."""
        return -(-len(self._images) // _BLOCK_IMAGES)

    def schema(self, file: int) -> pa.Schema:
        """``image`` and ``label``."""
        return pa.schema([("image", pa.null()), ("label", pa.null())])

    def read_block(self, file: int, block: int, columns: Iterable[str] | None = None) -> LabelledBlock:
        """Name some images; none is read yet."""
        row_ids = self.row_ids(file, block)
        return LabelledBlock([self._images[i] for i in row_ids.tolist()], row_ids, self._store)

    def row_ids(self, file: int, block: int) -> np.ndarray:
        """``int64[rows]``: place of each image in the sorted listing."""
        start = block * _BLOCK_IMAGES
        return np.arange(start, min(start + _BLOCK_IMAGES, len(self._images)), dtype=np.int64)

    def close(self) -> None:
        """Nothing stays open."""


class LabelledBlock:
    """Images that are read when rows are asked for.

    Args:
        images: path in the store and bytes of each.
        row_ids: ``int64[rows]`` their places in the listing.
        store: where they lie.
    """

    def __init__(self, images: Sequence[tuple[str, int]], row_ids: np.ndarray, store: Store) -> None:
        self._images = images
        self._store = store
        self.row_ids = row_ids

    @property
    def num_rows(self) -> int:
        """Images in the block."""
        return len(self.row_ids)

    @property
    def num_bytes(self) -> int:
        """Host memory held by the block."""
        return sum(len(path) for path, _ in self._images) + int(self.row_ids.nbytes)

    @property
    def table(self) -> None:
        """The rows are no columns."""
        return None

    def rows(self, indices: np.ndarray) -> list[Row | BadRow]:
        """The rows at ``indices``."""
        rows: list[Row | BadRow] = []
        wanted: list[_Wanted] = []
        for i in indices.tolist():
            path, size = self._images[i]
            image: Row = {"bytes": b"", "path": path}
            label = posixpath.basename(posixpath.dirname(path))
            rows.append({"image": image, "label": label} if label else {"image": image})
            wanted.append((image, path, size))
        _read(self._store, wanted)
        return rows


def _is_metadata(path: str) -> bool:
    return posixpath.basename(path).lower() == _METADATA


def _column(key: str) -> str | None:
    """The column that images named under a key are in; None if the key names none."""
    for ending, whole in (("file_name", "image"), ("file_names", "images")):
        if key == ending:
            return whole
        if key.endswith(f"_{ending}"):
            return key[: -len(ending) - 1]
    return None


def _read(store: Store, wanted: Sequence[_Wanted]) -> None:
    """Fill in the bytes of images."""
    contents = store.read_ranges([(path, 0, size) for _, path, size in wanted])
    for (image, _, _), content in zip(wanted, contents, strict=True):
        image["bytes"] = bytes(content)
