"""Coefficients of `CalibratedCost` from measured times."""

from __future__ import annotations

import math
import statistics
from collections import deque

import numpy as np

from omniload.errors import PlanError
from omniload.planner.costs.calibrated import FEATURES

_ZEPTOSECONDS = 10**21
_REMEMBERED_ERRORS = 1000
_RIDGE = 1e-8
"""Pull towards 0, in parts of the observations' weight: so much that collinear features have one best answer."""


class TimeFit:
    """Explains measured times by what was computed in them: least squares, kept up recursively, with forgetting.

    Minimised is the squared *relative* error, so that short and long times count alike and a single slow one, which
    nothing in its pieces explains, moves little. Coefficients are never negative: that keeps them sensible where
    features always vary together, as tokens and lanes do in lanes of one shape; such features share what they explain.
    A feature that was always 0 gets 0.

    Times are measured, so two fits of one run differ. No plan may depend on that: what one rank found is entered as a
    decision, the same on every rank, from a stated step on.

    Args:
        memory: after so many observations an old one counts ``1/e`` of a new one.

    Raises:
        PlanError: it is not a positive number.
    """

    def __init__(self, *, memory: float = 1000.0) -> None:
        if not (math.isfinite(memory) and memory > 0):
            raise PlanError(f"memory: {memory} is not a positive number of observations")
        self._keep = math.exp(-1.0 / memory)
        # All that the past says: sums over observations of x xᵀ and of x, the features divided by the seconds.
        self._gram = np.zeros((len(FEATURES), len(FEATURES)))
        self._sums = np.zeros(len(FEATURES))
        self._fitted: np.ndarray | None = None
        self._errors: deque[float] = deque(maxlen=_REMEMBERED_ERRORS)

    @staticmethod
    def features(
        length: np.ndarray, patches: np.ndarray, frames: np.ndarray, *, num_lanes: int = 1
    ) -> np.ndarray:
        """What explains the time of lanes that ran one after the other.

        Args:
            length: ``int64[n]``, tokens of each piece of theirs.
            patches: ``int64[n]``.
            frames: ``int64[n]``.
            num_lanes: how many lanes.

        Returns:
            ``float64[8]``, in the order of `FEATURES`.
        """
        values = [part.astype(np.float64) for part in (length, patches, frames)]
        sums = [total for value in values for total in (value.sum(), value @ value)]
        return np.array([*sums, len(length), num_lanes], np.float64)

    def observe(self, features: np.ndarray, seconds: float) -> None:
        """Learn from a measured time.

        Args:
            features: ``float64[8]``, of `features`.
            seconds: what it took.

        Raises:
            PlanError: the time is not a positive number, or the features are no features; nothing is learnt then.
        """
        given = np.asarray(features, np.float64)
        if given.shape != (len(FEATURES),) or not (
            np.isfinite(given).all() and given.min() >= 0 and given.any()
        ):
            raise PlanError(f"features: {given.tolist()} are none; make them with TimeFit.features")
        if not (math.isfinite(seconds) and seconds > 0):
            raise PlanError(f"seconds: {seconds} is not a positive number; leave this measurement out")
        per_second = given / seconds
        if not per_second.max() < 1e100:
            raise PlanError(f"seconds: {seconds} is too short to be a time; leave this measurement out")
        if self._fitted is not None:
            self._errors.append(abs(float(self._fitted @ per_second) - 1.0))
        self._gram = self._keep * self._gram + np.outer(per_second, per_second)
        self._sums = self._keep * self._sums + per_second
        self._fitted = _nonnegative(self._gram, self._sums)

    @property
    def median_error(self) -> float | None:
        """Median of ``|predicted / measured - 1|``, each predicted before it was learnt; None before the second time.

        Of the last 1,000 times. Near 0: what a lane takes is well predicted; above about 0.1 the times depend on more
        than on what is computed, and balancing by these coefficients will not help much.
        """
        return statistics.median(self._errors) if self._errors else None

    def coefficients(self) -> dict[str, int]:
        """The coefficients of a `CalibratedCost`, in zeptoseconds, for a decision.

        Raises:
            PlanError: nothing was observed.
        """
        if self._fitted is None:
            raise PlanError("coefficients: no time has been observed; call observe() first")
        return {
            name: round(value * _ZEPTOSECONDS)
            for name, value in zip(FEATURES, self._fitted.tolist(), strict=True)
        }


def _nonnegative(gram: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """The non-negative least-squares solution: of those of all subsets of the features, the best without a negative.

    Args:
        gram: ``float64[k, k]``.
        sums: ``float64[k]``.

    Returns:
        ``float64[k]``.
    """
    scale = np.sqrt(np.diag(gram))
    seen = scale > 0
    scale = np.where(seen, scale, 1.0)
    identity = np.eye(len(sums))
    gram = gram / np.outer(scale, scale) + _RIDGE * identity
    # One solve per subset, in a batch: features that are left out solve 1 · x = 0.
    subset = (np.arange(2 ** len(sums))[:, None] >> np.arange(len(sums)) & 1).astype(bool) & seen
    both = subset[:, :, None] & subset[:, None, :]
    target = np.where(subset, sums / scale, 0.0)
    solution = np.linalg.solve(np.where(both, gram, identity), target[:, :, None])[:, :, 0]
    loss = np.einsum("si,ij,sj->s", solution, gram, solution) - 2.0 * (solution * target).sum(axis=1)
    best = int(np.argmin(np.where((solution >= 0).all(axis=1), loss, np.inf)))
    found: np.ndarray = solution[best] / scale
    return found
