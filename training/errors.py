"""Exceptions of the trainer.

::

    TrainingError
    ├── ConfigError (ValueError)     a configuration, or a batch it does not fit, that cannot be trained
    ├── LayoutError (ValueError)     a model that the mesh cannot hold
    └── ResumeError (ValueError)     nothing to resume from, or an output folder that is already in use

Every message is one line: what is wrong, where, and what to do about it. The command line answers any of them,
and the loader's and the checkpoint's own, with exit code 2.
"""

from __future__ import annotations


class TrainingError(Exception):
    """Base of every error the trainer raises on purpose."""


class ConfigError(TrainingError, ValueError):
    """The configuration is not valid, or does not fit the data."""


class LayoutError(TrainingError, ValueError):
    """The model cannot be cut over this mesh."""


class ResumeError(TrainingError, ValueError):
    """The run cannot start from, or write to, the place it was told."""
