"""Local files are read a little at a time, and digested on the way."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

import checkpoint
from checkpoint.engine import scan as module
from checkpoint.engine.scan import scan
from checkpoint.format.digest import PIECE_BYTES, Digester, digest64
from storage.errors import Corrupt, NotFound
from tests.checkpoint.simulation import random_bits

_WINDOW = module._WINDOW_BYTES
_DATA = np.random.default_rng(0).integers(0, 256, 5 * _WINDOW + 3, dtype=np.uint8)

sizes = st.one_of(
    st.integers(1, 20), st.integers(1, 2 * _WINDOW), st.sampled_from([_WINDOW - 1, _WINDOW, _WINDOW + 1])
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scan") / "file"
    path.write_bytes(_DATA.data)
    return path


@given(begin=st.integers(0, 100), parts=st.lists(sizes, max_size=2000))
@settings(deadline=None)
def test_every_part_is_filled_and_looked_at_in_order(file: Path, begin: int, parts: list[int]) -> None:
    ends = [end for end in itertools.accumulate(parts, initial=begin) if end <= len(_DATA)]
    into = [np.zeros(end - start, dtype=np.uint8) for start, end in itertools.pairwise(ends)]
    seen: list[bytes] = []
    assert scan(file, begin, [part.data for part in into], lambda view: seen.append(bytes(view)))
    expected = _DATA[begin : ends[-1]].tobytes()
    assert b"".join(part.tobytes() for part in into) == expected == b"".join(seen)
    assert max(map(len, seen), default=0) <= _WINDOW
    event("several windows" if len(expected) > _WINDOW else "one")


def test_more_parts_than_one_call_takes(file: Path) -> None:
    into = [np.zeros(1, dtype=np.uint8) for _ in range(3000)]
    assert scan(file, 7, [part.data for part in into], lambda _: None)
    assert np.array_equal(np.concatenate(into), _DATA[7:3007])


def test_a_file_that_is_missing_or_too_short_is_told(file: Path) -> None:
    into = [np.zeros(10, dtype=np.uint8).data]
    assert not scan(file.with_name("none"), 0, into, lambda _: None)
    assert not scan(file.parent, 0, into, lambda _: None)
    assert not scan(file, len(_DATA) - 9, into, lambda _: None)
    assert scan(file, len(_DATA) - 10, into, lambda _: None)


@given(pieces=st.lists(st.integers(1, 300), max_size=30), cuts=st.lists(st.integers(1, 300), max_size=60))
def test_digests_do_not_depend_on_how_the_bytes_come(pieces: list[int], cuts: list[int]) -> None:
    data = _DATA[: sum(pieces)]
    digester = Digester(pieces)
    begin = 0
    for cut in [*cuts, len(data)]:
        digester.update(data[begin : begin + cut].data)
        begin = min(begin + cut, len(data))
    ends = itertools.accumulate(pieces, initial=0)
    assert digester.digests == [digest64(data[low:high].data) for low, high in itertools.pairwise(ends)]


@pytest.mark.parametrize("verify", [True, False])
def test_a_file_that_shrinks_or_goes_after_it_was_opened_is_named(tmp_path: Path, verify: bool) -> None:
    checkpoint.save(tmp_path, {"model": {"w": random_bits((2 * PIECE_BYTES,), torch.uint8, seed=1)}})
    (path,) = tmp_path.glob("data/*/*.safetensors")
    saved = checkpoint.open_checkpoint(tmp_path, verify=verify)
    with path.open("r+b") as opened:
        opened.truncate(path.stat().st_size - 1)
    with pytest.raises(Corrupt, match=f"{path.name}: bytes .* wanted, the object ends at"):
        saved.read("model")
    path.unlink()
    with pytest.raises(NotFound, match=path.name):
        saved.read("model")
