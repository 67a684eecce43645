"""What can go wrong in the demo.

DemoError(TrainingError)
├── CorpusError(FileNotFoundError)    the Python installation carries no text to train on
├── LogError(ValueError)              a run's log is missing, torn or not what the trainer writes
├── OutputError(FileExistsError)      the output directory holds something that is not an earlier demo
├── RunError(RuntimeError)            a training run ended in another way than it should
└── RunTimeoutError(TimeoutError)     a training run did not end in time
"""

from __future__ import annotations

from training.errors import TrainingError


class DemoError(TrainingError):
    """Base of everything that the demo raises on purpose."""


class CorpusError(DemoError, FileNotFoundError):
    """The Python installation carries no text to train on."""


class LogError(DemoError, ValueError):
    """A run's log is missing, torn in the middle or not what the trainer writes."""


class OutputError(DemoError, FileExistsError):
    """The output directory holds something that is not an earlier demo."""


class RunError(DemoError, RuntimeError):
    """A training run ended in another way than it should."""


class RunTimeoutError(DemoError, TimeoutError):
    """A training run did not end in time."""
