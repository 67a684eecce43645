"""One committed tree as a store for reading, whichever of its copies a byte comes from."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NoReturn, TypeVar

from storage.backend import FileStat
from storage.buffers import Data
from storage.errors import NotFound, StorageError, Unsupported
from storage.paths import byte_order, check_prefix, join
from storage.store import Store
from storage.writer import Writer

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["TreeView"]

_Result = TypeVar("_Result")


class TreeView(Store):
    """A read-only store over the copies of one tree.

    Each call asks the copies in order until one answers, so a copy that is removed, damaged or out of reach while
    the view is in use is made up for by the next one. That is exact: files of an attempt never change, and the
    marker was read when the view was made.

    Args:
        copies: The copies, the one to prefer first; some may hold nothing yet, or no more.
        marker: Name of the marker below the tree.
        content: Its bytes.
        at: Directory of the tree that the view is rooted at.
    """

    # Deliberately not Store.__init__: a view has no backend of its own, every method that would use one is replaced.
    def __init__(self, copies: Sequence[Store], marker: str, content: bytes, at: str = "") -> None:
        self._copies = [copy.sub(at) for copy in copies]
        self._roots = copies
        self._marker = marker
        self._content = content
        self._at = at

    @property
    def url(self) -> str:
        """That of the preferred copy."""
        return self._copies[0].url

    @property
    def copies(self) -> list[str]:
        """URLs of the copies, in the order in which they are asked."""
        return [copy.url for copy in self._copies]

    def __repr__(self) -> str:
        return f"TreeView({self.copies})"

    def read(self, path: str) -> bytes:
        """As ``Store.read``."""
        if self._is_marker(path):
            return self._content
        return self._ask(lambda copy: copy.read(path))

    def read_ranges(
        self, ranges: Sequence[tuple[str, int, int]], into: "Sequence[Buffer] | None" = None
    ) -> list[memoryview]:
        """As ``Store.read_ranges``; the marker is read by ``read``."""
        return self._ask(lambda copy: copy.read_ranges(ranges, into))

    def open(self, path: str) -> BinaryIO:
        """As ``Store.open``. The file stays with one copy."""
        return self._ask(lambda copy: copy.open(path))

    def local_path(self, path: str) -> Path | None:
        """None: a path could not move on to another copy."""
        check_prefix(path)
        return None

    def stat(self, path: str) -> FileStat:
        """As ``Store.stat``; the tag is that of one copy."""
        if self._is_marker(path):
            return FileStat(path=path, size=len(self._content))
        return self._ask(lambda copy: copy.stat(path))

    def list_dirs(self, prefix: str = "") -> list[str]:
        """As ``Store.list_dirs``: what any copy holds."""
        return sorted({name for copy in self._copies for name in copy.list_dirs(prefix)}, key=byte_order)

    def list(self, prefix: str = "") -> list[FileStat]:
        """As ``Store.list``: what any copy holds."""
        # In the order in which copies are removed: what a copy lacks already, a later one has.
        found = {one.path: one for copy in self._copies for one in copy.list(prefix)}
        prefix = check_prefix(prefix)
        path = self._marker.removeprefix(f"{self._at}/") if self._at else self._marker
        found.pop(path, None)
        if self._is_marker(path) and (not prefix or path.startswith(f"{prefix}/")):
            found[path] = self.stat(path)
        return sorted(found.values(), key=lambda one: byte_order(one.path))

    def sub(self, path: str) -> "TreeView":
        """As ``Store.sub``."""
        return TreeView(self._roots, self._marker, self._content, join(self._at, check_prefix(path)))

    def write(self, path: str, data: Data) -> None:
        """Refused."""
        self._refuse(path)

    def create(self, path: str, data: Data) -> None:
        """Refused."""
        self._refuse(path)

    def writer(self, path: str, header_bytes: int = 0) -> Writer:
        """Refused."""
        self._refuse(path)

    def delete(self, path: str) -> None:
        """Refused."""
        self._refuse(path)

    def delete_tree(self, prefix: str) -> None:
        """Refused."""
        self._refuse(prefix)

    def _is_marker(self, path: str) -> bool:
        return join(self._at, path) == self._marker

    def _ask(self, call: Callable[[Store], _Result]) -> _Result:
        errors = []
        for copy in self._copies:
            try:
                return call(copy)
            except StorageError as error:
                errors.append(error)
        # One copy that could not be asked leaves open whether it has the object: that is not "not found".
        failures = [error for error in errors if not isinstance(error, NotFound)]
        worst = failures[0] if failures else errors[0]
        for other in failures[1:]:
            worst.add_note(f"another copy: {other}")
        raise worst

    def _refuse(self, path: str) -> NoReturn:
        raise Unsupported(
            join(self.url, path), "a committed tree is read-only: write another one to the local tier"
        )
