"""What can go wrong with a checkpoint.

Every class also derives from the builtin that fits, so code that knows nothing of this package can catch it::

    CheckpointError
    ├── NotACheckpoint (FileNotFoundError)      no manifest.json: nothing was ever committed there
    ├── AlreadyCommitted (FileExistsError)      the directory holds a committed checkpoint
    ├── FormatError (ValueError)                metadata that does not follow the format
    │   └── UnsupportedVersion                  a version or codec this release does not know
    ├── CorruptCheckpoint (ValueError)          sizes or digests differ from what was written
    ├── TilingError (ValueError)                boxes with gaps, overlaps or out of bounds
    ├── StateError (ValueError)                 state that cannot be saved or restored as given
    │   ├── ObjectsDiffer                       global objects that are not equal on all ranks
    │   └── UnsupportedLayout                   a tensor that boxes cannot describe
    ├── MismatchError (ValueError)              the state and the checkpoint do not fit each other
    ├── AsyncSaveFailed (RuntimeError)          an earlier asynchronous save failed; raised by the next call
    ├── CoordinationTimeout (TimeoutError)      ranks that did not reach a stage in time; names them
    ├── RankFailed (RuntimeError)               what one rank reported; member of RanksFailed
    └── RanksFailed (ExceptionGroup)            some ranks failed; the same on every rank
"""

from __future__ import annotations

from collections.abc import Sequence


class CheckpointError(Exception):
    """Base of everything this package raises on purpose."""


class NotACheckpoint(CheckpointError, FileNotFoundError):
    """There is no committed checkpoint at this place."""


class AlreadyCommitted(CheckpointError, FileExistsError):
    """The place holds a committed checkpoint; nothing of it was touched."""


class FormatError(CheckpointError, ValueError):
    """A metadata file does not follow the format."""


class UnsupportedVersion(FormatError):
    """The checkpoint was written in a version of the format, or with a codec, that is not known here."""


class CorruptCheckpoint(CheckpointError, ValueError):
    """Bytes differ from the ones that were written; names file and tensor."""


class TilingError(CheckpointError, ValueError):
    """The boxes of a tensor do not tile it exactly."""


class StateError(CheckpointError, ValueError):
    """The state holds something that cannot be saved or restored; names it."""


class ObjectsDiffer(StateError):
    """A global object is not the same on all ranks; names the first differing path."""


class UnsupportedLayout(StateError):
    """A tensor's layout cannot be described by boxes, or contradicts its placements; names the tensor."""


class MismatchError(CheckpointError, ValueError):
    """Keys, shapes or dtypes of the state and of the checkpoint differ; found before payload is read."""


class AsyncSaveFailed(CheckpointError, RuntimeError):
    """An asynchronous save failed and nobody asked its handle; ``__cause__`` is what went wrong."""


class CoordinationTimeout(CheckpointError, TimeoutError):
    """Ranks did not reach a stage in time; names the ranks and the stage."""


class RankFailed(CheckpointError, RuntimeError):
    """What one rank reported to the others.

    Attributes:
        rank: the rank that failed.
        stage: the stage it failed in (``plan``, ``write``, ``read`` ...).
        kind: name of the class of the error it ran into.
        reason: message of that error, one line.
    """

    def __init__(self, rank: int, stage: str, kind: str, reason: str) -> None:
        super().__init__(f"rank {rank} failed in stage '{stage}': {kind}: {reason}")
        self.rank = rank
        self.stage = stage
        self.kind = kind
        self.reason = reason

    def __reduce__(self) -> tuple[type[RankFailed], tuple[int, str, str, str]]:
        return type(self), (self.rank, self.stage, self.kind, self.reason)


class RanksFailed(CheckpointError, ExceptionGroup[RankFailed]):
    """One or more ranks failed; every rank of the job raises this with equal members, in order of rank."""

    @property
    def members(self) -> list[RankFailed]:
        """What the failed ranks reported, in order of rank."""
        return [one for one in self.exceptions if isinstance(one, RankFailed)]

    def derive(self, excs: Sequence[RankFailed]) -> RanksFailed:  # type: ignore[override]
        """A group of the same class, as ``split`` and ``subgroup`` need it."""
        return RanksFailed(self.message, excs)
