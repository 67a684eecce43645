"""Functions, built in or the user's, that turn a row into no, one or several rows before it is tokenised.

A transform must be pure: what it returns may depend on the row, its arguments and the seed only. It may be called
again for the same row, in another process, when a payload is derived anew. A class is made once, with the arguments,
and what it makes is called with the rows.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import xxhash
from pydantic import ValidationError

from omniload.errors import MixtureError
from omniload.importing import import_named, source_text
from omniload.mixture import TransformSpec
from omniload.samples.builtin import TRANSFORMS
from omniload.samples.extras import Extras
from omniload.samples.sample import BadSample
from omniload.sources.order import key64
from omniload.sources.protocol import Row


class Transform:
    """One transform of a source.

    A function that has a keyword ``seed`` is given 64 pseudo-random bits, one that has ``rng`` a `random.Random` made
    from them; they depend on the mixture's seed, the source's name, the epoch and the row, and on nothing else.

    Args:
        source: name of the source, for messages.
        spec: function or class, and arguments.

    Raises:
        MixtureError: the function cannot be imported, or does not take its arguments.
    """

    def __init__(self, source: str, spec: TransformSpec) -> None:
        self._where = f"source '{source}': transform {spec.call}"
        self._args = dict(spec.args)
        path, version = TRANSFORMS.get(spec.call, (spec.call, None))
        imported = self._import(path)
        self._check_arguments(imported)
        self._function = self._make(imported) if isinstance(imported, type) else imported
        extras = getattr(self._function, "extras", None)
        self.extras: Extras | None = extras if isinstance(extras, Extras) else None
        """The arrays that it adds to rows, if any."""
        parameters = _parameters(self._function)
        self._seeded = next((k for k in ("seed", "rng") if k in parameters and k not in self._args), None)
        digest = xxhash.xxh3_128()
        code = source_text(imported) if version is None else str(version)
        for part in (spec.call, repr(sorted(spec.args.items())), code):
            digest.update(f"{len(part)}:{part}".encode())
        self.fingerprint: str = digest.hexdigest()
        """Hex digest of name, arguments and, where it can be had, the function's source text."""

    def _import(self, path: str) -> Callable[..., Any]:
        function = import_named(path, f"{self._where}:")
        if not callable(function):
            raise MixtureError(f"{self._where}: is not a function")
        return cast("Callable[..., Any]", function)

    def _check_arguments(self, function: Callable[..., Any]) -> None:
        parameters = _parameters(function)
        any_keyword = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        unknown = [key for key in self._args if parameters and key not in parameters and not any_keyword]
        if unknown:
            raise MixtureError(
                f"{self._where}: takes no argument '{unknown[0]}'; it takes {', '.join(parameters)}"
            )

    def _make(self, made_from: type) -> Callable[..., Any]:
        args, self._args = self._args, {}
        try:
            function = made_from(**args)
        except (TypeError, ValueError, ImportError) as error:
            reason = str(error)
            if isinstance(error, ValidationError):
                first = error.errors(include_url=False)[0]
                message = first["msg"].removeprefix("Value error, ")
                reason = ": ".join([*map(str, first["loc"]), message])
            raise MixtureError(f"{self._where}: {' '.join(reason.split())}") from error
        if not callable(function):
            raise MixtureError(f"{self._where}: makes something that cannot be called with a row")
        return cast("Callable[..., Any]", function)

    def __call__(self, row: Row, seed: int) -> list[Row]:
        """Apply the function to one row.

        Args:
            row: which the function may change.
            seed: 64 bits that are this row's own.

        Raises:
            BadSample: the function raised; out of memory and errors of I/O pass as they are.
            MixtureError: it returned something else than None, a dict or a list of dicts.
        """
        extra: dict[str, Any] = {}
        if self._seeded:
            extra[self._seeded] = seed if self._seeded == "seed" else random.Random(seed)
        try:
            result = self._function(row, **self._args, **extra)
        except (OSError, MemoryError):
            raise  # not determined by the bytes of the row
        except BadSample as error:
            raise BadSample(f"{self._where}: {error}") from error
        except Exception as error:
            raise BadSample(f"{self._where} raised {type(error).__name__}: {error}") from error
        if result is None:
            return []
        rows = [result] if isinstance(result, dict) else result
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise MixtureError(
                f"{self._where}: returned {type(result).__name__}, not None, a dict or a list of dicts"
            )
        return rows


def apply_all(transforms: Sequence[Transform], row: Row, seed: int) -> list[Row]:
    """Apply transforms one after the other, each to every row that the one before gave."""
    rows = [row]
    for number, transform in enumerate(transforms):
        rows = [result for sub, one in enumerate(rows) for result in transform(one, key64(seed, number, sub))]
    return rows


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # of functions written in C: they take no seed
        return {}
