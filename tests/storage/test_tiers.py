"""Trees that move from tier to tier and can be read all the while."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from storage import (
    AlreadyExists,
    BadRequest,
    Corrupt,
    NotFound,
    Store,
    Transient,
    Unsupported,
    drain,
    start_recording,
    stop_recording,
)
from storage.backend import FileStat
from storage.tiers import Tier, Tiers
from storage.transaction import Transaction
from storage.tree import MARKER, CommittedTree, check_tree, verify_tree
from storage.tree_view import TreeView
from tests.storage.conformance import content
from tests.storage.seaweed import S3Server

FILES = {"a": content(1000), "b/c": content(100_000, 1), "b/empty": b""}


def fill(store: Store, files: Mapping[str, bytes] = FILES) -> str:
    """Commit a tree and give its attempt."""
    with Transaction(store) as transaction:
        for path, data in files.items():
            with transaction.writer(path, header_bytes=min(8, len(data))) as writer:
                writer.write(data[8:])
                writer.set_header(data[:8])
    return transaction.attempt


def contents(store: Store) -> dict[str, bytes]:
    """Every file of the tree committed at a store."""
    tree = CommittedTree.open(store)
    return {path: tree.read(path) for path in tree.files}


@pytest.fixture(params=["local", "s3"])
def tiers(request: pytest.FixtureRequest, tmp_path: Path) -> Tiers:
    """Three empty tiers; those behind the first are on one kind of storage."""
    if request.param == "local":
        remote, cold = Store(tmp_path / "remote"), Store(tmp_path / "cold")
    else:
        server: S3Server = request.getfixturevalue("s3")
        behind = Store(f"s3://{server.bucket}/tiers/{tmp_path.name}", server.storage_options)
        remote, cold = behind.sub("remote"), behind.sub("cold")
    return Tiers(local=Store(tmp_path / "local"), remote=remote, cold=cold)


@pytest.fixture
def plain(tmp_path: Path) -> Tiers:
    """Three empty tiers on this machine."""
    return Tiers(
        local=Store(tmp_path / "local"), remote=Store(tmp_path / "remote"), cold=Store(tmp_path / "cold")
    )


# -- the way of a tree


def test_a_tree_is_read_from_wherever_it_is(tiers: Tiers) -> None:
    with pytest.raises(NotFound, match="committed in no tier"):
        tiers.open("t")
    attempt = fill(tiers.local.sub("t"))
    assert tiers.committed("t") == {Tier.LOCAL: attempt}
    assert tiers.undrained() == ["t"]
    assert contents(tiers.open("t")) == FILES

    tiers.drain("t")
    assert tiers.committed("t") == {Tier.LOCAL: attempt, Tier.REMOTE: attempt}
    assert tiers.undrained() == []
    assert tiers.open("t").url == tiers.local.sub("t").url
    verify_tree(tiers.stores[Tier.REMOTE].sub("t"))

    tiers.evict("t")
    assert tiers.committed("t") == {Tier.REMOTE: attempt}
    assert tiers.local.list() == []
    assert tiers.open("t").url == tiers.stores[Tier.REMOTE].sub("t").url
    assert contents(tiers.open("t")) == FILES

    tiers.cool_down("t")
    assert tiers.committed("t") == {Tier.COLD: attempt}
    assert tiers.stores[Tier.REMOTE].list() == []
    assert contents(tiers.open("t")) == FILES


def test_a_view_goes_on_while_its_tree_moves(tiers: Tiers) -> None:
    fill(tiers.local.sub("t"))
    view = tiers.open("t")
    below = CommittedTree.open(view).data
    everything = [one.path for one in view.list()]
    moves: list[Callable[[str], None]] = [tiers.drain, tiers.evict, tiers.cool_down]
    for move in moves:
        move("t")
        assert contents(view) == FILES
        assert [one.path for one in view.list()] == everything
        assert view.list_dirs() == ["data"]
        assert view.exists(MARKER)
        assert below.read("a") == FILES["a"]
        assert [bytes(one) for one in below.read_ranges([("b/c", 5, 50), ("a", 0, 7)])] == [
            FILES["b/c"][5:50],
            FILES["a"][:7],
        ]
        with below.open("b/c") as file:
            assert file.read() == FILES["b/c"]
        assert below.stat("a").size == 1000
        assert [one.path for one in below.list("b")] == ["b/c", "b/empty"]
        assert not below.exists("z")
        verify_tree(view)


def test_every_move_can_be_repeated(tiers: Tiers) -> None:
    attempt = fill(tiers.local.sub("t"))
    tiers.drain("t")
    tiers.drain("t")
    assert tiers.committed("t") == {Tier.LOCAL: attempt, Tier.REMOTE: attempt}
    tiers.cool_down("t")
    tiers.cool_down("t")
    assert tiers.committed("t") == {Tier.LOCAL: attempt, Tier.COLD: attempt}
    tiers.drain("t")
    assert tiers.committed("t") == {Tier.LOCAL: attempt, Tier.COLD: attempt}, (
        "it is not brought back to remote"
    )
    tiers.evict("t")
    with pytest.raises(NotFound):
        tiers.evict("t")
    assert contents(tiers.open("t")) == FILES


def test_without_a_cold_tier(tmp_path: Path) -> None:
    tiers = Tiers(local=Store(tmp_path / "local"), remote=Store(tmp_path / "remote"))
    fill(tiers.local.sub("t"))
    tiers.drain("t")
    tiers.evict("t")
    assert contents(tiers.open("t")) == FILES
    assert tiers.names(Tier.COLD) == []
    with pytest.raises(BadRequest, match="no cold tier"):
        tiers.cool_down("t")


@pytest.mark.parametrize("name", ["", "../t", "/t"])
def test_names_cannot_leave_the_tiers(plain: Tiers, name: str) -> None:
    for call in (plain.committed, plain.open, plain.drain, plain.evict, plain.cool_down):
        with pytest.raises(BadRequest):
            call(name)


# -- which copy is read


def test_a_damaged_local_copy_is_passed_over(plain: Tiers, tmp_path: Path) -> None:
    attempt = fill(plain.local.sub("t"))
    plain.drain("t")
    (tmp_path / "local/t/data" / attempt / "b/c").write_bytes(FILES["b/c"][:-1])
    view = plain.open("t")
    assert view.url == plain.stores[Tier.REMOTE].sub("t").url
    assert contents(view) == FILES


def test_how_much_is_verified_is_the_callers_choice(plain: Tiers, tmp_path: Path) -> None:
    attempt = fill(plain.local.sub("t"))
    plain.drain("t")
    (tmp_path / "local/t/data" / attempt / "a").write_bytes(bytes(1000))
    assert plain.open("t").url == plain.local.sub("t").url, "sizes agree"
    strict = Tiers(local=plain.local, remote=plain.stores[Tier.REMOTE], verify=verify_tree)
    assert contents(strict.open("t")) == FILES


def test_a_damaged_local_marker_commits_nothing(plain: Tiers, tmp_path: Path) -> None:
    fill(plain.local.sub("t"))
    (tmp_path / "local/t" / MARKER).write_bytes(b"{")
    with pytest.raises(Corrupt) as caught:
        plain.open("t")
    assert any("local: " in note for note in caught.value.__notes__)
    assert plain.committed("t") == {}
    attempt = fill(plain.stores[Tier.REMOTE].sub("t"))
    assert plain.committed("t") == {Tier.REMOTE: attempt}
    assert contents(plain.open("t")) == FILES


def test_no_whole_copy_is_an_error_that_says_why(plain: Tiers, tmp_path: Path) -> None:
    attempt = fill(plain.local.sub("t"))
    (tmp_path / "local/t/data" / attempt / "a").unlink()
    with pytest.raises(Corrupt, match="no copy of attempt") as caught:
        plain.open("t")
    assert any("a: missing, but committed" in note for note in caught.value.__notes__)


def test_the_remote_tier_says_which_attempt_counts(plain: Tiers) -> None:
    fill(plain.local.sub("t"), {"a": b"stale"})
    fill(plain.stores[Tier.REMOTE].sub("t"))
    assert contents(plain.open("t")) == FILES
    with pytest.raises(AlreadyExists, match="is committed here, not"):
        plain.drain("t")
    assert plain.undrained() == ["t"]
    with pytest.raises(BadRequest, match="committed nowhere else"):
        plain.evict("t")


def test_a_copy_that_one_process_lacks_is_used_by_none(plain: Tiers) -> None:
    attempt = fill(plain.local.sub("t"))
    plain.drain("t")
    given: list[Mapping[Tier, str]] = []

    def agree(mine: Mapping[Tier, str]) -> Mapping[Tier, str]:
        given.append(mine)
        others = {Tier.REMOTE: attempt}  # another process has no local copy
        return dict(mine.items() & others.items())

    assert plain.open("t", agree=agree).url == plain.stores[Tier.REMOTE].sub("t").url
    assert given == [{Tier.LOCAL: attempt, Tier.REMOTE: attempt}]
    with pytest.raises(Corrupt, match="whole on every process"):
        plain.open("t", agree=lambda mine: {Tier.LOCAL: "0" * 32})


class _OutOfReach(Store):
    """A store whose server does not answer."""

    def stat(self, path: str) -> FileStat:
        raise Transient(path, "connection reset")

    def sub(self, path: str) -> Store:
        return _OutOfReach(f"{self.url}/{path}")


def test_a_tier_that_cannot_be_asked_is_an_error_and_not_a_no(tmp_path: Path) -> None:
    tiers = Tiers(local=Store(tmp_path / "local"), remote=_OutOfReach(tmp_path / "remote"))
    fill(tiers.local.sub("t"))
    for call in (tiers.committed, tiers.open, tiers.drain, tiers.evict):
        with pytest.raises(Transient, match="connection reset"):
            call("t")
    assert contents(tiers.local.sub("t")) == FILES


# -- views


def test_a_view_is_a_store_for_reading_only(plain: Tiers) -> None:
    attempt = fill(plain.local.sub("t"))
    view = plain.open("t")
    refused: list[Callable[[], object]] = [
        lambda: view.write("x", b""),
        lambda: view.create("x", b""),
        lambda: view.writer("x"),
        lambda: view.delete(MARKER),
        lambda: view.delete_tree("data"),
    ]
    for call in refused:
        with pytest.raises(Unsupported, match="read-only"):
            call()
    assert view.local_path("x") is None
    assert view.read(MARKER) == plain.local.read(f"t/{MARKER}")
    assert view.stat(MARKER).size == len(view.read(MARKER))
    assert [one.path for one in view.list()] == [MARKER, *(f"data/{attempt}/{path}" for path in FILES)]
    assert [one.path for one in view.sub("data").list()] == [f"{attempt}/{path}" for path in FILES]
    with pytest.raises(NotFound, match="local/t/nothing"):
        view.read("nothing")


def test_a_view_replaces_all_that_would_need_a_backend() -> None:
    public = {name for name in vars(Store) if not name.startswith("_")}
    assert public - set(vars(TreeView)) == {"exists"}, "exists is made of stat"


def test_a_copy_out_of_reach_is_not_taken_for_an_absent_object(tmp_path: Path) -> None:
    far, near = _OutOfReach(tmp_path / "x"), Store(tmp_path / "y")
    view = TreeView([near, far, far], MARKER, b"{}")
    with pytest.raises(Transient) as caught:
        view.exists("a")
    assert caught.value.__notes__ == ["another copy: a: connection reset"]
    near.write("a", b"1")
    assert view.exists("a")


# -- draining


def test_a_drain_goes_on_where_it_was_stopped(tiers: Tiers) -> None:
    fill(tiers.local.sub("t"))

    def stop() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        tiers.drain("t", before_commit=stop)
    remote = tiers.stores[Tier.REMOTE]
    assert len(remote.list("t")) == 3
    assert tiers.committed("t").keys() == {Tier.LOCAL}
    remote.delete(next(one.path for one in remote.list("t") if one.path.endswith("/a")))
    start_recording()
    try:
        tiers.drain("t")
        [copied] = [one.attributes for one in drain() if one.name == "storage.copy_tree"]
    finally:
        stop_recording()
    assert (copied["num_files"], copied["num_bytes"]) == (1, 1000)
    assert contents(remote.sub("t")) == FILES


@pytest.mark.parametrize("data", [FILES["a"][:-1], bytes(1000), None])
@pytest.mark.parametrize("verify", [check_tree, lambda store: None])
def test_a_damaged_tree_is_not_passed_on(
    tmp_path: Path, data: bytes | None, verify: Callable[[Store], None]
) -> None:
    tiers = Tiers(local=Store(tmp_path / "local"), remote=Store(tmp_path / "remote"), verify=verify)
    attempt = fill(tiers.local.sub("t"))
    damaged = tmp_path / "local/t/data" / attempt / "a"
    if data is None:
        damaged.unlink()
    else:
        damaged.write_bytes(data)
    with pytest.raises(Corrupt, match=f"{attempt}/a: "):
        tiers.drain("t")
    assert tiers.committed("t").keys() == {Tier.LOCAL}
    assert f"t/data/{attempt}/a" not in [one.path for one in tiers.stores[Tier.REMOTE].list()]


def test_large_files_are_copied_in_parts(tiers: Tiers) -> None:
    data = content(70 << 20)
    fill(tiers.local.sub("t"), {"large": data})
    tiers.drain("t")
    remote = tiers.stores[Tier.REMOTE].sub("t")
    verify_tree(remote)
    assert CommittedTree.open(remote).read("large") == data


def test_processes_with_local_tiers_of_their_own_drain_one_tree(tmp_path: Path) -> None:
    remote = Store(tmp_path / "remote")
    stores = [Store(tmp_path / f"local-{rank}") for rank in range(2)]
    with Transaction(remote.sub("made-here-to-have-a-marker")) as first:
        first.write("rank-0", b"zero")
        first.write("rank-1", b"one")
    marker = remote.read(f"made-here-to-have-a-marker/{MARKER}")
    for rank, store in enumerate(stores):
        store.write(f"t/data/{first.attempt}/rank-{rank}", [b"zero", b"one"][rank])
        store.write(f"t/{MARKER}", marker)
    mine = Tiers(local=stores[0], remote=remote, verify=lambda store: None)
    other = Tiers(local=stores[1], remote=remote, verify=lambda store: None)
    with pytest.raises(Corrupt, match="rank-1: no bytes"):
        mine.drain("t")
    mine.drain("t", before_commit=lambda: other.drain("t"))
    assert contents(remote.sub("t")) == {"rank-0": b"zero", "rank-1": b"one"}


# -- retention


def names_in(tiers: Tiers) -> dict[Tier, list[str]]:
    return {tier: tiers.names(tier) for tier in Tier}


def test_retention_counts_trees_and_moves_them_on(tiers: Tiers) -> None:
    names = [f"step-{step:08d}" for step in (1, 2, 3, 10, 20)]
    for name in names:
        fill(tiers.local.sub(name), {"x": name.encode()})
        tiers.drain(name)
    assert tiers.retain_local(2) == names[:3]
    assert tiers.retain_local(2) == []
    assert tiers.retain_remote(4) == names[:1]
    assert names_in(tiers) == {Tier.LOCAL: names[3:], Tier.REMOTE: names[1:], Tier.COLD: names[:1]}
    assert [contents(tiers.open(name)) for name in names] == [{"x": name.encode()} for name in names]
    assert tiers.retain_local(0) == names[3:]
    with pytest.raises(BadRequest, match="at least 0"):
        tiers.retain_local(-1)


def test_retention_never_removes_the_only_copy(
    plain: Tiers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = ["1-drained", "2-only-here", "3-damaged-there", "4-marker-damaged-there", "5-other-attempt-there"]
    attempts = {name: fill(plain.local.sub(name)) for name in names}
    for name in ("1-drained", "3-damaged-there", "4-marker-damaged-there"):
        plain.drain(name)
    fill(plain.stores[Tier.REMOTE].sub("5-other-attempt-there"))
    (tmp_path / "remote/3-damaged-there/data" / attempts["3-damaged-there"] / "a").unlink()
    (tmp_path / "remote/4-marker-damaged-there" / MARKER).write_bytes(b"[]")
    with caplog.at_level(logging.WARNING, logger="storage"):
        assert plain.retain_local(0) == ["1-drained"]
    assert plain.names(Tier.LOCAL) == names[1:]
    for name in names[1:]:
        assert contents(plain.local.sub(name)) == FILES
        assert any(f"keeps {name}" in record.getMessage() for record in caplog.records)


def test_cooling_down_keeps_the_source_if_the_copy_is_not_whole(plain: Tiers, tmp_path: Path) -> None:
    attempt = fill(plain.local.sub("t"))
    plain.drain("t")
    plain.evict("t")
    store = plain.stores[Tier.COLD]
    store.write(f"t/{MARKER}", plain.stores[Tier.REMOTE].read(f"t/{MARKER}"))
    with pytest.raises(Corrupt, match="missing, but committed"):
        plain.cool_down("t")
    assert plain.committed("t")[Tier.REMOTE] == attempt
    assert contents(plain.open("t")) == FILES


def test_retention_spares_what_is_under_way(plain: Tiers) -> None:
    under_way = Transaction(plain.local.sub("new"))
    under_way.write("a", b"1")
    fill(plain.local.sub("old"))

    def look() -> None:
        assert plain.retain_local(0) == []
        assert plain.retain_remote(0) == []

    plain.drain("old", before_commit=look)
    assert contents(plain.stores[Tier.REMOTE].sub("old")) == FILES
    assert plain.retain_local(0) == ["old"]
    under_way.commit()
    assert contents(plain.open("new")) == {"a": b"1"}


# -- checkpoints


def test_checkpoints_go_through_the_tiers(plain: Tiers, tmp_path: Path) -> None:
    import torch

    import checkpoint
    from checkpoint.stored import StoredCheckpoint

    tiers = Tiers(
        local=plain.local,
        remote=plain.stores[Tier.REMOTE],
        cold=plain.stores[Tier.COLD],
        marker="manifest.json",
        verify=lambda store: StoredCheckpoint.open(store).check_files(),
    )
    name = "step-00000100"
    saved = torch.arange(10_000, dtype=torch.float32)
    checkpoint.save(tiers.local.sub(name), {"extra": {"tensor": saved, "step": 100}}, step=100)

    def load() -> None:
        loaded = {"tensor": torch.zeros(10_000), "step": 0}
        checkpoint.load(tiers.open(name), {"extra": loaded})
        assert loaded["step"] == 100
        assert torch.equal(loaded["tensor"], saved)  # type: ignore[arg-type]

    load()
    tiers.drain(name)
    payload = next(path for path in (tmp_path / "local" / name).rglob("*.safetensors"))
    payload.write_bytes(payload.read_bytes()[:-1])
    load()
    tiers.retain_local(0)
    load()
    tiers.retain_remote(0)
    assert tiers.committed(name).keys() == {Tier.COLD}
    load()
