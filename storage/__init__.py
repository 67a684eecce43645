"""Bytes in and out of any URL: fast, atomic, durable, with spans of what was done.

Start with ``Store``; ``storage.errors`` draws the exceptions.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from storage.backend import FileStat
from storage.cache import BlockCache
from storage.errors import (
    AlreadyExists,
    BadRequest,
    Corrupt,
    NoSpace,
    NotFound,
    PermissionDenied,
    Stalled,
    StorageError,
    Throttled,
    Transient,
    UnsafePath,
    Unsupported,
    UnsupportedURL,
)
from storage.globbing import glob
from storage.retry import RetryPolicy
from storage.spans import Span, drain, span, spans_to_json, start_recording, stop_recording
from storage.store import Store
from storage.writer import Writer

if TYPE_CHECKING:
    from storage.cache_filesystem import CachedFileSystem
    from storage.drainer import Drainer
    from storage.metrics import SpanMetrics
    from storage.tiers import Tier, Tiers
    from storage.trace import trace_json
    from storage.transaction import Transaction, remove_uncommitted
    from storage.tree import CommittedTree

__all__ = [
    "AlreadyExists",
    "BadRequest",
    "BlockCache",
    "CachedFileSystem",
    "CommittedTree",
    "Corrupt",
    "Drainer",
    "FileStat",
    "NoSpace",
    "NotFound",
    "PermissionDenied",
    "RetryPolicy",
    "Span",
    "SpanMetrics",
    "Stalled",
    "StorageError",
    "Store",
    "Throttled",
    "Tier",
    "Tiers",
    "Transaction",
    "Transient",
    "UnsafePath",
    "Unsupported",
    "UnsupportedURL",
    "Writer",
    "drain",
    "glob",
    "remove_uncommitted",
    "span",
    "spans_to_json",
    "start_recording",
    "stop_recording",
    "trace_json",
]

# Imported on first use: they need fsspec, hashing or prometheus_client, for which who only reads should not wait.
_HOME = {
    "CachedFileSystem": "storage.cache_filesystem",
    "CommittedTree": "storage.tree",
    "Drainer": "storage.drainer",
    "SpanMetrics": "storage.metrics",
    "Tier": "storage.tiers",
    "Tiers": "storage.tiers",
    "Transaction": "storage.transaction",
    "remove_uncommitted": "storage.transaction",
    "trace_json": "storage.trace",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'storage' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
