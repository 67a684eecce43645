"""`omniload ckpt gc`: what saves that never committed left behind, and nothing else."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

import checkpoint
from checkpoint.cli import app
from checkpoint.cli_leftovers import SILENCE_S, Leftover, find_leftovers, remove_leftover
from checkpoint.errors import NotACheckpoint
from storage import Store, Transaction
from tests.checkpoint.watched_store import WatchedStore

HIDDEN = ".storage-" + "0" * 32 + ".tmp"


class Killed(BaseException):
    """Ends a save as a kill does: nothing is cleaned up."""


def gc(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["gc", *map(str, arguments)])


def state(value: float = 1.0) -> dict[str, object]:
    return {"model": {"w": torch.full((8,), value)}, "extra": {"value": value}}


def attempts(place: Path) -> list[str]:
    return sorted(path.name for path in (place / "data").iterdir())


def killed_save(place: Path, at: str, *, overwrite: bool = False) -> str:
    """A save that ends at a step of its writing; its attempt."""

    def hook(here: str) -> None:
        if here == at:
            raise Killed

    before = attempts(place) if (place / "data").exists() else []
    with pytest.raises(Killed):
        checkpoint.save(WatchedStore(place, hook), state(), overwrite=overwrite)
    (attempt,) = set(attempts(place)) - set(before)
    return attempt


def later(root: Path, seconds: float = SILENCE_S + 60) -> list[Leftover]:
    """What is found in a folder that nobody touches any more for some time."""
    return find_leftovers(Store(root), time.time() + seconds)


def goes(found: list[Leftover]) -> list[str]:
    return [one.path for one in found if one.kept is None]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    checkpoint.save(tmp_path / "step-00000001", state())
    return tmp_path


@pytest.mark.parametrize(
    "at",
    ["after close of model-00000-000.safetensors", "after write objects.json", "before create manifest.json"],
)
def test_a_killed_save_is_left_over_a_day_later_and_goes(root: Path, at: str) -> None:
    attempt = killed_save(root / "step-00000002", at)
    (found,) = later(root)
    assert (found.path, found.kept) == (f"step-00000002/data/{attempt}", None)
    files = list((root / "step-00000002" / "data" / attempt).iterdir())
    assert found.num_files == len(files) > 0
    assert found.num_bytes == sum(path.stat().st_size for path in files)
    remove_leftover(Store(root), found)
    assert [path.name for path in root.iterdir()] == ["step-00000001"]
    checkpoint.load(root / "step-00000001", state())


def test_a_save_that_may_still_run_is_kept(root: Path) -> None:
    """Until nothing has changed for a day; a single new byte starts the day again."""
    attempt = killed_save(root / "step-00000002", "before create manifest.json")
    assert "may be at work" in str(later(root, SILENCE_S - 60)[0].kept)
    done = gc(root, "--delete")
    assert done.exit_code == 0
    assert "kept: a save may be at work on it" in done.stdout
    assert "0 removed" in done.stdout
    assert attempts(root / "step-00000002") == [attempt]


def test_copies_with_old_times_are_young(root: Path) -> None:
    """A checkpoint that is being copied into the folder: `cp -p` keeps times, the file system knows better."""
    target = root / "step-00000002" / "data"
    shutil.copytree(root / "step-00000001" / "data", target)
    for path in (target, *target.rglob("*")):
        os.utime(path, (0, 0))
    (found,) = find_leftovers(Store(root), time.time())
    assert found.kept is not None
    assert found.silence_s is not None
    assert found.silence_s < 3600


def test_only_on_request_is_anything_deleted(root: Path) -> None:
    attempt = killed_save(root / "step-00000002", "before create manifest.json")
    done = gc(root, "--force")
    assert done.exit_code == 0, done.stderr
    assert f"step-00000002/data/{attempt}" in done.stdout
    assert "1 left over" in done.stdout
    assert attempts(root / "step-00000002") == [attempt]
    done = gc(root, "--force", "--delete")
    assert "1 removed" in done.stdout
    assert not (root / "step-00000002").exists()
    assert "0 left over, 0 B\n" in gc(root, "--force").stdout


def test_what_the_manifest_names_stays_whatever_its_age(root: Path) -> None:
    """The committed attempt and the one it replaced; a killed overwrite beside them goes."""
    place = root / "step-00000001"
    (old,) = attempts(place)
    checkpoint.save(place, state(2.0), overwrite=True)
    (new,) = set(attempts(place)) - {old}
    killed = killed_save(place, "before write manifest.json", overwrite=True)
    assert goes(later(root)) == [f"step-00000001/data/{killed}"]
    assert "1 removed" in gc(root, "--force", "--delete").stdout
    assert attempts(place) == sorted([old, new])
    checkpoint.load(place, state())


def test_an_attempt_that_is_committed_after_it_was_found_stays(root: Path) -> None:
    place = root / "step-00000002"
    killed_save(place, "before create manifest.json")
    (found,) = later(root)
    checkpoint.save(place, state())
    (committed,) = set(attempts(place)) - {found.name.removeprefix("data/")}
    remove_leftover(Store(root), replace(found, name=f"data/{committed}"))
    checkpoint.load(place, state())


def test_a_folder_whose_name_is_no_utf8(root: Path) -> None:
    killed_save(root / "step-\udcff", "before create manifest.json")
    done = gc(root, "--force", "--delete")
    assert done.exit_code == 0, done.output
    assert "step-\\udcff/data/" in done.stdout
    assert not (root / "step-\udcff").exists()


def test_the_folder_may_be_a_checkpoint_itself(root: Path) -> None:
    place = root / "step-00000001"
    killed = killed_save(place, "before write manifest.json", overwrite=True)
    assert goes(later(place)) == [f"data/{killed}"]


def test_an_unfinished_manifest_under_a_hidden_name(root: Path) -> None:
    place = root / "step-00000001"
    os.link(
        place / "manifest.json", place / HIDDEN
    )  # killed between getting its name and losing the hidden one
    assert goes(later(root, 60)) == []
    assert goes(later(root)) == [f"step-00000001/{HIDDEN}"]
    assert "1 removed" in gc(root, "--force", "--delete").stdout
    checkpoint.load(place, state())
    assert not (place / HIDDEN).exists()


def test_unfinished_files_of_an_attempt_count_and_go_with_it(root: Path) -> None:
    attempt = killed_save(root / "step-00000002", "after close of model-00000-000.safetensors")
    before = later(root)[0]
    (root / "step-00000002" / "data" / attempt / HIDDEN).write_bytes(bytes(1000))
    (found,) = later(root)
    assert (found.num_files, found.num_bytes) == (before.num_files + 1, before.num_bytes + 1000)
    assert "1 removed" in gc(root, "--force", "--delete").stdout
    assert not (root / "step-00000002").exists()


def test_what_is_not_of_a_checkpoint_stays(root: Path) -> None:
    """Committed trees of data, files that no save writes, directories of other names, links."""
    with Transaction(Store(root / "tree")) as tree:
        tree.write("files.parquet", b"names like those of a checkpoint")
    attempt = "a" * 32
    (root / "foreign" / "data" / attempt).mkdir(parents=True)
    (root / "foreign" / "data" / attempt / "notes.txt").touch()
    (root / "deeper" / "data" / attempt / "sub").mkdir(parents=True)
    (root / "other" / "data" / "run-1").mkdir(parents=True)
    (root / "other" / HIDDEN).touch()
    killed_save(root / "elsewhere" / "step", "before create manifest.json")
    (root / "link").symlink_to(root / "elsewhere" / "step")
    (root / "step-00000003" / "data").mkdir(parents=True)
    (root / "step-00000003" / "data" / attempt).symlink_to(root / "step-00000001" / "data")
    before = sorted(root.rglob("*"))
    reasons = {one.folder: str(one.kept) for one in later(root)}
    assert reasons.keys() == {"tree", "foreign", "deeper"}
    assert "no checkpoint" in reasons["tree"]
    assert "'notes.txt' in it" in reasons["foreign"]
    assert "0 removed" in gc(root, "--force", "--delete").stdout
    assert sorted(root.rglob("*")) == before


def test_below_a_manifest_that_cannot_be_read_all_stays(root: Path) -> None:
    place = root / "step-00000001"
    (place / "manifest.json").write_bytes(b"{}")
    before = sorted(root.rglob("*"))
    done = gc(root, "--force", "--delete")
    assert done.exit_code == 0
    assert "kept: the manifest beside it cannot be read" in done.stdout
    assert "0 removed" in done.stdout
    assert sorted(root.rglob("*")) == before


def test_storage_that_tells_no_time_needs_the_word_that_nobody_saves() -> None:
    url = "memory://cli_gc/run"
    store = Store(url)
    checkpoint.save(store.sub("step-00000001"), state())
    checkpoint.save(store.sub("step-00000002"), state())
    store.delete("step-00000002/manifest.json")
    (found,) = find_leftovers(store, time.time() + 10 * SILENCE_S)
    assert found.silence_s is None
    assert found.num_files == 7
    assert "does not tell" in gc(url, "--delete").stdout
    assert store.list("step-00000002")
    assert "1 removed" in gc(url, "--delete", "--force").stdout
    assert not store.list("step-00000002")
    checkpoint.load(store.sub("step-00000001"), state())


def test_no_such_folder_is_one_line(tmp_path: Path) -> None:
    for place in (tmp_path / "nothing", "memory://cli_gc/nothing"):
        done = gc(place)
        assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert "no such folder" in done.stderr
    (tmp_path / "file").touch()
    with pytest.raises(NotACheckpoint):
        find_leftovers(Store(tmp_path / "file"), 0)
    assert gc(tmp_path).stdout == f"{tmp_path}: 0 left over, 0 B\n"
