"""Which tensors a save compresses: the ``compression`` argument."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

from checkpoint.errors import StateError
from checkpoint.format.codec import CODEC_NONE, CODECS
from checkpoint.patterns import fits

Compression: TypeAlias = Mapping[str, str]
"""Pattern to codec, ``"zstd"`` or ``"none"``; the first pattern that fits a tensor decides.

Patterns are those of :func:`checkpoint.patterns.fits`. What none fits is stored as it is.
"""


def check_codecs(compression: Compression | None) -> None:
    """Check the argument, whatever the state.

    Raises:
        ValueError: Not a mapping of patterns to codecs.
    """
    if compression is None:
        return
    if not isinstance(compression, Mapping):
        raise ValueError(
            f"compression is {compression!r}: give a dict of groups or patterns to codecs, as in {{'model': 'zstd'}}"
        )
    for pattern, codec in compression.items():
        if not isinstance(pattern, str) or codec not in CODECS:
            raise ValueError(
                f"compression has {pattern!r}: {codec!r}; the codecs of a group or pattern are {', '.join(CODECS)}"
            )


def codec_of(compression: Compression, group: str, key: str) -> str:
    """The codec of a tensor."""
    for pattern, codec in compression.items():
        if fits(pattern, group, key):
            return codec
    return CODEC_NONE


def check_used(compression: Compression, tensors: Iterable[tuple[str, str]]) -> None:
    """Check that no pattern is idle: one that fits nothing is a mistake in writing.

    Args:
        compression: The argument.
        tensors: Group and key of all global tensors.

    Raises:
        StateError: A pattern fits none of them.
    """
    idle = dict(compression)
    for group, key in tensors:
        if not idle:
            return
        for pattern in [one for one in idle if fits(one, group, key)]:
            del idle[pattern]
    if idle:
        raise StateError(
            f"compression has {next(iter(idle))!r}, which fits no tensor of the state; "
            "name a group, or match group/key"
        )
