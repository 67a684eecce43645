"""The ``index.json`` of a MosaicML streaming dataset: its shards, and how their samples fall into blocks."""

from __future__ import annotations

from typing import Annotated, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from omniload.errors import CorruptSource

BLOCK_BYTES = 2 << 20
"""Bytes of samples per block of a plain shard, on average over the shard; part of the order of the rows."""
_SHARD_BYTES = 1 << 32  # the offsets in a shard are of 32 bits

_Bytes = Annotated[int, Field(ge=0, lt=_SHARD_BYTES)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True)


class ShardFile(_Part):
    """One form in which a shard is stored."""

    basename: str
    """Path relative to the index."""
    bytes: _Bytes
    """Its size."""
    hashes: dict[str, str] = {}
    """Hex digests by algorithm, if the writer was asked for any."""


class Shard(_Part):
    """One shard."""

    version: Literal[2]
    format: Literal["mds"]
    column_names: Annotated[list[str], Field(min_length=1)]
    column_encodings: list[str]
    column_sizes: list[int | None]
    """Bytes of each column's values; None or 0 if every value has a size of its own."""
    samples: Annotated[int, Field(ge=0)]
    compression: str | None = None
    """``algorithm`` or ``algorithm:level``."""
    raw_data: ShardFile
    zip_data: ShardFile | None = None
    """The compressed form, which is then the one that is stored."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = self.column_names
        if len(set(names)) != len(names) or not len(names) == len(self.column_encodings) == len(
            self.column_sizes
        ):
            raise ValueError(f"names, encodings and sizes of {len(names)} columns do not fit together")
        if any(size is not None and size < 0 for size in self.column_sizes):
            raise ValueError("a column has a negative size")
        if self.samples and self.data_at > self.raw_data.bytes:
            raise ValueError(f"{self.samples} samples do not fit into {self.raw_data.bytes} bytes")
        if (self.zip_data is None) != (self.compression is None):
            raise ValueError("compression and zip_data must both be given, or neither")
        return self

    @property
    def data_at(self) -> int:
        """First byte after the number of samples and their offsets."""
        return 8 + 4 * self.samples

    @property
    def stored(self) -> ShardFile:
        """The file to read."""
        return self.zip_data or self.raw_data

    @property
    def block_samples(self) -> int:
        """Samples per block; a compressed shard cannot be entered in the middle and is one."""
        if self.zip_data is not None:
            return max(self.samples, 1)
        return max(BLOCK_BYTES * self.samples // max(self.raw_data.bytes, 1), 1)


class _Json(_Part):
    version: Literal[2]
    shards: list[Shard]


class MdsIndex:
    """A parsed index.

    Args:
        data: the bytes of ``index.json``.
        url: its path or URL, for messages.

    Raises:
        CorruptSource: it is not what the tool writes.
    """

    def __init__(self, data: memoryview, url: str) -> None:
        try:
            self.shards: list[Shard] = _Json.model_validate_json(bytes(data)).shards
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            place = ".".join(str(part) for part in problem["loc"])
            raise CorruptSource(
                f"{url}: {f'at {place}: ' if place else ''}{problem['msg']}; not an index of version 2 as MDSWriter"
                " writes it: copy or write it again, or set format: to that of the files"
            ) from None
        samples = [shard.samples for shard in self.shards]
        blocks = [-(-shard.samples // shard.block_samples) for shard in self.shards]
        self._first_row = np.concatenate([[0], np.cumsum(samples, dtype=np.int64)])
        self._first_block = np.concatenate([[0], np.cumsum(blocks, dtype=np.int64)])

    @property
    def num_blocks(self) -> int:
        """Blocks of all shards."""
        return int(self._first_block[-1])

    @property
    def num_rows(self) -> int:
        """Samples of all shards."""
        return int(self._first_row[-1])

    def places(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """``int64[n]`` shard of each sample, and its number in that."""
        shard = np.searchsorted(self._first_row, rows, side="right") - 1
        return shard, rows - self._first_row[shard]

    def locate(self, block: int) -> tuple[int, int, int]:
        """The shard of a block, its first sample in that shard, and the one after its last."""
        number = int(np.searchsorted(self._first_block, block, side="right")) - 1
        shard = self.shards[number]
        first = (block - int(self._first_block[number])) * shard.block_samples
        return number, first, min(first + shard.block_samples, shard.samples)

    def row_ids(self, block: int) -> np.ndarray:
        """``int64[rows]``: the number of each sample of a block, counted over all shards."""
        number, first, last = self.locate(block)
        start = int(self._first_row[number])
        return np.arange(start + first, start + last, dtype=np.int64)
