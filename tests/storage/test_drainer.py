"""Draining in the background."""

import threading
from pathlib import Path

import pytest

from storage import BadRequest, NotFound, Stalled, Store
from storage.drainer import Drainer
from storage.tiers import Tier, Tiers
from storage.tree_copy import Stopped
from tests.storage.test_tiers import FILES, contents, fill

TIMEOUT_S = 60


@pytest.fixture
def tiers(tmp_path: Path) -> Tiers:
    """Two empty tiers."""
    return Tiers(local=Store(tmp_path / "local"), remote=Store(tmp_path / "remote"))


def test_trees_are_drained_in_the_order_given(tiers: Tiers) -> None:
    order: list[str] = []
    names = ["c", "a", "b"]
    with Drainer(tiers) as drainer:
        for name in names:
            fill(tiers.local.sub(name))
            drainer.submit(name, before_commit=lambda name=name: order.append(name))
        drainer.wait(TIMEOUT_S)
        assert order == names
        assert tiers.names(Tier.REMOTE) == sorted(names)
        for name in names:
            tiers.evict(name)
            assert contents(tiers.open(name)) == FILES


def test_a_failure_is_raised_once_and_stops_nothing_else(tiers: Tiers) -> None:
    fill(tiers.local.sub("good"))
    with Drainer(tiers) as drainer:
        bad = drainer.submit("missing")
        good = drainer.submit("good")
        with pytest.raises(ExceptionGroup, match=r"1 of .* not drained") as caught:
            drainer.wait(TIMEOUT_S)
        [error] = caught.value.exceptions
        assert isinstance(error, NotFound)
        assert error.__notes__ == ["while draining missing"]
        drainer.wait(TIMEOUT_S)
        assert good.result(TIMEOUT_S) is None
        with pytest.raises(NotFound):
            bad.result(TIMEOUT_S)


def test_waiting_has_an_end_that_names_the_trees(tiers: Tiers) -> None:
    fill(tiers.local.sub("slow"))
    go_on = threading.Event()
    with Drainer(tiers) as drainer:
        first = drainer.submit("slow", before_commit=lambda: _require(go_on.wait(TIMEOUT_S)))
        assert drainer.submit("slow") is first, "it is waiting already"
        with pytest.raises(Stalled, match="not drained within 0 s: slow"):
            drainer.wait(0)
        go_on.set()
        drainer.wait(TIMEOUT_S)
    assert tiers.names(Tier.REMOTE) == ["slow"]


def test_closing_stops_the_drain_and_a_new_drainer_resumes(tiers: Tiers) -> None:
    for name in ("first", "second"):
        fill(tiers.local.sub(name))
    drainer = Drainer(tiers)
    under_way, closing = threading.Event(), threading.Event()

    def hold() -> None:
        under_way.set()
        _require(closing.wait(TIMEOUT_S))

    first = drainer.submit("first", before_commit=hold)
    second = drainer.submit("second")
    cancelled = drainer.submit("cancelled")
    assert cancelled.cancel()
    assert under_way.wait(TIMEOUT_S)
    threading.Timer(0.05, closing.set).start()
    drainer.close()
    drainer.close()
    assert first.result(TIMEOUT_S) is None
    assert isinstance(second.exception(TIMEOUT_S), Stopped)
    with pytest.raises(BadRequest, match="is closed"):
        drainer.submit("second")
    assert tiers.undrained() == ["second"]
    with Drainer(tiers) as again:
        assert again.resume() == ["second"]
        again.wait(TIMEOUT_S)
    assert tiers.undrained() == []


def test_a_drain_stops_between_parts_of_files(tiers: Tiers) -> None:
    fill(tiers.local.sub("t"))
    with pytest.raises(Stopped, match="asked to stop"):
        tiers.drain("t", stopping=lambda: True)
    assert tiers.committed("t").keys() == {Tier.LOCAL}
    tiers.drain("t")
    assert contents(tiers.stores[Tier.REMOTE].sub("t")) == FILES


def _require(done: bool) -> None:
    assert done, "nobody let the drain go on"
