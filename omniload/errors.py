"""Exceptions of the loader.

::

    OmniloadError
    ├── MixtureError (ValueError)           the mixture file or a keyword that overrides it
    ├── PlaceError (ValueError)             a mesh, or ranks that cannot share the lanes
    ├── PlanError (ValueError)              a strategy, cost function or cap that makes no lawful plan
    ├── DecisionError (ValueError)          a decision about a running stream that is not valid or comes too late
    ├── StateError (ValueError)             a state that does not belong to this mixture or place
    ├── SourceError
    │   ├── SourceNotFound (FileNotFoundError)   a path that matches nothing
    │   ├── ColumnMissing (LookupError)          no column the loader knows how to read
    │   ├── CorruptSource (ValueError)           a file that cannot be read as what it claims to be
    │   ├── SampleError (ValueError)             one sample that breaks its source's policy
    │   └── TooManyFailures (ValueError)         more quarantined rows than the source's budget
    ├── QuarantineError (OSError)           the quarantine file cannot be written
    ├── ObservingError (OSError)            numbers or events of a job that cannot be written, read or served
    ├── JobNotFound (LookupError)           a job that publishes no numbers
    ├── LoaderStopped (RuntimeError)        the threads of a loader are gone: closed elsewhere, or before a fork
    └── LoaderTimeout (TimeoutError)        a wait that outlasted its limit; names what it waited for

Every message is one line: what is wrong, where, and what to do about it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omniload.pieces import Failure


class OmniloadError(Exception):
    """Base of every error the loader raises on purpose."""


class MixtureError(OmniloadError, ValueError):
    """The mixture file, or a keyword that overrides it, is not valid."""


class PlaceError(OmniloadError, ValueError):
    """The lanes of the mixture cannot be shared by these ranks."""


class PlanError(OmniloadError, ValueError):
    """A strategy, cost function or cap makes a plan impossible or unlawful."""


class DecisionError(OmniloadError, ValueError):
    """A decision about a running stream is not valid, or comes too late."""


class StateError(OmniloadError, ValueError):
    """A saved state does not belong to this mixture, this data or this place."""


class SourceError(OmniloadError):
    """Something is wrong with the data of one source."""


class SourceNotFound(SourceError, FileNotFoundError):
    """A source's path matches no file."""


class ColumnMissing(SourceError, LookupError):
    """A file has no column that the loader knows how to read."""


class CorruptSource(SourceError, ValueError):
    """A file cannot be read as what it claims to be."""


class SampleError(SourceError, ValueError):
    """A sample breaks a policy of its source that says ``error``."""


class TooManyFailures(SourceError, ValueError):
    """A source has more quarantined rows than its budget allows.

    Args:
        message: one line.
        failures: the rows of the step that could not be planned, up to the one that was too many.
    """

    def __init__(self, message: str, failures: tuple[Failure, ...] = ()) -> None:
        super().__init__(message)
        self.failures = failures


class QuarantineError(OmniloadError, OSError):
    """The quarantine file cannot be written."""


class ObservingError(OmniloadError, OSError):
    """Numbers or events of a job cannot be written, read or served."""


class JobNotFound(OmniloadError, LookupError):
    """No job of this name publishes its numbers."""


class LoaderStopped(OmniloadError, RuntimeError):
    """The threads of a loader are gone: another thread closed it, or they are of the process that forked this one."""


class LoaderTimeout(OmniloadError, TimeoutError):
    """A wait inside the loader outlasted its limit."""


def kind_and_message(error: BaseException) -> str:
    """What an error raised by somebody else's code says, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split()) or 'no message'}"
