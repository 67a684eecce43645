"""The files of a source whose rows are numbered anew in every epoch: the epoch stands in place of a file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

from omniload.sources.protocol import FileEntry


class EveryEpoch(Sequence[FileEntry]):
    """One entry, under whatever number.

    Args:
        entry: what the rows of every epoch come from.
    """

    def __init__(self, entry: FileEntry) -> None:
        self._entry = entry

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[FileEntry]:
        yield self._entry  # by their numbers there is no end of them

    @overload
    def __getitem__(self, index: int) -> FileEntry: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[FileEntry]: ...
    def __getitem__(self, index: Any) -> Any:
        return self._entry
