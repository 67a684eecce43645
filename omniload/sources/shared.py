"""One reader for each object that several sources read: loaders of a process may be given the same dataset."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakValueDictionary

R = TypeVar("R")

_readers: WeakValueDictionary[int, Any] = WeakValueDictionary()  # by the id of the object, which each holds
_lock = threading.Lock()


def reader_of(thing: Any, make: Callable[[Any], R]) -> R:
    """The reader of an object: there is one as long as any is in use.

    Args:
        thing: the object.
        make: makes a reader, which holds the object.
    """
    with _lock:
        reader: R | None = _readers.get(id(thing))
        if reader is None:
            reader = _readers[id(thing)] = make(thing)
        return reader


def _begin_anew() -> None:
    """Forget the readers: a thread that held the lock of one when its process forked is not there in the new one."""
    global _lock  # it may be held, too
    _lock = threading.Lock()
    _readers.clear()


os.register_at_fork(after_in_child=_begin_anew)
