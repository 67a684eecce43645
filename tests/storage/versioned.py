"""A source of objects in memory that have versions, and that counts what is asked of it."""

from collections.abc import Callable

from storage.cache_block import Version
from storage.errors import StorageError, classify


class VersionedObjects:
    """Implements ``storage.cache_reader.Source``.

    Attributes:
        objects: Tag and content by path; ``put`` replaces.
        fetched: ``(path, start, number of bytes)`` of each fetch.
        num_look_ups: How often a version was asked for.
        before_fetch: Called before each fetch, with its path.
    """

    def __init__(self) -> None:
        self.objects: dict[str, tuple[str | None, bytes]] = {}
        self.fetched: list[tuple[str, int, int]] = []
        self.num_look_ups = 0
        self.before_fetch: Callable[[str], object] = lambda path: None
        self._num_puts = 0

    def put(self, path: str, content: bytes, *, tagged: bool = True) -> None:
        """Store an object under a new tag, or without one."""
        self._num_puts += 1
        self.objects[path] = (f"tag-{self._num_puts}" if tagged else None, content)

    def look_up(self, path: str) -> Version | None:
        self.num_look_ups += 1
        tag, content = self._get(path)
        return None if tag is None else Version(url=f"fake://{path}", etag=tag, size=len(content))

    def fetch(self, path: str, start: int, into: memoryview) -> int:
        self.before_fetch(path)
        data = self._get(path)[1][start : start + into.nbytes]
        self.fetched.append((path, start, len(data)))
        into[: len(data)] = data
        return len(data)

    def fetch_all(self, path: str) -> bytes:
        self.before_fetch(path)
        data = self._get(path)[1]
        self.fetched.append((path, 0, len(data)))
        return data

    def classify(self, error: BaseException, path: str) -> StorageError | None:
        return classify(error, path)

    def _get(self, path: str) -> tuple[str | None, bytes]:
        if path not in self.objects:
            raise FileNotFoundError(path)
        return self.objects[path]
