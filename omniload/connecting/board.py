"""What ranks tell each other outside of their groups: what one of them met before these are made, and who is lost.

It lies in the key-value store that every job with a process group has. Whoever reads it depends on no other rank than
the one that the store lives with, which is rank 0 as a rule.
"""

from __future__ import annotations

import itertools
import json
from datetime import timedelta

from torch.distributed.distributed_c10d import _get_default_store  # there is no public way to the store

from omniload.connecting.messages import error_from_json, error_to_json
from omniload.errors import LoaderTimeout

_LOOK_S = 2.0
"""How long it is waited for whoever knows which rank is lost."""
_numbers = itertools.count()
"""Of the boards of this process: `connect` is a collective call, so all ranks have the same ones."""


class Board:
    """Of one call of `connect`.

    Args:
        rank: this rank.
        num_ranks: of the job.
    """

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._rank = rank
        self._num_ranks = num_ranks
        self._store = _get_default_store()
        self._prefix = f"omniload/connect/{next(_numbers)}"

    def meet(self, met: Exception | None, timeout_s: float) -> None:
        """Wait until every rank is here; raise what this one met, or else what another did.

        Args:
            met: an error that keeps this rank from what all are about to do together.
            timeout_s: limit of the wait.

        Raises:
            LoaderTimeout: a rank did not come; names it.
        """
        if met is not None:
            self._store.compare_set(f"{self._prefix}/met", "", json.dumps(error_to_json(met)))
        self._store.set(f"{self._prefix}/here/{self._rank}", "")
        if self._store.add(f"{self._prefix}/num_here", 1) == self._num_ranks:
            self._store.set(f"{self._prefix}/all_here", "")
        try:
            self._store.wait([f"{self._prefix}/all_here"], timedelta(seconds=timeout_s))
        except RuntimeError:  # torch's own errors are of this kind
            here = (self._store.check([f"{self._prefix}/here/{rank}"]) for rank in range(self._num_ranks))
            missing = [rank for rank, is_here in enumerate(here) if not is_here]
            raise LoaderTimeout(
                f"connect: rank {', '.join(map(str, missing[:8]))} did not come within {timeout_s:g} s; call connect on"
                " every rank of the job, at the same point"
            ) from None
        if met is not None:
            raise met
        if self._store.check([f"{self._prefix}/met"]):
            raise error_from_json(json.loads(self._store.get(f"{self._prefix}/met")))

    def say_lost(self, source: int, lost: int) -> None:
        """Say which rank the source of a circle takes for lost."""
        try:
            self._store.set(f"{self._prefix}/lost/{source}", str(lost))
        except RuntimeError:  # the rank with the store is gone, which the others see as well
            return

    def lost(self, source: int) -> int | None:
        """Which rank is lost, as the source of a circle says; None if it says nothing."""
        try:
            self._store.wait([f"{self._prefix}/lost/{source}"], timedelta(seconds=_LOOK_S))
            return int(self._store.get(f"{self._prefix}/lost/{source}"))
        except RuntimeError:
            return None
