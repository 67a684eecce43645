"""Folders of images, with metadata.jsonl and without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import storage
from omniload.errors import MixtureError, SourceNotFound
from omniload.sources import BadRow
from tests.omniload.reading import all_rows, num_bytes, open_path, reads
from tests.storage.seaweed import S3Server

FIXTURES = Path(__file__).parents[1] / "fixtures" / "imagefolder"
EXPECTED: dict[str, list[dict[str, Any]]] = {}
for _line in (FIXTURES / "expected.jsonl").read_text().splitlines():
    _one = json.loads(_line)
    EXPECTED.setdefault(_one["folder"], []).append(_one["row"])


def fill(folder: Path, lines: list[Any], images: dict[str, bytes]) -> Path:
    for name, content in images.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    (folder / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.mark.parametrize("name", EXPECTED)
def test_a_folder_is_read_as_the_builder_reads_it(name: str) -> None:
    """But for the order of images without metadata, which is that of their sorted paths."""
    rows = json.loads(json.dumps(all_rows(open_path(FIXTURES / name)), default=bytes.hex))
    assert sorted(rows, key=str) == sorted(EXPECTED[name], key=str)
    assert rows == EXPECTED[name] or name == "labelled"


def test_images_without_metadata_come_in_the_order_of_their_paths(tmp_path: Path) -> None:
    for i in range(40):
        (tmp_path / f"{i % 3}").mkdir(exist_ok=True)
        (tmp_path / f"{i % 3}" / f"{i:02}.JPG").write_bytes(bytes([i]))
    (tmp_path / "top.png").write_bytes(b"top")
    (tmp_path / "README.md").write_text("no image")
    source = open_path(tmp_path)
    rows = all_rows(source)
    assert rows[0] == {"image": {"bytes": b"\0", "path": "0/00.JPG"}, "label": "0"}
    assert rows[-1] == {"image": {"bytes": b"top", "path": "top.png"}}
    assert [row["image"]["path"] for row in rows[:-1]] == sorted(  # type: ignore[index]
        f"{i % 3}/{i:02}.JPG" for i in range(40)
    )
    ids = [source.row_ids(0, block) for block in range(source.num_blocks(0))]
    assert np.concatenate(ids).tolist() == list(range(41))
    schema = source.schema(0)
    assert schema is not None
    assert schema.names == ["image", "label"]


def test_no_image_is_opened_before_its_row_is_asked_for(tmp_path: Path) -> None:
    """However many there are: what is read at the start is the metadata."""
    images = {f"{i}.png": bytes(2000) for i in range(300)}
    fill(tmp_path / "described", [{"file_name": name, "text": ""} for name in images], images)
    fill(tmp_path / "labelled", [], images)
    (tmp_path / "labelled" / "metadata.jsonl").unlink()
    for folder in ("described", "labelled"):
        with reads() as spans:
            source = open_path(tmp_path / folder)
            blocks = [source.read_block(0, block) for block in range(source.num_blocks(0))]
        assert num_bytes(spans) < 50_000 < 300 * 2000
        assert len(blocks) > 2
        with reads() as spans:
            assert len(blocks[1].rows(np.array([5, 2]))) == 2
        assert num_bytes(spans) == 2 * 2000


def test_images_that_are_no_column_asked_for_are_not_read(tmp_path: Path) -> None:
    source = open_path(fill(tmp_path, [{"file_name": "a.png", "text": "x"}], {"a.png": bytes(1000)}))
    with reads() as spans:
        [row] = all_rows(source, ["text"])
    assert isinstance(row, dict)
    assert row["text"] == "x"
    assert num_bytes(spans) < 200


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ({"file_name": "gone.png"}, r"'file_name': no image 'gone.png'"),
        ({"file_name": "../outside.png"}, r"no image '\.\./outside\.png'"),
        ({"file_name": "/etc/passwd"}, "no image '/etc/passwd'"),
        ({"file_name": ""}, "no image ''"),
        ({"file_name": 7}, "no image 7"),
        ({"file_names": ["a.png", {}]}, "no image {}"),
        ({"text": "x"}, "no 'file_name'"),
        (["a.png"], "a JSON list"),
    ],
)
def test_a_line_without_its_image_is_bad_alone(tmp_path: Path, line: Any, reason: str) -> None:
    (tmp_path / "outside.png").write_bytes(b"outside")
    good = {"file_name": "./deep/../a.png"}
    rows = all_rows(open_path(fill(tmp_path / "x", [good, line, good], {"a.png": b"a"})))
    assert rows[0] == rows[2] == {"image": {"bytes": b"a", "path": "./deep/../a.png"}}
    assert isinstance(rows[1], BadRow)
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(rows[1].reason)


def test_a_null_image_stays_null(tmp_path: Path) -> None:
    source = open_path(fill(tmp_path, [{"file_name": None, "text": "x"}], {"a.png": b"a"}))
    assert all_rows(source) == [{"image": None, "text": "x"}]


def test_metadata_of_several_folders_is_relative_to_each(tmp_path: Path) -> None:
    for name in ("a", "b"):
        fill(tmp_path / name, [{"file_name": "x.png"}], {"x.png": name.encode()})
    expected = [{"image": {"bytes": name, "path": "x.png"}} for name in (b"a", b"b")]
    assert all_rows(open_path(tmp_path)) == expected
    assert all_rows(open_path(tmp_path / "*" / "metadata.jsonl")) == expected


def test_an_image_added_removed_or_of_another_size_changes_the_fingerprint(tmp_path: Path) -> None:
    fill(tmp_path, [{"file_name": "a.png"}], {"a.png": b"a", "b.png": b"b"})
    for path in (tmp_path, tmp_path / "metadata.jsonl"):
        seen = [open_path(path).fingerprint]
        (tmp_path / "c.png").write_bytes(b"c")
        seen.append(open_path(path).fingerprint)
        (tmp_path / "c.png").write_bytes(b"cc")
        seen.append(open_path(path).fingerprint)
        (tmp_path / "c.png").unlink()
        assert open_path(path).fingerprint == seen[0]
        assert len(set(seen)) == 3


def test_a_folder_of_metadata_alone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceNotFound, match=r"'s': no images beside .*metadata\.jsonl.*format: jsonl"):
        open_path(fill(tmp_path, [{"file_name": "a.png"}], {}))
    assert len(all_rows(open_path(tmp_path, format="jsonl"))) == 1


def test_images_beside_other_data_are_ambiguous(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"a")
    (tmp_path / "a.txt").write_text("caption")
    with pytest.raises(MixtureError, match=r"a\.png \(imagefolder\).*a\.txt \(text\).*set format:"):
        open_path(tmp_path)
    assert all_rows(open_path(tmp_path, format="text")) == [{"text": "caption"}]


def test_an_image_that_shrank_since_it_was_listed_is_an_error_of_the_storage(tmp_path: Path) -> None:
    source = open_path(fill(tmp_path, [{"file_name": "a.png"}], {"a.png": bytes(100)}))
    (tmp_path / "a.png").write_bytes(b"")
    with pytest.raises(storage.Corrupt, match=r"a\.png"):
        all_rows(source)


def test_damaged_metadata_loses_lines_and_nothing_else(tmp_path: Path) -> None:
    images = {f"{i}.png": bytes([i]) for i in range(60)}
    folder = fill(tmp_path, [{"file_name": name, "text": "é" * 40} for name in images], images)
    data = (folder / "metadata.jsonl").read_bytes()
    generator = np.random.default_rng(3)
    num_bad = 0
    for i in range(60):
        damaged = bytearray(data[: generator.integers(len(data))] if i % 4 == 0 else data)
        for at in generator.integers(len(damaged), size=3) if damaged else ():
            damaged[at] ^= 1 << generator.integers(8)
        (folder / "metadata.jsonl").write_bytes(damaged)
        rows = all_rows(open_path(folder))
        bad = [row for row in rows if isinstance(row, BadRow)]
        num_bad += len(bad)
        assert len(rows) - len(bad) >= damaged.count(b"\n") - 4
    assert num_bad > 60


def test_images_on_s3_are_read_when_asked_for(s3: S3Server) -> None:
    store = storage.Store(f"s3://{s3.bucket}/images", s3.storage_options)
    for path in FIXTURES.glob("described/**/*.*"):
        store.write(str(path.relative_to(FIXTURES / "described")), path.read_bytes())
    source = open_path(store.url, storage_options=s3.storage_options)
    with reads() as spans:
        block = source.read_block(0, 0)
    assert [span.attributes["num_ranges"] for span in spans] == [1]
    with reads() as spans:
        rows = block.rows(np.array([4, 1]))
    assert [span.attributes["num_ranges"] for span in spans] == [2], "together"
    expected = [EXPECTED["described"][i] for i in (4, 1)]
    assert json.loads(json.dumps(rows, default=bytes.hex)) == expected
