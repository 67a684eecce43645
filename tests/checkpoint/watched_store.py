"""A store that tells a hook what it is about to do; the hook may raise, or kill the process."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from storage import Store

Hook = Callable[[str], None]


class WatchedStore(Store):
    """Calls ``hook(point)`` before and after each step of every write below it."""

    def __init__(self, url: str | os.PathLike[str], hook: Hook) -> None:
        super().__init__(url)
        self._hook = hook

    def write(self, path: str, data: Any) -> None:
        self._hook(f"before write {_name(path)}")
        super().write(path, data)
        self._hook(f"after write {_name(path)}")

    def create(self, path: str, data: Any) -> None:
        self._hook(f"before create {_name(path)}")
        super().create(path, data)
        self._hook(f"after create {_name(path)}")

    def delete_tree(self, prefix: str) -> None:
        self._hook("before delete_tree")
        super().delete_tree(prefix)
        self._hook("after delete_tree")

    def writer(self, path: str, header_bytes: int = 0) -> Any:
        self._hook(f"before open {_name(path)}")
        return _WatchedWriter(super().writer(path, header_bytes), _name(path), self._hook)

    def sub(self, path: str) -> Store:
        below = super().sub(path)
        below.__class__ = WatchedStore
        below._hook = self._hook  # type: ignore[attr-defined]
        return below


class _WatchedWriter:
    def __init__(self, writer: Any, name: str, hook: Hook) -> None:
        self._writer = writer
        self._name = name
        self._hook = hook

    @property
    def num_bytes(self) -> int:
        return int(self._writer.num_bytes)

    def write(self, data: Any) -> None:
        self._hook(f"before data of {self._name}")
        self._writer.write(data)
        self._hook(f"after data of {self._name}")

    def set_header(self, header: bytes) -> None:
        self._hook(f"before header of {self._name}")
        self._writer.set_header(header)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._hook(f"before close of {self._name}")
        self._writer.__exit__(kind, error, trace)
        self._hook(f"after close of {self._name}")


def _name(path: str) -> str:
    return path.rpartition("/")[2]
