"""Functions and classes that a mixture names, as ``package.module:name``."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from omniload.errors import MixtureError


def import_named(path: str, where: str) -> Any:
    """What a name stands for; the part after the colon may have dots.

    Args:
        path: ``package.module:name``.
        where: what it is and where it is named, for the message.

    Raises:
        MixtureError: it cannot be imported.
    """
    module, _, name = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise MixtureError(f"{where} cannot be imported ({error}); is it on PYTHONPATH?") from error
    return found


def source_text(thing: Any) -> str:
    """The text of a function or class, so that an edited one is another; empty where it cannot be had."""
    try:
        return inspect.getsource(thing)
    except (OSError, TypeError):
        return ""
