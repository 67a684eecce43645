"""Bytes in and out of any URL: fast, atomic, durable, with spans of what was done.

Start with ``Store``; ``storage.errors`` draws the exceptions.
"""

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

__all__ = [
    "AlreadyExists",
    "BadRequest",
    "BlockCache",
    "Corrupt",
    "FileStat",
    "NoSpace",
    "NotFound",
    "PermissionDenied",
    "RetryPolicy",
    "Span",
    "Stalled",
    "StorageError",
    "Store",
    "Throttled",
    "Transient",
    "UnsafePath",
    "Unsupported",
    "UnsupportedURL",
    "Writer",
    "drain",
    "glob",
    "span",
    "spans_to_json",
    "start_recording",
    "stop_recording",
]
