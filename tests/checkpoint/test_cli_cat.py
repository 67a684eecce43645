"""`omniload ckpt cat`: one tensor or plain value of a checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

import checkpoint
from checkpoint.boxes import Box
from checkpoint.cli import app
from checkpoint.cli_cat import parse_slice
from checkpoint.cli_read import PART_BYTES, parts_of
from checkpoint.cli_statistics import Statistics
from checkpoint.format.digest import PIECE_BYTES
from storage import Store, spans
from storage.errors import BadRequest
from tests.checkpoint.simulation import DTYPES, bits, random_bits, save_simulated, shapes


def cat(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["cat", *map(str, arguments)])


def refused(*arguments: object) -> str:
    """What one line of error a command ends in."""
    done = cat(*arguments)
    assert (done.exit_code, done.stdout_bytes, done.stderr.count("\n")) == (2, b"", 1), done.output
    return done.stderr


def num_bytes_read(*arguments: object) -> int:
    """Bytes of payload read by a command, headers left out."""
    spans.start_recording()
    try:
        done = cat(*arguments)
        found = spans.drain()
    finally:
        spans.stop_recording()
    assert done.exit_code == 0, done.output
    return sum(int(str(one.attributes["num_bytes"])) for one in found if one.name == "checkpoint.read")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    state = {
        "t": {"w": torch.tensor([[1.5, -2.0, 0.25], [float("nan"), float("-inf"), 4.0]])},
        "extra": {"step": 3, "big": 2**70, "a.b": {"c": [1, {"d": "ü"}]}, "raw": b"\x00"},
    }
    checkpoint.save(tmp_path / "c", state)
    return tmp_path / "c"


def test_a_tensor_with_its_statistics_and_first_values(saved: Path) -> None:
    done = cat(saved, "t/w")
    assert done.exit_code == 0, done.stderr
    assert done.stdout.splitlines() == [
        "t/w",
        "float32 [2, 3], 24 B",
        "min -2.0, max 4.0, mean 0.9375",
        "not finite: 2 (1 nan, 1 inf)",
        "first values: 1.5, -2.0, 0.25, nan, -inf, 4.0",
    ]


def test_a_slice_has_the_shape_that_python_would_give_it(saved: Path) -> None:
    lines = cat(saved, "t/w", "--slice", "0,1:").stdout.splitlines()
    assert lines[1:3] == ["float32 [2] of [2, 3], 8 B", "min -2.0, max 0.25, mean -0.875"]
    assert cat(saved, "t/w", "--slice", "-1,:1").stdout.splitlines()[2] == "not finite: 1 (1 nan, 0 inf)"
    assert "no elements" in cat(saved, "t/w", "--slice", "2:").stdout


@settings(max_examples=60, deadline=None)
@given(data=st.data(), shape=shapes)
def test_slices_mean_what_they_mean_in_python(data: st.DataObject, shape: tuple[int, ...]) -> None:
    array = np.arange(int(np.prod(shape))).reshape(shape)
    ends = st.none() | st.integers(-11, 11)
    items: list[tuple[str, slice | int]] = []
    for length in shape[: data.draw(st.integers(0, len(shape)))]:
        if length and data.draw(st.booleans()):
            at = data.draw(st.integers(-length, length - 1))
            items.append((str(at), at))
        else:
            start, stop = data.draw(ends), data.draw(ends)
            text = ":".join("" if end is None else str(end) for end in (start, stop))
            items.append((text, slice(start, stop)))
    if not items:
        return
    box, kept = parse_slice(",".join(text for text, _ in items), shape)
    expected = array[tuple(one for _, one in items)]
    assert kept == expected.shape
    part = array[tuple(slice(start, end) for start, end in zip(box.offsets, box.ends, strict=True))]
    assert part.reshape(kept).tolist() == expected.tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_raw_bytes_of_any_dtype_and_layout(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = random_bits((5, 6), dtype, 1)
    boxes = [[Box((0, 0), (5, 2))], [Box((0, 2), (3, 4)), Box((3, 2), (2, 4))]]
    save_simulated(Store(tmp_path / "c"), 2, {"w": tensor}, {"w": boxes})
    done = cat(tmp_path / "c", "model/w", "--raw")
    assert done.exit_code == 0, done.stderr
    assert done.stdout_bytes == bits(tensor)
    done = cat(tmp_path / "c", "model/w", "--raw", "--slice", "1:4,-5:3")
    assert done.stdout_bytes == bits(tensor[1:4, -5:3])
    assert "first values" in cat(tmp_path / "c", "model/w").stdout  # whatever the bits


def test_types_that_numpy_lacks_are_shown_exactly(tmp_path: Path) -> None:
    state = {
        "bf16": torch.tensor([1 / 3], dtype=torch.bfloat16),
        "fp8": torch.tensor([0.3], dtype=torch.float8_e4m3fn),
        "scalar": torch.tensor(7),
        "bool": torch.tensor([True, False]),
        "uint64": torch.tensor([2**64 - 1], dtype=torch.uint64),
        "complex": torch.tensor([3 + 4j]),
        "empty": torch.zeros(0, 3),
    }
    checkpoint.save(tmp_path / "c", {"t": state})
    shown = {key: cat(tmp_path / "c", f"t/{key}").stdout for key in state}
    assert "first values: 0.33398438\n" in shown["bf16"]
    assert "first values: 0.3125\n" in shown["fp8"]
    assert "int64 [], 8 B\nmin 7, max 7, mean 7\n" in shown["scalar"]
    assert "min False, max True, mean 0.5" in shown["bool"]
    assert "max 18446744073709551615," in shown["uint64"]
    assert "max 5.0, mean 5 of the magnitudes" in shown["complex"]
    assert "float32 [0, 3], 0 B\nno elements" in shown["empty"]


def test_statistics_seen_in_parts_are_those_of_the_whole() -> None:
    values = np.concatenate([np.arange(64.0), [np.nan], np.arange(64.0, 128), [np.inf, np.inf]])
    statistics = Statistics()
    for part in (values[:64], values[64:65], values[65:]):
        statistics.add(part)
    assert (statistics.least, statistics.greatest, statistics.mean) == (0, 127, 63.5)
    assert (statistics.num_elements, statistics.num_nan, statistics.num_inf) == (131, 1, 2)
    assert statistics.first == [0, 1, 2, 3, 4, 5, 6, 7]


def test_the_mean_of_huge_values_is_finite() -> None:
    statistics = Statistics()
    statistics.add(np.full(4, 1.5e308))
    statistics.add(np.full(4, -1.5e308))
    assert statistics.mean == 0


def test_only_the_pieces_of_a_slice_are_read(tmp_path: Path) -> None:
    rows = 5 * PIECE_BYTES // 1024
    tensor = torch.arange(rows, dtype=torch.int32)[:, None].expand(rows, 256).contiguous()
    half = rows // 2
    boxes = [[Box((0, 0), (half, 256))], [Box((half, 0), (rows - half, 256))]]
    save_simulated(Store(tmp_path / "c"), 2, {"w": tensor}, {"w": boxes})
    assert tensor.nbytes == 5 * PIECE_BYTES
    assert num_bytes_read(tmp_path / "c", "model/w", "--slice", "3") == PIECE_BYTES
    next((tmp_path / "c" / "data").rglob("model-00000-*")).unlink()
    done = cat(tmp_path / "c", "model/w", "--slice", f"{rows - 1},:2", "--raw")
    assert np.frombuffer(done.stdout_bytes, "<i4").tolist() == [rows - 1, rows - 1]
    assert "model-00000-000.safetensors" in refused(tmp_path / "c", "model/w", "--slice", "0")


def test_no_part_is_larger_than_it_may_be() -> None:
    for itemsize in (1, 2, 16):
        parts = list(parts_of(Box((3, 5), (100_000, 3_001)), itemsize))
        assert max(part.num_elements for part in parts) * itemsize <= PART_BYTES
        assert sum(part.num_elements for part in parts) == 100_000 * 3_001


def test_a_tensor_larger_than_what_is_read_at_a_time(tmp_path: Path) -> None:
    num = PART_BYTES // 2 + 1000
    tensor = (torch.arange(num) % 251).to(torch.int16)
    checkpoint.save(tmp_path / "c", {"t": {"w": tensor}})
    assert cat(tmp_path / "c", "t/w", "--raw").stdout_bytes == bits(tensor)
    assert "min 0, max 250," in cat(tmp_path / "c", "t/w").stdout


def test_plain_values_by_their_path(saved: Path) -> None:
    assert json.loads(cat(saved, "extra/step").stdout) == 3
    assert json.loads(cat(saved, "extra/value.step").stdout) == 3
    assert json.loads(cat(saved, "extra/a.b.c").stdout) == [1, {"d": "ü"}]
    assert cat(saved, "extra/a.b.c.1.d").stdout == '"ü"\n'
    assert json.loads(cat(saved, "extra/kind").stdout) == "tree"
    assert json.loads(cat(saved, "extra").stdout)["value"]["step"] == 3
    assert cat(saved, "extra/big", "--raw").stdout_bytes == b'{"$int":"1180591620717411303424"}\n'


def test_names_and_texts_that_are_no_utf8_are_escaped(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "c", {"extra": {"\ud800": "\udfff"}})
    assert json.loads(cat(tmp_path / "c", "extra").stdout)["value"] == {"\ud800": "\udfff"}
    assert json.loads(cat(tmp_path / "c", "extra", "--raw").stdout)["value"] == {"\ud800": "\udfff"}
    assert "'\\udcff'" in refused(tmp_path / "c", "\udcff")


def test_what_is_not_there_or_makes_no_sense_is_one_line(saved: Path) -> None:
    assert "did you mean t/w?" in refused(saved, "t/v")
    assert "omniload ckpt inspect" in refused(saved, "zzzzzz")
    for key in ("extra/nothing", "extra/step.x", "extra/a.b.c.7", "", "/"):
        assert repr(key) in refused(saved, key)
    assert "is not a tensor" in refused(saved, "extra/step", "--slice", "0")
    for part in ("0,0,0", "2", "-3", "::2", "a", "", "1" * 40, "0:1:"):
        assert "--slice" in refused(saved, "t/w", "--slice", part)
    with pytest.raises(BadRequest, match="1 dimensions"):
        parse_slice("0", ())
    assert "no manifest.json" in refused(saved / "data", "t/w")


def test_damage_is_told_and_never_shown(saved: Path) -> None:
    path = next((saved / "data").rglob("t-*"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert "t/w do not match their digest" in refused(saved, "t/w", "--raw")
    path.write_bytes(data[:-2])
    assert "t-00000-000.safetensors" in refused(saved, "t/w", "--raw")


def test_a_reader_that_stops_early_sees_no_traceback(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "c", {"t": {"w": torch.zeros(20 << 20)}})  # more than any pipe holds
    code = "from checkpoint.cli import app; app()"
    command = [sys.executable, "-c", code, "cat", str(tmp_path / "c"), "t/w", "--raw"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(4) == bytes(4)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 1
