"""Patterns name the same sorted files on every host."""

from pathlib import Path

import pytest

from storage import UnsupportedURL, glob


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in [
        "b.txt",
        "a.txt",
        "c.json",
        "d/e.txt",
        "d/f/g.txt",
        "odd[1].txt",
        f".storage-{'0' * 32}.tmp",
    ]:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"123")
    return tmp_path


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("*.txt", ["a.txt", "b.txt", "odd[1].txt"]),
        ("**/*.txt", ["a.txt", "b.txt", "d/e.txt", "d/f/g.txt", "odd[1].txt"]),
        ("[ab].*", ["a.txt", "b.txt"]),
        ("a.txt", ["a.txt"]),
        ("odd[1].txt", ["odd[1].txt"]),
        ("*/e.*", ["d/e.txt"]),
        ("d", []),
        ("nothing*", []),
        ("missing.txt", []),
        ("*", ["a.txt", "b.txt", "c.json", "odd[1].txt"]),
    ],
)
def test_local_patterns(tree: Path, pattern: str, names: list[str]) -> None:
    expected = [(f"{tree}/{name}", 3) for name in names]
    assert [(one.path, one.size) for one in glob(f"{tree}/{pattern}")] == expected
    assert [(one.path, one.size) for one in glob(f"file://{tree}/{pattern}")] == expected


def test_relative_patterns_give_absolute_paths(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tree)
    assert [one.path for one in glob("d/*.txt")] == [f"{tree}/d/e.txt"]


def test_unknown_schemes_are_refused() -> None:
    with pytest.raises(UnsupportedURL, match="nosuch"):
        glob("nosuch://x/*")
