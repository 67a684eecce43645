"""`SourceLoader.payload` gives the same bytes from the buffer and from the source, in bounded memory."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniload.loader import SourceLoader
from omniload.payload import Payload
from omniload.pieces import Cursor
from omniload.samples.buffer import Buffer
from tests.omniload.loading import address, byte_tokenizer, chunks, decode, loader_of, pieces

HERE = "tests.omniload.loading"
IDS = {f"{i}": [{"input_ids": [i, row] + [7] * (row * 5 % 31)} for row in range(1, 12)] for i in range(3)}
TEXTS = {
    "a": [{"text": f"text {row} " * (row % 4)} for row in range(11)],
    "b": [
        {"messages": [{"role": "user", "content": "q" * row}, {"role": "assistant", "content": "a" * row}]}
        for row in range(1, 9)
    ],
}
SOURCES: dict[str, tuple[Any, dict[str, Any]]] = {
    "stored ids": (IDS, {}),
    "stored ids, truncated": (IDS, {"overflow": "truncate"}),
    "transformed": (IDS, {"transforms": (f"{HERE}:triple", f"{HERE}:noisy")}),
    "text": ({"a": TEXTS["a"]}, {"tokenizer": byte_tokenizer(), "eos": "<eos>"}),
    "chat": ({"b": TEXTS["b"]}, {"tokenizer": byte_tokenizer(), "eos": "<eos>"}),
}


def same(a: Payload, b: Payload) -> bool:
    """Whether two payloads are equal to the byte and the type."""

    def bytes_of(payload: Payload) -> list[tuple[Any, ...]]:
        masks = [None if mask is None else mask.tobytes() for mask in payload.loss_mask]
        return [(t.dtype, t.tobytes(), m) for t, m in zip(payload.tokens, masks, strict=True)]

    return bytes_of(a) == bytes_of(b)


@pytest.fixture(params=SOURCES.keys())
def make(request: pytest.FixtureRequest) -> Any:
    files, keys = SOURCES[request.param]

    def loader(**more: Any) -> SourceLoader:
        return loader_of(files, **keys, **more)

    return loader


def test_pieces_of_a_sample_join_to_the_sample(make: Any) -> None:
    """Each array ends with the token that the next piece starts with, if there is one."""
    loader = make()
    whole = make(seq_len=10**6)
    samples = {address(p): p for p in pieces(whole)}
    found = pieces(loader)
    payload = loader.payload(found)
    split = 0
    for piece, tokens in zip(found, payload.tokens, strict=True):
        sample = whole.payload(np.array([samples[address(piece)]])).tokens[0]
        start, length = int(piece["start"]), int(piece["length"])
        goes_on = start + length < len(sample) and loader._spec.overflow == "split"
        split += goes_on
        assert tokens.tolist() == sample[start : start + length + goes_on].tolist()
    assert split or loader._spec.overflow == "truncate"


def test_targets_are_what_the_mask_leaves(make: Any) -> None:
    for labels in ("shifted", "hf"):
        loader = make(labels=labels)
        found = pieces(loader)
        payload = loader.payload(found)
        for piece, tokens, mask in zip(found, payload.tokens, payload.loss_mask, strict=True):
            trained = np.ones(len(tokens), dtype=bool) if mask is None else mask
            assert len(trained) == len(tokens)
            end = len(tokens) if labels == "shifted" else int(piece["length"])
            assert piece["targets"] == trained[1:end].sum()


def test_only_chats_have_a_mask() -> None:
    for name, (files, keys) in SOURCES.items():
        loader = loader_of(files, **keys)
        masks = loader.payload(pieces(loader)).loss_mask
        assert all((mask is None) == (name != "chat") for mask in masks)


def test_what_was_let_go_is_derived_again_byte_for_byte(make: Any) -> None:
    """Evicted, released, never read by this loader, or read in another order and number."""
    loader = make()
    found = pieces(loader)
    expected = loader.payload(found)
    for fraction in (0.5, 1.0):
        before = loader._reader.buffer.num_bytes
        loader.evict(fraction)
        assert loader._reader.buffer.num_bytes <= before * (1 - fraction)
        assert same(loader.payload(found), expected)
    loader.release(found)
    assert same(loader.payload(found), expected)
    assert same(make().payload(found), expected)
    order = np.random.default_rng(1).permutation(len(found))
    shuffled = make().payload(found[order])
    tokens, masks = expected.tokens, expected.loss_mask
    assert same(Payload.of([tokens[i] for i in order], [masks[i] for i in order]), shuffled)
    for i in order[:10]:
        assert same(make().payload(found[i : i + 1]), Payload.of([tokens[i]], [masks[i]]))


def test_pieces_of_several_epochs_come_in_one_payload(make: Any) -> None:
    loader = make()
    found = [pieces(loader, Cursor(epoch=epoch)) for epoch in (0, 3)]
    mixed = np.concatenate([found[0][::2], found[1][::3], found[0][1::2]])
    apart = [make().payload(part) for part in (found[0][::2], found[1][::3], found[0][1::2])]
    joined = Payload.of(
        [t for part in apart for t in part.tokens], [m for part in apart for m in part.loss_mask]
    )
    assert same(loader.payload(mixed), joined)
    assert loader.payload(mixed[:0]).tokens == []


def test_any_bound_on_the_buffer_gives_the_same_payload(make: Any) -> None:
    unbounded = make()
    for bound in (1, 200, 2000):
        loader = make(buffer_bytes=bound)
        for chunk in chunks(loader, max_samples=3):
            assert same(loader.payload(chunk.pieces), unbounded.payload(chunk.pieces))
        held = loader._reader.buffer
        assert held.num_bytes <= bound or len(held._entries) == 1


def test_memory_goes_when_everything_is_released(make: Any) -> None:
    """Also when the pieces of one sample are released one by one, and what is held does not grow over epochs."""
    loader = make()
    peaks = []
    for epoch in range(4):
        peak = 0
        for chunk in chunks(loader, Cursor(epoch=epoch), max_samples=4):
            loader.payload(chunk.pieces)
            for i in range(len(chunk.pieces)):
                peak = max(peak, loader._reader.buffer.num_bytes)
                loader.release(chunk.pieces[i : i + 1])
        assert loader._reader.buffer.num_bytes == 0
        peaks.append(peak)
    assert max(peaks) <= 2 * peaks[0]
    loader.close()
    assert loader.buffered_bytes == 0


def test_a_sample_is_kept_until_its_last_piece_is_released(make: Any) -> None:
    loader = make(block_rows=99)
    found = pieces(loader)
    [longest] = [p for p in found if p["start"] == found["start"].max()][:1]
    own = np.array([p for p in found if address(p) == address(longest)])
    others = np.array([p for p in found if address(p) != address(longest)])
    loader.release(others)
    for i in range(len(own)):
        assert loader._reader.buffer.num_bytes > 0
        loader.release(own[i : i + 1])
    assert loader._reader.buffer.num_bytes == 0


def test_stored_ids_that_need_their_type_are_not_copied() -> None:
    values = pa.array(np.arange(100_000, 101_000, dtype=np.int32))
    column = pa.ListArray.from_arrays(pa.array([0, 400, 1000], pa.int32()), values)
    loader = loader_of({"x": pa.table({"input_ids": column})}, seq_len=10_000)
    base = values.buffers()[1].address
    found = pieces(loader)
    addresses = sorted(one.__array_interface__["data"][0] - base for one in loader.payload(found).tokens)
    assert addresses == [0, 1600]


def test_provenance_names_rows_by_their_number_in_the_file() -> None:
    loader = loader_of(IDS, seq_len=99)
    for piece, one in zip(found := pieces(loader), loader.payload(found).tokens, strict=True):
        row_id = loader.row_ids(int(piece["file"]), int(piece["block"]))[piece["row"]]
        assert one.tolist()[:2] == [piece["file"], row_id + 1]


def test_readers_in_several_threads_get_the_same_as_one() -> None:
    loader = loader_of(IDS, transforms=(f"{HERE}:triple",), buffer_bytes=500)
    expected = [(c.begin, loader.payload(c.pieces)) for c in chunks(loader, max_samples=5)]
    wrong: list[Cursor] = []

    def work(part: int) -> None:
        for cursor, payload in expected[part:] + expected[:part]:
            if not same(loader.payload(loader.read(cursor, 5).pieces), payload):
                wrong.append(cursor)
            loader.evict(0.5)

    threads = [threading.Thread(target=work, args=(part,)) for part in range(0, len(expected), 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong


def test_a_chat_split_over_pieces_keeps_its_mask_in_step() -> None:
    loader = loader_of({"b": TEXTS["b"]}, tokenizer=byte_tokenizer(), shuffle="none")
    found = pieces(loader)
    payload = loader.payload(found)
    first = [i for i, piece in enumerate(found) if piece["row"] == 2 and piece["block"] == 0]
    trained = ""
    for i, following in itertools.zip_longest(first, first[1:]):
        length = int(found[i]["length"])
        assert (len(payload.tokens[i]) > length) == (following is not None)
        mask = payload.loss_mask[i]
        assert mask is not None
        trained += decode(payload.tokens[i][:length][mask[:length]])
    assert trained == "aaa<|im_end|>"


@settings(deadline=None)
@given(
    st.integers(1, 50),
    st.lists(
        st.tuples(st.sampled_from("ar"), st.integers(0, 5), st.integers(1, 20), st.integers(1, 3)),
        max_size=40,
    ),
)
def test_the_buffer_counts_its_bytes_and_keeps_its_bound(
    limit: int, steps: list[tuple[str, int, int, int]]
) -> None:
    buffer: Buffer[int, int] = Buffer(limit)
    sizes: dict[int, int] = {}
    for what, key, size, count in steps:
        if what == "a":
            if key not in buffer:
                sizes[key] = size
            buffer.add(key, sizes[key], sizes[key], count)
            assert buffer.get(key) == sizes[key]
        else:
            buffer.release(key, count)
        assert buffer.num_bytes == sum(sizes[k] for k in range(6) if k in buffer)
        assert buffer.num_bytes <= limit or sum(k in buffer for k in range(6)) == 1
    buffer.evict(1.0)
    assert buffer.num_bytes == 0


def test_the_buffer_lets_go_of_what_was_used_longest_ago() -> None:
    buffer: Buffer[str, int] = Buffer(30)
    for key in "abc":
        buffer.add(key, 1, 10, 1)
    buffer.get("a")
    buffer.add("d", 1, 10, 1)
    assert [key in buffer for key in "abcd"] == [True, False, True, True]
    buffer.evict(0.5)
    assert [key in buffer for key in "abcd"] == [False, False, False, True] or buffer.num_bytes <= 15
