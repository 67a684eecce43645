"""What the path of a source may name, and how its format is told."""

from __future__ import annotations

from pathlib import Path

import pytest

import storage
from omniload.errors import MixtureError, SourceNotFound
from omniload.sources.formats import Format, format_of, named
from omniload.sources.listing import list_files
from omniload.sources.paths import find


def touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)


def listed(*paths: Path | str, format_name: str | None = None) -> tuple[str, list[str]]:
    found, listing = list_files("s", [str(path) for path in paths], None, format_name)
    return found, [file.url for file in listing.files]


def test_a_brace_range_names_every_file_in_it(tmp_path: Path) -> None:
    touch(tmp_path, *(f"x-{i:06}.tar" for i in range(12)))
    assert listed(tmp_path / "x-{000000..000009}.tar") == (
        "webdataset",
        [f"{tmp_path}/x-{i:06}.tar" for i in range(10)],
    )


def test_braces_may_stand_for_folders_whose_files_have_the_same_names(tmp_path: Path) -> None:
    touch(tmp_path, "en/x.parquet", "de/x.parquet", "fr/x.parquet")
    assert listed(tmp_path / "{en,de}/x.parquet")[1] == [
        f"{tmp_path}/de/x.parquet",
        f"{tmp_path}/en/x.parquet",
    ]
    with pytest.raises(SourceNotFound, match=r"1 of the 2 files .* missing, the first is .*it/x\.parquet"):
        listed(tmp_path / "{en,it}/x.parquet")


def test_a_file_missing_from_a_brace_range_is_named(tmp_path: Path) -> None:
    touch(tmp_path, "x-0.tar", "x-2.tar")
    with pytest.raises(SourceNotFound, match=r"1 of the 3 files .* missing, the first is .*x-1\.tar"):
        listed(tmp_path / "x-{0..2}.tar")


def test_braces_may_stand_for_folders_and_hold_globs(tmp_path: Path) -> None:
    touch(tmp_path, "en/a.parquet", "en/b.parquet", "de/c.parquet", "fr/d.parquet")
    assert listed(tmp_path / "{en,de}/*.parquet") == (
        "parquet",
        [f"{tmp_path}/{name}" for name in ("de/c.parquet", "en/a.parquet", "en/b.parquet")],
    )
    with pytest.raises(SourceNotFound, match=r"nothing matches .*/it/\*\.parquet, one of"):
        listed(tmp_path / "{en,it}/*.parquet")


def test_braces_that_stand_for_too_much_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(SourceNotFound, match="use a glob"):
        listed(tmp_path / "x-{0..99999999}.tar")


def test_a_file_whose_name_has_braces_is_itself(tmp_path: Path) -> None:
    touch(tmp_path, "x{0..1}.parquet")
    assert listed(tmp_path / "x{0..1}.parquet")[1] == [f"{tmp_path}/x{{0..1}}.parquet"]


@pytest.mark.parametrize("name", ["a{1,2}", "b{0..2}/deep", "{c}", "d{"])
def test_a_folder_whose_name_has_braces_is_itself(tmp_path: Path, name: str) -> None:
    touch(tmp_path, f"{name}/x.parquet", "a1/x.parquet", "a2/x.parquet")
    assert listed(tmp_path / name)[1] == [f"{tmp_path}/{name}/x.parquet"]


def test_a_folder_means_all_data_files_below_it(tmp_path: Path) -> None:
    touch(tmp_path, "README.md", "dataset_info.json", "a.parquet", "deep/er/b.parquet", ".hidden.parquet")
    expected = ("parquet", [f"{tmp_path}/a.parquet", f"{tmp_path}/deep/er/b.parquet"])
    assert listed(tmp_path) == expected
    assert listed(f"{tmp_path}/") == expected


def test_a_folder_on_a_remote_store_means_the_same() -> None:
    store = storage.Store("memory://paths/data")
    for name in ("a.parquet", "b/c.parquet", "notes.md"):
        store.write(name, name.encode())
    try:
        assert listed("memory://paths/data") == (
            "parquet",
            ["memory://paths/data/a.parquet", "memory://paths/data/b/c.parquet"],
        )
    finally:
        storage.Store("memory://paths").delete_tree("data")


def test_a_marker_decides_the_format_of_a_folder(tmp_path: Path) -> None:
    touch(tmp_path, "index.json", "shard.00000.mds")
    assert listed(tmp_path) == ("mds", [f"{tmp_path}/index.json"])


def test_folders_of_several_formats_ask_for_one(tmp_path: Path) -> None:
    touch(tmp_path, "a.parquet", "b.jsonl")
    with pytest.raises(MixtureError, match="several formats"):
        listed(tmp_path)
    assert listed(tmp_path, format_name="jsonl") == ("jsonl", [f"{tmp_path}/b.jsonl"])


def test_a_folder_without_data_is_not_silently_empty(tmp_path: Path) -> None:
    touch(tmp_path, "README.md")
    with pytest.raises(MixtureError, match="cannot tell the format"):
        listed(tmp_path)
    with pytest.raises(SourceNotFound, match="no file of format 'parquet'"):
        listed(tmp_path, format_name="parquet")


def test_a_path_without_ending_finds_an_indexed_dataset(tmp_path: Path) -> None:
    touch(tmp_path, "corpus_text_document.bin", "corpus_text_document.idx")
    expected = ("megatron", [f"{tmp_path}/corpus_text_document.idx"])
    assert listed(tmp_path / "corpus_text_document") == expected
    assert listed(tmp_path / "*") == expected
    assert listed(tmp_path / "corpus_text_document.bin") == expected
    assert listed(tmp_path / "{corpus_text,corpus_text}_document") == expected
    touch(tmp_path, "other.bin")
    assert listed(tmp_path) == expected
    for path in ("*", "*.bin"):
        with pytest.raises(SourceNotFound, match=r"other\.bin has no \.idx beside it"):
            listed(tmp_path / path)


def test_companions_count_in_the_fingerprint_and_not_as_files(tmp_path: Path) -> None:
    touch(tmp_path, "a/x.idx", "a/x.bin", "a/y.bin")
    _, listing = list_files("s", [f"{tmp_path}/a"])
    assert [file.path for file in listing.files] == ["x.idx"]
    assert list(listing.companions) == ["x.bin"]
    before = listing.fingerprint
    (tmp_path / "a/x.bin").write_text("changed")
    assert list_files("s", [f"{tmp_path}/a/x"])[1].fingerprint != before


def test_an_index_of_something_else_does_not_decide_the_format_of_a_folder(tmp_path: Path) -> None:
    touch(tmp_path, "x-0.tar", "x-0.tar.idx")
    assert listed(tmp_path) == ("webdataset", [f"{tmp_path}/x-0.tar"])


def test_an_index_right_in_a_folder_stands_for_those_below(tmp_path: Path) -> None:
    touch(tmp_path, "index.json", "en/index.json", "en/shard.00000.mds", "de/index.json")
    assert listed(tmp_path) == ("mds", [f"{tmp_path}/index.json"])
    assert list(list_files("s", [str(tmp_path)])[1].companions) == ["en/shard.00000.mds"]
    (tmp_path / "index.json").unlink()
    assert listed(tmp_path)[1] == [f"{tmp_path}/de/index.json", f"{tmp_path}/en/index.json"]


def test_an_unknown_format_is_answered_with_the_nearest(tmp_path: Path) -> None:
    touch(tmp_path, "a.parquet")
    with pytest.raises(MixtureError, match="no format 'parqet'; did you mean 'parquet'"):
        listed(tmp_path / "a.parquet", format_name="parqet")


def test_every_built_in_ending_belongs_to_one_format() -> None:
    for name in ("arrow", "jsonl", "mds", "megatron", "parquet", "text", "webdataset"):
        for ending in named(name, "").endings:
            path = f"x{ending}" if ending.startswith(".") else ending
            assert format_of([path]) == name


def test_the_longest_ending_tells_the_format() -> None:
    one = Format(reader="m:R", endings=(".json", "index.json"))
    assert (one.match("a/index.json"), one.match("a/my-index.json"), one.match("a/x.tar")) == (10, 5, 0)


def test_what_lies_near_is_named_if_nothing_matches(tmp_path: Path) -> None:
    touch(tmp_path, "corpus.parquet")
    with pytest.raises(SourceNotFound, match=r"nearest: corpus\.parquet"):
        find(str(tmp_path / "corpsu.parquet"), {}, "source 's'")


def test_what_lies_near_a_bare_name_is_looked_for_in_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    touch(tmp_path, "corpus.parquet", "other.jsonl")
    monkeypatch.chdir(tmp_path)
    for name in ("corpsu.parquet", "corpsu*.parquet", "corpsu/x.parquet"):
        with pytest.raises(SourceNotFound, match=r"\. holds 2 entries, nearest: corpus\.parquet"):
            list_files("s", [name], None, None)
