"""Trees that live in several places: fast and small, durable and shared, cold and cheap.

::

                 drain                    cool down
    local ─────────────────► remote ─────────────────► cold
      │                        │
      └ evict: once committed  └ removed once the cold copy is
        at remote or cold        committed and verified

    open(name): the nearest copy that is verified, the others behind it

Each copy of a tree has its own marker, created last, so "committed at local" and "committed at remote" are different
facts, both read from storage and never from memory. Copies are removed only after another one was committed and
checked, marker first. So a process that dies at any point leaves at least one whole copy committed, and whoever calls
again goes on from there.
"""

import logging
from collections.abc import Callable, Mapping, Set
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from storage.errors import BadRequest, Corrupt, NotFound
from storage.paths import check_object
from storage.spans import span
from storage.store import Store
from storage.tree import MARKER, attempt_of, check_tree, read_marker, remove_attempt
from storage.tree_copy import copy_tree
from storage.tree_view import TreeView

__all__ = ["Tier", "Tiers"]

_logger = logging.getLogger("storage")


class Tier(StrEnum):
    """Places of copies, nearest first."""

    LOCAL = "local"
    REMOTE = "remote"
    COLD = "cold"


_ELSEWHERE: Final = {Tier.LOCAL: (Tier.REMOTE, Tier.COLD), Tier.REMOTE: (Tier.COLD,)}
"""Where a tree must be committed too before its copy in a tier is removed."""

Agree = Callable[[Mapping[Tier, str]], Mapping[Tier, str]]
"""Given tier to attempt as one process verified them, those that all processes gave; called by all of them."""


class Tiers:
    """Named trees over two or three stores.

    A name is one directory, such as ``step-00000100``, and the same in every store. Trees are written to ``local``
    (``Transaction(tiers.local.sub(name))``, or ``checkpoint.save`` to that store) and reach the other tiers by
    ``drain`` and ``cool_down``. Names are ordered by their bytes, oldest first; clocks play no part.

    What removes copies (``evict``, ``cool_down``, ``retain_*``) is for one process at a time, and not for a name that
    is being written anew. Everything else may run anywhere at any time.

    Args:
        local: The fast tier.
        remote: The durable tier; its word on which attempt a name means comes first.
        cold: Where ``cool_down`` moves trees to, if anywhere.
        marker: Name of the marker: ``manifest.json`` for checkpoints.
        verify: Raises an ``OSError`` or ``ValueError`` unless the tree committed at a store holds all that this
            process needs of it. The default compares a listing with the marker; ``verify_tree`` reads every byte.
            Trees with a marker of their own need a function of their own.
    """

    def __init__(
        self,
        *,
        local: Store,
        remote: Store,
        cold: Store | None = None,
        marker: str = MARKER,
        verify: Callable[[Store], None] = check_tree,
    ) -> None:
        self._stores = {Tier.LOCAL: local, Tier.REMOTE: remote}
        if cold is not None:
            self._stores[Tier.COLD] = cold
        self._marker = check_object(marker)
        self._verify = verify

    def __repr__(self) -> str:
        return f"Tiers({', '.join(f'{tier}={store.url!r}' for tier, store in self._stores.items())})"

    @property
    def stores(self) -> Mapping[Tier, Store]:
        """The store of each tier, nearest first."""
        return MappingProxyType(self._stores)

    @property
    def local(self) -> Store:
        """Where new trees are written to."""
        return self._stores[Tier.LOCAL]

    def committed(self, name: str) -> dict[Tier, str]:
        """Where a tree is committed, and which attempt, nearest first; empty if nowhere.

        A damaged marker commits nothing. A tier that cannot be asked is an error, never a "no".
        """
        return {tier: attempt for tier, (attempt, _) in self._markers(name, []).items()}

    def names(self, tier: Tier) -> list[str]:
        """Trees committed in one tier, oldest first; none if there is no such tier."""
        store = self._stores.get(tier)
        if store is None:
            return []
        return [name for name in store.list_dirs() if store.exists(f"{name}/{self._marker}")]

    def open(self, name: str, *, agree: Agree = lambda mine: mine) -> TreeView:
        """A tree as a read-only store, wherever it is now and wherever it moves while it is read.

        It is read from the nearest copy that passes ``verify``, of the attempt that the durable tiers hold; only a
        tree that is committed at local alone is taken from there on its own word.

        Args:
            name: Of the tree.
            agree: For a job of several processes, to give what all of them verified; each calls ``open``. A copy that
                only some of them can read is then used by none.

        Raises:
            NotFound: It is committed nowhere.
            Corrupt: No copy passes; a note for each says why.
        """
        with span("storage.tiers.open", path=f"{self._stores[Tier.REMOTE].url}/{name}") as current:
            problems: list[str] = []
            markers = self._markers(name, problems)
            mine = {tier: markers[tier][0] for tier in markers if self._passes(tier, name, problems)}
            agreed = agree(mine)
            order = (Tier.REMOTE, Tier.COLD, Tier.LOCAL)
            truth = next((markers[tier][0] for tier in order if tier in markers), None)
            if truth is None and not problems:
                raise NotFound(f"{self._stores[Tier.REMOTE].url}/{name}", "committed in no tier")
            usable = [tier for tier in mine if mine[tier] == agreed.get(tier) == truth]
            if not usable:
                error = Corrupt(
                    f"{self._stores[Tier.REMOTE].url}/{name}",
                    f"no copy of attempt {truth} is whole on every process; looked at: {', '.join(self._stores)}",
                )
                for problem in problems:
                    error.add_note(problem)
                raise error
            current.annotate(tier=str(usable[0]))
            # A tier without a commit comes last: the tree may move there while the view is in use.
            behind = [tier for tier in self._stores if tier not in markers]
            copies = [self._stores[tier].sub(name) for tier in usable + behind]
            return TreeView(copies, self._marker, markers[usable[0]][1])

    def drain(
        self,
        name: str,
        *,
        before_commit: Callable[[], None] = lambda: None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        """Copy a tree from local to remote and commit it there; repeated, it goes on where it was stopped.

        Args:
            name: Of the tree.
            before_commit: Called when the files of this process are at remote. In a job whose processes have local
                tiers of their own, wait there for all of them, and raise if one failed.
            stopping: Asked between parts of files; True ends the copy with ``Stopped``.

        Raises:
            NotFound: It is not committed at local.
            AlreadyExists: Another attempt is committed at remote.
            Corrupt: The local copy is not what was committed; nothing becomes visible.
        """
        committed = self.committed(name)
        if Tier.COLD in committed and committed[Tier.COLD] == committed.get(Tier.LOCAL):
            return  # it was at remote, and has moved on
        source, target = (self._stores[tier].sub(name) for tier in (Tier.LOCAL, Tier.REMOTE))
        if Tier.LOCAL in committed:
            self._verify(source)
        with span("storage.drain", path=target.url):
            copy_tree(source, target, marker=self._marker, before_commit=before_commit, stopping=stopping)

    def undrained(self) -> list[str]:
        """Trees committed at local whose attempt is committed nowhere else, oldest first."""
        found = []
        for name in self.names(Tier.LOCAL):
            committed = self.committed(name)
            if Tier.LOCAL in committed and not self._is_elsewhere(Tier.LOCAL, committed):
                found.append(name)
        return found

    def evict(self, name: str) -> None:
        """Remove the local copy of a tree.

        Raises:
            NotFound: There is none.
            BadRequest: The same attempt is committed nowhere else.
            Corrupt: It is, but that copy does not pass ``verify``.
        """
        self._remove_copy(name, Tier.LOCAL)

    def cool_down(self, name: str) -> None:
        """Move a tree from remote to cold; repeated, it goes on where it was stopped.

        Raises:
            BadRequest: There is no cold tier.
            NotFound: The tree is committed neither at remote nor at cold.
            AlreadyExists: Another attempt is committed at cold.
            Corrupt: The copy at cold does not pass ``verify``, or that at remote is damaged; nothing is removed.
        """
        if Tier.COLD not in self._stores:
            raise BadRequest(f"{self}: no cold tier: give one as cold=Store(url)")
        source, target = (self._stores[tier].sub(name) for tier in (Tier.REMOTE, Tier.COLD))
        with span("storage.cool_down", path=target.url):
            committed = self.committed(name)
            if Tier.REMOTE not in committed and Tier.COLD in committed:
                remove_attempt(source, committed[Tier.COLD])  # what a killed process did not get to
                return
            copy_tree(source, target, marker=self._marker)
            self._remove_copy(name, Tier.REMOTE)

    def retain_local(self, keep_last: int) -> list[str]:
        """Evict trees from local beyond the newest ``keep_last``, but none that is not safe elsewhere.

        Returns:
            What was evicted. What could not be is left, with a warning in the log.
        """
        return self._retain(Tier.LOCAL, keep_last, self.evict)

    def retain_remote(self, keep_last: int) -> list[str]:
        """Cool down trees at remote beyond the newest ``keep_last``.

        Returns:
            What was moved. What could not be is left, with a warning in the log.
        """
        return self._retain(Tier.REMOTE, keep_last, self.cool_down)

    def _retain(self, tier: Tier, keep_last: int, remove: Callable[[str], None]) -> list[str]:
        if keep_last < 0:
            raise BadRequest(f"keep_last is {keep_last}: keep at least 0 trees")
        removed = []
        names = self.names(tier)
        for name in names[: max(0, len(names) - keep_last)]:
            try:
                remove(name)
                removed.append(name)
            except (OSError, ValueError) as error:
                _logger.warning("%s keeps %s: %s", tier, name, error)
        self._sweep(tier, set(names))
        return removed

    def _sweep(self, tier: Tier, committed_here: Set[str]) -> None:
        """Remove files of trees whose marker is gone already: a removal was interrupted."""
        store = self._stores[tier]
        for name in store.list_dirs():
            if name in committed_here:
                continue
            committed = self.committed(name)
            # Files without a marker are a transaction or a drain under way, unless the tier behind has the same
            # attempt: there it has come through here.
            for attempt in {committed[other] for other in _ELSEWHERE[tier] if other in committed}:
                if tier not in committed:
                    remove_attempt(store.sub(name), attempt)

    def _remove_copy(self, name: str, tier: Tier) -> None:
        committed = self.committed(name)
        store = self._stores[tier].sub(name)
        if tier not in committed:
            raise NotFound(f"{store.url}/{self._marker}", "no marker, so nothing is committed here")
        other = self._is_elsewhere(tier, committed)
        if other is None:
            raise BadRequest(
                f"{store.url}: attempt {committed[tier]} is committed nowhere else: copy it first"
            )
        self._verify(self._stores[other].sub(name))
        store.delete(self._marker)  # from here on it does not exist here, however far the rest gets
        remove_attempt(store, committed[tier])

    def _is_elsewhere(self, tier: Tier, committed: Mapping[Tier, str]) -> Tier | None:
        """Another tier that vouches for the attempt a tier has, if one does."""
        return next(
            (other for other in _ELSEWHERE[tier] if committed.get(other) == committed[tier]),
            None,
        )

    def _markers(self, name: str, problems: list[str]) -> dict[Tier, tuple[str, bytes]]:
        """Attempt and marker by tier, nearest first; what is wrong with the others is added to ``problems``."""
        check_object(name)
        found = {}
        for tier, store in self._stores.items():
            try:
                content = read_marker(store.sub(name), self._marker)
                if content is not None:
                    found[tier] = attempt_of(content, f"{store.url}/{name}/{self._marker}"), content
            except Corrupt as error:
                problems.append(f"{tier}: {error}")
        return found

    def _passes(self, tier: Tier, name: str, problems: list[str]) -> bool:
        try:
            self._verify(self._stores[tier].sub(name))
        except (OSError, ValueError) as error:  # what storage and formats raise; anything else is a bug
            problems.append(f"{tier}: {error}")
            return False
        return True
