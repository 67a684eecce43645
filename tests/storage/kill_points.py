"""Processes killed at every point of an operation on trees, or at random ones; run as a program of its own.

``python -m tests.storage.kill_points SCENARIO ARGUMENTS`` forks one child for each kill, which costs milliseconds, and
prints as JSON what happened. The program itself never starts a thread, so that forking it is safe.

On a local file system the points are all calls that change the name of a file or remove a directory (create, rename,
link, unlink, rmdir), told by the interpreter's audit events: between two of them nothing becomes visible or is lost.
How many directories have to be made depends on which thread comes first, so that mkdir is not counted.
"""

import itertools
import json
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from storage.errors import AlreadyExists, NotFound
from storage.store import Store
from storage.tiers import Tier, Tiers
from storage.transaction import Transaction, remove_uncommitted
from storage.tree import CommittedTree, verify_tree

FILES = {"a": b"a" * 1000, "b/c": b"c" * 70_000, "b/d": b"", "e/f/g": b"g"}
_CHANGES = ("os.rename", "os.link", "os.remove", "os.rmdir")
_KILLED = -signal.SIGKILL


def fill(store: Store) -> None:
    """Commit a tree."""
    with Transaction(store) as transaction:
        for path, data in FILES.items():
            with transaction.writer(path, header_bytes=min(4, len(data))) as writer:
                writer.write(data[4:])
                writer.set_header(data[:4])


def is_whole(store: Store) -> bool:
    """Whether a tree is committed; if one is, it must be whole."""
    try:
        tree = CommittedTree.open(store)
    except NotFound:
        return False
    tree.verify()
    assert {path: tree.read(path) for path in tree.files} == FILES
    return True


class TransactionScenario:
    """Filling a directory."""

    def __init__(self, root: str) -> None:
        self.store = Store(root)

    def prepare(self) -> None:
        pass

    def run(self) -> None:
        fill(self.store.sub("tree"))

    def check(self) -> str:
        return "committed" if is_whole(self.store.sub("tree")) else "nothing"

    def recover(self) -> None:
        tree = self.store.sub("tree")
        try:
            fill(tree)
        except AlreadyExists:
            assert is_whole(tree)
        remove_uncommitted(tree)
        assert is_whole(tree)
        assert len(tree.list()) == len(FILES) + 1


class DrainScenario:
    """Local to remote."""

    def __init__(self, root: str) -> None:
        self.tiers = Tiers(
            local=Store(f"{root}/local"),
            remote=Store(f"{root}/remote"),
            cold=Store(f"{root}/cold"),
            verify=verify_tree,
        )
        self.stores = {tier: Store(f"{root}/{tier}/tree") for tier in Tier}

    def prepare(self) -> None:
        fill(self.stores[Tier.LOCAL])

    def run(self) -> None:
        self.tiers.drain("tree")

    def check(self) -> str:
        whole = [tier for tier, store in self.stores.items() if is_whole(store)]
        assert whole, "no copy is committed"
        view = self.tiers.open("tree")
        assert is_whole(view)
        assert [one.path for one in view.list()] == [one.path for one in self.stores[whole[-1]].list()]
        return "+".join(whole)

    def recover(self) -> None:
        self.run()
        assert self.check() == "local+remote"


class EvictScenario(DrainScenario):
    """Removing the local copy."""

    def prepare(self) -> None:
        super().prepare()
        self.tiers.drain("tree")

    def run(self) -> None:
        self.tiers.evict("tree")

    def recover(self) -> None:
        self.tiers.retain_local(0)
        assert self.check() == "remote"
        assert not Path(self.stores[Tier.LOCAL].url).exists()


class CoolDownScenario(EvictScenario):
    """Remote to cold."""

    def prepare(self) -> None:
        super().prepare()
        self.tiers.evict("tree")

    def run(self) -> None:
        self.tiers.cool_down("tree")

    def recover(self) -> None:
        self.run()
        assert self.check() == "cold"
        assert self.stores[Tier.REMOTE].list() == []
        assert not Path(self.stores[Tier.REMOTE].url).exists()


class RetainScenario(CoolDownScenario):
    """Remote to cold by retention, which also finishes what was interrupted."""

    def run(self) -> None:
        self.tiers.retain_remote(0)


SCENARIOS = {
    "transaction": TransactionScenario,
    "drain": DrainScenario,
    "evict": EvictScenario,
    "cool_down": CoolDownScenario,
    "retain": RetainScenario,
}


def at_every_point(scenario: str, root: str) -> dict[str, int]:
    """Kill before the first change, before the second, and so on until the operation ends first.

    Returns:
        How often the check after the kill found what.
    """
    found: Counter[str] = Counter()
    for point in range(1, 10_000):
        case = SCENARIOS[scenario](f"{root}/{point}")
        _in_child(case.prepare)
        code = _in_child(lambda case=case, point=point: _killed_before(point, case.run), may_die=True)
        found[_in_child_told(case.check)] += code == _KILLED
        _in_child(case.recover)
        if code == 0:
            return found
    raise AssertionError("the operation never ended")


def at_random_times(
    url: str, storage_options: dict[str, object], num_kills: int, seed: int
) -> dict[str, int]:
    """Kill a process that fills, drains, evicts and cools down one tree after another on remote stores."""
    import s3fs  # noqa: F401 - loaded once, before the forks

    def make() -> Tiers:
        local, remote, cold = (Store(f"{url}/{tier}", storage_options) for tier in Tier)
        return Tiers(local=local, remote=remote, cold=cold, verify=verify_tree)

    acknowledged, acknowledge = os.pipe()  # 14 bytes a tree, far from full

    def work(first: int) -> None:
        tiers = make()
        for number in range(first, first + 1000):
            name = f"tree-{number:08d}"
            fill(tiers.local.sub(name))
            os.write(acknowledge, f"{name}\n".encode())
            tiers.drain(name)
            tiers.retain_local(0)
            tiers.retain_remote(0)

    def check() -> str:
        tiers = make()
        names = sorted({name for store in tiers.stores.values() for name in store.list_dirs()})
        states = ["nothing"]
        for name in names[-3:]:  # those before were looked at after earlier kills
            whole = [tier for tier, store in tiers.stores.items() if is_whole(store.sub(name))]
            if whole:
                assert is_whole(tiers.open(name)), name
            states.append("+".join(whole) or "nothing")
        return states[-1]

    dice = random.Random(seed)
    found: Counter[str] = Counter()
    for kill in range(num_kills):
        pid = _fork(lambda kill=kill: work(kill * 1000))
        time.sleep(dice.uniform(0.1, 1.0))
        os.kill(pid, signal.SIGKILL)
        assert _await(pid) == _KILLED
        found[_in_child_told(check)] += 1

    def finish() -> str:
        tiers = make()
        names = tiers.undrained()
        for name in names:
            tiers.drain(name)
        tiers.retain_local(0)
        tiers.retain_remote(0)
        assert tiers.names(Tier.LOCAL) == tiers.names(Tier.REMOTE) == tiers.stores[Tier.REMOTE].list() == []
        whole = {name for name in tiers.names(Tier.COLD) if is_whole(tiers.stores[Tier.COLD].sub(name))}
        lost = set(os.read(acknowledged, 65_536).decode().split()) - whole
        assert not lost, lost
        return str(len(whole))

    try:
        return {**found, "whole at the end": int(_in_child_told(finish))}
    finally:
        os.close(acknowledged)
        os.close(acknowledge)


def _killed_before(point: int, call: Callable[[], None]) -> None:
    changes = itertools.count(1)  # next() is atomic, and several threads make changes

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        creates = event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_CREAT
        if (creates or event in _CHANGES) and next(changes) == point:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    call()


def _fork(call: Callable[[], object]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            call()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def _await(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _in_child(call: Callable[[], object], *, may_die: bool = False) -> int:
    code = _await(_fork(call))
    assert code == 0 or (may_die and code == _KILLED), code
    return code


def _in_child_told(call: Callable[[], str]) -> str:
    read, write = os.pipe()
    try:
        _in_child(lambda: os.write(write, call().encode()))
        os.close(write)
        return os.read(read, 1000).decode()
    finally:
        os.close(read)


if __name__ == "__main__":
    arguments = json.loads(sys.argv[2])
    if sys.argv[1] == "random":
        print(json.dumps(at_random_times(*arguments)))  # noqa: T201
    else:
        print(json.dumps(at_every_point(sys.argv[1], *arguments)))  # noqa: T201
