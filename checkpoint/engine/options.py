"""How to save."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from checkpoint.compression import Compression, check_codecs


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveOptions:
    """How to save; equal on all ranks.

    Attributes:
        step: Step number for the manifest.
        overwrite: Replace a checkpoint that is committed at the place.
        timeout_s: Longest wait for other ranks, in each stage.
        user_metadata: JSON-able values for the manifest.
        compression: Which tensors to compress.

    Raises:
        ValueError: ``compression`` is not a mapping of patterns to codecs.
    """

    step: int | None
    overwrite: bool
    timeout_s: float
    user_metadata: Mapping[str, object]
    compression: Compression | None = None

    def __post_init__(self) -> None:
        check_codecs(self.compression)
