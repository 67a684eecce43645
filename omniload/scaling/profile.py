"""What a source costs: measured by reading real samples of it, as a run would."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from omniload.errors import PlanError, SourceError
from omniload.loader import SourceLoader
from omniload.payload import Payload
from omniload.pieces import Cursor

CHUNK_SAMPLES = 8192
"""Most samples per read, as in a run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceProfile:
    """What one reader of a source gives, and what it takes."""

    name: str
    """The source."""
    tokens_per_s: float
    """Tokens that it gives in a second of reading, windows and waits for storage included."""
    samples_per_s: float
    """Samples, likewise."""
    prepare_s_per_sample: float
    """Processor seconds per sample, of all threads; less than the time it takes where storage is waited for, more
    where several threads work on it."""
    bytes_per_sample: float
    """Payload that is sent on."""
    resident_bytes: int
    """Host memory of the window and the buffer at their largest."""
    open_s: float
    """Seconds until the first sample is there, which a new reader takes before it helps."""

    def __post_init__(self) -> None:
        """Measured values are numbers, and a source gives something.

        Raises:
            PlanError: they are not.
        """
        for name, value in asdict(self).items():
            if name == "name":
                continue
            least = "above 0" if name in ("tokens_per_s", "samples_per_s") else "from 0 on"
            if not (math.isfinite(value) and (value > 0 if least == "above 0" else value >= 0)):
                raise PlanError(
                    f"profile of source '{self.name}': {name} is {value!r}, and a number {least} is needed;"
                    " measure it again"
                )

    @property
    def tokens_per_sample(self) -> float:
        """Tokens of a sample on average."""
        return self.tokens_per_s / self.samples_per_s

    @property
    def cpu_s_per_token(self) -> float:
        """Processor seconds per token."""
        return self.prepare_s_per_sample / self.tokens_per_sample

    def to_json(self) -> dict[str, Any]:
        """JSON-serialisable form."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Inverse of `to_json`."""
        return cls(**values)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Read:
    """What was read from the start to some point of time."""

    seconds: float = 0.0
    cpu_s: float = 0.0
    samples: int = 0
    tokens: int = 0
    num_bytes: int = 0


def profile_source(
    loader: SourceLoader, *, seconds: float = 2.0, max_samples: int | None = None
) -> SourceProfile:
    """Read samples of a source from its beginning, and say what they cost.

    Rates are those over whole windows, if one was read to its end; else they count the loading of the window against
    the samples that were made of it by then, so that they are rather too low. Nothing but the loader's buffers changes.

    Args:
        loader: that has read nothing yet; the process should do nothing else meanwhile, as its processor time is taken.
        seconds: after how long to stop; the read under way is finished, and a small source is read several times.
        max_samples: after how many samples to stop at the latest.

    Raises:
        SourceError: the source cannot be read, or gives no token in a whole pass.
    """
    assert seconds > 0
    start, cpu_start = time.perf_counter(), time.process_time()
    cursor, read, whole = Cursor(), _Read(), _Read()
    open_s, resident = 0.0, 0
    while read.seconds < seconds and (max_samples is None or read.samples < max_samples):
        chunk = loader.read(cursor, CHUNK_SAMPLES if read.samples else 1)
        if not read.samples:
            open_s = time.perf_counter() - start
        num_bytes = _size(loader.payload(chunk.pieces)) if len(chunk.pieces) else 0
        resident = max(resident, loader.buffered_bytes)
        loader.release(chunk.pieces)
        read = replace(
            read,
            seconds=time.perf_counter() - start,
            cpu_s=time.process_time() - cpu_start,
            samples=read.samples + int((chunk.first_piece[1:] > chunk.first_piece[:-1]).sum()),
            tokens=read.tokens + int(chunk.pieces["length"].sum(dtype="int64")),
            num_bytes=read.num_bytes + num_bytes,
        )
        if chunk.ends_epoch and not read.samples:
            why = f": {loader.failures[-1].reason}" if loader.failures else ""
            raise SourceError(
                f"source '{loader.name}' gave no token in a whole pass over its data{why}:"
                " check its column, transforms, overflow policy and split"
            )
        if (chunk.end.epoch, chunk.end.window) != (cursor.epoch, cursor.window):
            whole = read
        cursor = chunk.end
    if not read.samples:
        raise SourceError(
            f"source '{loader.name}' gave no token within {seconds:g} s: give it longer, or check its transforms"
        )
    rated = whole if whole.samples else read
    return SourceProfile(
        name=loader.name,
        tokens_per_s=rated.tokens / rated.seconds,
        samples_per_s=rated.samples / rated.seconds,
        prepare_s_per_sample=rated.cpu_s / rated.samples,
        bytes_per_sample=read.num_bytes / read.samples,
        resident_bytes=resident,
        open_s=open_s,
    )


def _size(payload: Payload) -> int:
    """Bytes of everything in it; a sample that has extra arrays is one piece."""
    masks = (mask for mask in payload.loss_mask if mask is not None)
    extras = (array for arrays in payload.arrays or () for array in arrays.values())
    return sum(array.nbytes for part in (payload.tokens, masks, extras) for array in part)
