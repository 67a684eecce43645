"""`SourceLoader.read` gives every row once, from any cursor and in any chunks, and counts what gives nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniload.errors import SampleError, StateError
from omniload.loader import SourceLoader, open_loader
from omniload.mixture import Mixture, SourceSpec
from omniload.pieces import Cursor, SampleChunk
from tests.omniload.loading import address, byte_tokenizer, chunks, loader_of, pieces, tokens

HERE = "tests.omniload.loading"
VARYING = (f"{HERE}:varying",)
BAD = -1


def rows(*first: int) -> list[dict[str, list[int]]]:
    """A row for each first token, of a length that depends on it; `BAD` ones are quarantined."""
    return [{"input_ids": [one] + [100] * (abs(one) % 23)} for one in first]


def files_of(sizes: Sequence[int]) -> dict[str, list[dict[str, list[int]]]]:
    """Files of these numbers of rows, every row with a first token of its own, every ninth bad."""
    starts = np.cumsum([0, *sizes])
    return {
        f"{i:03}": rows(*(BAD if row % 9 == 4 else row for row in range(starts[i], starts[i] + size)))
        or pa.table({"input_ids": pa.array([], pa.list_(pa.int64()))})
        for i, size in enumerate(sizes)
    }


FILES = files_of([7, 0, 10, 1, 12])
NUM_ROWS = 30


def flat(found: Sequence[SampleChunk]) -> list[tuple[Any, ...]]:
    """Everything about each sample that must not depend on how the order is cut to chunks."""
    samples = []
    for chunk in found:
        begin = chunk.begin
        for i in range(len(chunk.position)):
            own = chunk.pieces[chunk.first_piece[i] : chunk.first_piece[i + 1]]
            place = (begin.epoch, begin.window, int(chunk.position[i]), int(chunk.sub[i]))
            counts = (int(chunk.tokens[i]), int(chunk.truncated[i]), int(chunk.dropped[i]))
            samples.append((place, counts, own.tobytes()))
    return samples


def counts(found: Sequence[SampleChunk]) -> tuple[int, int]:
    """Raw rows and quarantined ones."""
    return sum(int(c.rows.sum()) for c in found), sum(int(c.failures.sum()) for c in found)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=6),
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(0, 2**63 - 1),
    st.sampled_from(["none", "window"]),
    st.integers(0, 3),
)
def test_every_row_comes_exactly_once_per_epoch(
    sizes: list[int], block_rows: int, window_blocks: int, seed: int, shuffle: str, epoch: int
) -> None:
    loader = loader_of(
        files_of(sizes),
        block_rows=block_rows,
        window_blocks=window_blocks,
        seed=seed,
        shuffle=shuffle,
        seq_len=99,
    )
    found = list(chunks(loader, Cursor(epoch=epoch)))
    firsts = [one[0] for chunk in found for one in tokens(loader, chunk.pieces)]
    assert sorted(firsts) == [row for row in range(sum(sizes)) if row % 9 != 4]
    assert counts(found) == (sum(sizes), sum(row % 9 == 4 for row in range(sum(sizes))))
    assert all((chunk.pieces["epoch"] == epoch).all() for chunk in found)


LOADERS: dict[str, dict[str, Any]] = {
    "split": {},
    "hf labels": {"labels": "hf"},
    "truncated": {"overflow": "truncate"},
    "dropped": {"overflow": "drop"},
    "none to three": {"transforms": VARYING},
    "filtered, dropped": {"transforms": (f"{HERE}:keep_even",), "overflow": "drop"},
    "held out": {"held_out": 0.4},
    "stored order": {"shuffle": "none", "transforms": VARYING},
}


@pytest.mark.parametrize("keys", LOADERS.values(), ids=LOADERS.keys())
def test_the_cut_into_chunks_carries_no_meaning(keys: dict[str, Any]) -> None:
    """For any ``max_samples``, and read by a loader that lets go of everything between the calls."""
    whole = list(chunks(loader_of(FILES, **keys)))
    assert len(whole) > 3
    for max_samples in (1, 2, 3, 7):
        loader = loader_of(FILES, **keys)
        parts = []
        for chunk in chunks(loader, max_samples=max_samples):
            assert len(chunk.tokens) <= max_samples
            parts.append(chunk)
            loader.evict()
        assert flat(parts) == flat(whole)
        assert counts(parts) == counts(whole)


@pytest.mark.parametrize("keys", LOADERS.values(), ids=LOADERS.keys())
def test_reading_resumed_at_any_sample_gives_the_rest(keys: dict[str, Any]) -> None:
    """The cursor after each sample, as the planner makes it; the row counts are the rest's too."""
    loader = loader_of(FILES, **keys)
    whole = list(chunks(loader))
    everything = flat(whole)
    done, rows_done = 0, 0
    assert any(chunk.sub.any() for chunk in whole) == ("transforms" in keys and keys["transforms"] == VARYING)
    for chunk in whole:
        for i in range(len(chunk.tokens)):
            done, rows_done = done + 1, rows_done + int(chunk.rows[i])
            cursor = Cursor(
                epoch=0,
                window=chunk.begin.window,
                file=chunk.begin.file,
                block=chunk.begin.block,
                position=int(chunk.position[i]),
                sub=int(chunk.sub[i]) + 1,
            )
            rest = list(chunks(loader_of(FILES, **keys), cursor, max_samples=4))
            assert flat(rest) == everything[done:]
            assert counts(rest)[0] == NUM_ROWS - rows_done
        rows_done += int(chunk.rows[-1])
    assert (done, rows_done) == (len(everything), NUM_ROWS)


def test_the_end_of_a_full_chunk_is_the_cursor_after_its_last_sample() -> None:
    chunk = loader_of(FILES).read(Cursor(), 2)
    assert chunk.end == Cursor(position=int(chunk.position[1]), sub=1)
    assert chunk.rows[-1] == 0


@pytest.mark.parametrize("keys", LOADERS.values(), ids=LOADERS.keys())
def test_every_token_is_accounted_for(keys: dict[str, Any]) -> None:
    for chunk in chunks(loader_of(FILES, **keys), max_samples=5):
        for i, read in enumerate(chunk.tokens.tolist()):
            own = chunk.pieces[chunk.first_piece[i] : chunk.first_piece[i + 1]]
            assert read == own["length"].sum() + chunk.truncated[i] + chunk.dropped[i]
            assert own["start"].tolist() == list(range(0, 8 * len(own), 8))
            assert (own["length"][:-1] == 8).all()


def test_a_window_that_gives_nothing_is_an_empty_chunk_that_goes_on() -> None:
    files = {"a": rows(BAD, BAD, BAD), "b": rows(3, 2), "c": rows(BAD)}
    found = list(chunks(loader_of(files, block_rows=3, window_blocks=1)))
    assert sorted(len(chunk.tokens) for chunk in found) == [0, 0, 2]
    assert sum(int(chunk.failures.sum()) for chunk in found) == 4
    empty = next(chunk for chunk in found if not len(chunk.tokens))
    assert (len(empty.pieces), empty.first_piece.tolist()) == (0, [0])


def test_a_source_without_rows_ends_each_epoch_at_once() -> None:
    nothing = pa.table({"input_ids": pa.array([], pa.list_(pa.int32()))})
    chunk = loader_of({"a": nothing, "b": nothing}).read(Cursor(epoch=3), 10)
    assert (len(chunk.tokens), chunk.ends_epoch, chunk.end) == (0, True, Cursor(epoch=4))


@pytest.mark.parametrize("transforms", [(), VARYING])
def test_the_two_parts_of_a_split_are_disjoint_and_complete(transforms: tuple[str, ...]) -> None:
    keys = {"transforms": transforms, "held_out": 0.3, "seq_len": 99}
    parts = {
        split: [address(p) for p in pieces(loader_of(FILES, split=split, **keys))]
        for split in ("train", "held_out")
    }
    everything = pieces(loader_of(FILES, transforms=transforms, seq_len=99))
    assert parts["train"]
    assert parts["held_out"]
    assert sorted(parts["train"] + parts["held_out"]) == sorted(address(p) for p in everything)


def test_the_held_out_rows_do_not_depend_on_order_epoch_or_window() -> None:
    def held_out(epoch: int, **keys: Any) -> list[int]:
        loader = loader_of(FILES, held_out=0.3, split="held_out", seq_len=99, **keys)
        return sorted(one[0] for one in tokens(loader, pieces(loader, Cursor(epoch=epoch))))

    base = held_out(0)
    assert base
    assert base == held_out(4) == held_out(0, window_blocks=9, block_rows=4) == held_out(0, shuffle="none")
    assert base != held_out(0, seed=6)


def test_an_overlong_sample_is_refused_where_it_stands() -> None:
    files = {"a": rows(1, 2, 12, 3)}
    loader = loader_of(files, overflow="error", shuffle="none", block_rows=9)
    chunk = loader.read(Cursor(), 10)
    assert [one[0] for one in tokens(loader, chunk.pieces)] == [1, 2]
    with pytest.raises(
        SampleError, match=r"'memory': memory:a, row 2: a sample of 13 tokens, over seq_len 8; set"
    ):
        loader.read(chunk.end, 10)
    assert len(pieces(loader, Cursor(position=3))) == 1


def test_a_cursor_outside_its_window_is_refused() -> None:
    with pytest.raises(StateError, match="row 7 of a window of 4 rows"):
        loader_of(FILES).read(Cursor(position=7), 1)


@pytest.mark.parametrize("seed", range(3))
def test_reads_in_any_order_give_what_reads_in_order_give(seed: int) -> None:
    """Stateless: cursors of any window and epoch, in any order, from one loader."""
    loader = loader_of(FILES, transforms=VARYING)
    cursors = [c.begin for epoch in range(2) for c in chunks(loader, Cursor(epoch=epoch), max_samples=3)]
    expected = {cursor: flat([loader_of(FILES, transforms=VARYING).read(cursor, 3)]) for cursor in cursors}
    for i in np.random.default_rng(seed).permutation(len(cursors)):
        assert flat([loader.read(cursors[i], 3)]) == expected[cursors[i]]


def write(path: Path, texts: list[str]) -> None:
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"text": texts}), path, row_group_size=40)
    else:
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
def test_text_files_are_read_whole_over_several_runs(tmp_path: Path, ending: str) -> None:
    """More rows than are tokenised at a time."""
    texts = [f"row {i}" for i in range(1500)]
    write(tmp_path / f"x.{ending}", texts)
    mixture = Mixture(
        seq_len=64,
        packs=1,
        window_blocks=30,
        sources={"s": SourceSpec(path=(str(tmp_path / "*"),), weight=1)},
    )
    # The mixture itself would want the file of the tokenizer that is handed over here.
    mixture = mixture.model_copy(update={"eos": "<eos>"})
    loader = open_loader("s", mixture, tokenizer=byte_tokenizer())
    found = list(chunks(loader, max_samples=700))
    assert len(found[0].tokens) == 512
    seen = [byte_tokenizer().decode(one) for c in found for one in loader.payload(c.pieces).tokens]
    assert sorted(seen) == sorted(f"{text}<eos>" for text in texts)
    assert seen != [f"{text}<eos>" for text in texts]


def test_the_first_sample_does_not_wait_for_the_window(tmp_path: Path) -> None:
    """Only a run of rows is tokenised for it, and only the window's files are opened."""
    write(tmp_path / "x.parquet", [f"row {i}" for i in range(4000)])
    write(tmp_path / "y.parquet", ["y"] * 1000)
    mixture = Mixture(
        seq_len=64,
        packs=1,
        window_blocks=20,
        sources={"s": SourceSpec(path=(str(tmp_path / "*"),), weight=1)},
    )
    loader: SourceLoader = open_loader("s", mixture, tokenizer=byte_tokenizer())
    loader.read(Cursor(), 1)
    window_bytes = 20 * 40 * 40
    assert 0 < loader.buffered_bytes < 10 * window_bytes
    assert len(loader._reader.buffer._entries) == 512


def test_the_first_of_many_long_rows_does_not_wait_for_the_others() -> None:
    loader = loader_of({"x": [{"text": "x" * 300_000}] * 40}, block_rows=20, tokenizer=byte_tokenizer())
    loader.read(Cursor(), 1)
    assert len(loader._reader.buffer._entries) == 1
    assert [len(one.tokens) for one in chunks(loader, max_samples=15)] == [1] * 40


def test_a_window_comes_in_two_parts_so_that_who_reads_ahead_does_not_hold_two() -> None:
    loader = loader_of({"a": [{"input_ids": [1, 2, 3]}] * 1200}, window_blocks=2, block_rows=600)
    sizes, cursor = [], Cursor()
    while cursor.epoch == 0:
        chunk = loader.read(cursor, 10_000)
        sizes.append(len(chunk.tokens))
        cursor = chunk.end
    assert sizes == [600, 600]
