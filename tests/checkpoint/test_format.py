"""The format itself: objects, manifest, payload files, and a reader that knows nothing of this package."""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from checkpoint.boxes import Box
from checkpoint.errors import CorruptCheckpoint, FormatError, StateError, UnsupportedVersion
from checkpoint.format.manifest import (
    METADATA_FILES,
    Manifest,
    MetadataFile,
    decode_manifest,
    encode_manifest,
)
from checkpoint.format.objects import decode_objects, encode_objects, first_difference
from checkpoint.format.payload import HEADER_ALIGN, decode_header, entry_name
from storage import Store
from tests.checkpoint.independent_reader import read_tensors
from tests.checkpoint.simulation import DTYPES, OPTIONS, bits, random_bits, save_simulated

_leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
_keys = st.text() | st.integers() | st.booleans() | st.tuples(st.integers(), st.text())
_trees = st.recursive(
    _leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.just("$int"), inner, max_size=3)
        | st.dictionaries(_keys, inner, max_size=3)
    ),
    max_leaves=20,
)


@given(_trees)
def test_objects_come_back_with_value_and_type(tree: Any) -> None:
    again = decode_objects(encode_objects(tree, "tree"), "tree")
    assert first_difference(tree, again, "tree") is None
    assert again == tree


def test_not_a_number_keeps_its_bits() -> None:
    (value,) = struct.unpack(">d", bytes.fromhex("7ff8000000000001"))
    again = decode_objects(encode_objects([value, math.inf, -0.0], "x"), "x")
    assert struct.pack(">3d", *again) == struct.pack(">3d", value, math.inf, -0.0)


@pytest.mark.parametrize("value", [object(), {"a": [1, {2}]}, torch.float32, range(3), 1j])
def test_objects_of_other_types_are_refused_by_path(value: object) -> None:
    with pytest.raises(StateError, match=r"^extra"):
        encode_objects(value, "extra")


@pytest.mark.parametrize(
    "text",
    [
        '{"$int": 5}',
        '{"$int": "x"}',
        '{"$nope": 1}',
        '{"a": 1, "a": 2}',
        '{"$pairs": [[[], 1]]}',
        "[" * 10000,
        "\xff",
    ],
)
def test_malformed_objects_are_refused(text: str) -> None:
    with pytest.raises(FormatError, match="here"):
        decode_objects(text.encode("latin-1"), "here")


def _manifest() -> Manifest:
    return Manifest(
        attempt="0" * 32,
        run_id="f" * 32,
        step=3,
        created="2024-01-01T00:00:00+00:00",
        writer={"world_size": 2},
        files={name: MetadataFile(num_bytes=1, xxh3="0" * 16) for name in METADATA_FILES},
        user_metadata={"big": 1 << 60, "text": '"digest":"0000000000000000"}'},
    )


def test_manifest_round_trip() -> None:
    assert decode_manifest(encode_manifest(_manifest()), "m") == _manifest()


def test_any_flipped_bit_of_a_manifest_is_noticed() -> None:
    data = encode_manifest(_manifest())
    for position in range(len(data)):
        for bit in (0, 5, 7):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            try:
                decoded = decode_manifest(bytes(damaged), "m")
            except (CorruptCheckpoint, FormatError):
                continue
            assert decoded == _manifest(), f"bit {bit} of byte {position}"  # white space at the end


def test_an_unknown_version_says_what_to_do() -> None:
    data = encode_manifest(_manifest()).replace(b'"version":1', b'"version":2')
    with pytest.raises(UnsupportedVersion, match=r"version 2.*newer release"):
        decode_manifest(data, "m")


def test_entry_names() -> None:
    assert entry_name("a.b", (4, 6), Box((0, 0), (4, 6))) == "a.b"
    assert entry_name("a.b", (4, 6), Box((2, 0), (2, 6))) == "a.b#2,0:2,6"
    assert entry_name("__a#%", (), Box((), ())) == "%5F%5Fa%23%25"


def test_payload_is_plain_safetensors_with_aligned_data(tmp_path: Path) -> None:
    tensors = {"b": random_bits((3,), torch.int8, 1), "a": random_bits((5, 7), torch.float64, 2)}
    tensors["__c#"] = random_bits((2,), torch.complex64, 3)
    save_simulated(
        Store(tmp_path), 1, tensors, {key: [[Box.whole(value.shape)]] for key, value in tensors.items()}
    )
    (path,) = tmp_path.glob("data/*/model-00000-000.safetensors")
    with safe_open(path, "pt") as file:  # type: ignore[no-untyped-call]
        assert sorted(file.keys()) == ["%5F%5Fc%23", "a", "b"]
        assert bits(file.get_tensor("a")) == bits(tensors["a"])
        assert file.get_tensor("%5F%5Fc%23").dtype == torch.uint8
    raw = path.read_bytes()
    entries = decode_header(raw[:HEADER_ALIGN], "header")
    # By falling element size, from the first aligned byte, without holes.
    offsets = [entries[name]["data_offsets"] for name in ("%5F%5Fc%23", "a", "b")]
    assert offsets == [[0, 16], [16, 296], [296, 299]]
    assert len(raw) == HEADER_ALIGN + 299


@pytest.mark.parametrize("compression", [None, {"model": "zstd"}])
def test_an_independent_reader_agrees(tmp_path: Path, compression: dict[str, str] | None) -> None:
    """Two ranks, cut in rows, every dtype, one box of several pieces; compressed or not."""
    tensors, layouts = {}, {}
    for index, dtype in enumerate(DTYPES):
        key = str(dtype)
        tensors[key] = random_bits((4, 3), dtype, seed=index)
        layouts[key] = [[Box((0, 0), (1, 3))], [Box((1, 0), (3, 3))]]
    tensors["scalar"], layouts["scalar"] = random_bits((), torch.float32, 1), [[Box((), ())]] * 2
    tensors["empty"], layouts["empty"] = torch.zeros(0, 3), [[], []]
    tensors["large"] = torch.arange(700_000, dtype=torch.float32)
    layouts["large"] = [[Box((0,), (1000,))], [Box((1000,), (699_000,))]]
    options = replace(OPTIONS, compression=compression)
    save_simulated(Store(tmp_path), 2, tensors, layouts, options=options)
    found = read_tensors(tmp_path)
    assert set(found) == {("model", key) for key in tensors}
    for key, tensor in tensors.items():
        array = found["model", key]
        assert array.shape == tuple(tensor.shape)
        assert array.tobytes() == bits(tensor), key
