"""The planner as a whole: nothing lost, nothing twice, resume at every step, exhaustion, independence of chunks."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniload.errors import SourceError, StateError
from omniload.mixture import Mixture
from omniload.pieces import Cursor, SampleChunk
from omniload.planner import Plan, Planner, SourceState, StreamState
from tests.omniload.planning import FakeMetadata

SEQ_LEN = 16


def mixture(sources: dict[str, dict[str, Any]], **keys: Any) -> Mixture:
    specs = {name: {"path": "unused", "weight": 1.0, **spec} for name, spec in sources.items()}
    return Mixture.load({"seq_len": SEQ_LEN, "packs": 4, "lanes": 2, "sources": specs, **keys})


def run(given_mixture: Mixture, metadata: FakeMetadata, state: StreamState | None = None) -> list[Plan]:
    planner = Planner(given_mixture, metadata, state or StreamState.initial(len(given_mixture.names)))
    plans = []
    while (plan := planner.next()) is not None:
        plans.append(plan)
    return plans


def ids(plan: Plan) -> list[tuple[int, ...]]:
    keys = ("source", "epoch", "block", "row", "sub", "start")
    return [tuple(int(piece[key]) for key in keys) for piece in plan.pieces]


rows = st.lists(st.lists(st.integers(1, 3 * SEQ_LEN), max_size=3), min_size=1, max_size=40).filter(any)


@settings(deadline=None)
@given(st.lists(rows, min_size=1, max_size=3), st.integers(1, 9), st.integers(1, 7))
def test_every_piece_is_planned_once_or_left_over(
    sources: list[list[list[int]]], chunk_samples: int, window_rows: int
) -> None:
    metadata = FakeMetadata(sources, SEQ_LEN, chunk_samples, window_rows)
    names = {f"s{i}": {"on_exhausted": "drop_source"} for i in range(len(sources))}
    plans = run(mixture(names), metadata)
    planned = [piece for plan in plans for piece in ids(plan)]
    assert len(set(planned)) == len(planned)
    existing = {
        (source, 0, row // window_rows, row % window_rows, sub, start)
        for source, source_rows in enumerate(sources)
        for row, samples in enumerate(source_rows)
        for sub, tokens in enumerate(samples)
        for start in range(0, tokens, SEQ_LEN)
    }
    assert set(planned) <= existing
    left_tokens = sum(sum(map(sum, source)) for source in sources) - sum(
        int(plan.pieces["length"].sum()) for plan in plans
    )
    # What is left cannot fill the packs of one more step, each at least half full on average.
    assert left_tokens <= 4 * SEQ_LEN
    for step, plan in enumerate(plans):
        assert plan.step == step
        assert plan.num_packs == 4
        fill = np.add.reduceat(plan.pieces["length"].astype(int), plan.offsets[:-1])
        assert fill.max() <= SEQ_LEN


@settings(deadline=None, max_examples=50)
@given(rows, rows, st.integers(1, 9))
def test_the_state_after_a_step_gives_the_rest_of_the_stream(
    first: list[list[int]], second: list[list[int]], chunk_samples: int
) -> None:
    given_mixture = mixture(
        {"a": {"repeat": 2, "on_exhausted": "drop_source"}, "b": {"on_exhausted": "drop_source"}}
    )
    metadata = FakeMetadata([first, second], SEQ_LEN, chunk_samples)
    planner = Planner(given_mixture, metadata, StreamState.initial(2))
    states, plans = [planner.state], []
    while (plan := planner.next()) is not None:
        plans.append(plan)
        states.append(planner.state)
    for step, state in enumerate(states):
        text = json.dumps(state.to_json(["a", "b"]))
        restored = StreamState.from_json(json.loads(text), ["a", "b"])
        rest = run(given_mixture, metadata, restored)
        assert [plan.hash for plan in rest] == [plan.hash for plan in plans[step:]]


def test_neither_plans_nor_states_depend_on_how_chunks_are_cut() -> None:
    generator = np.random.default_rng(0)
    sources = [
        [generator.integers(1, 40, generator.integers(0, 4)).tolist() for _ in range(50)] for _ in range(3)
    ]
    given_mixture = mixture(
        {
            "a": {"on_exhausted": "repeat"},
            "b": {"on_exhausted": "drop_source"},
            "c": {"on_exhausted": "repeat"},
        },
        steps=150,
    )

    def outcome(chunk_samples: int) -> list[tuple[str, str]]:
        planner = Planner(
            given_mixture, FakeMetadata(sources, SEQ_LEN, chunk_samples), StreamState.initial(3)
        )
        found = []
        while (plan := planner.next()) is not None:
            found.append((plan.hash, json.dumps(planner.state.to_json(given_mixture.names))))
        return found

    reference = outcome(10**6)
    assert len(reference) == 150
    assert any(json.loads(state)["sources"]["b"][2] for _, state in reference), "source b was never exhausted"
    for chunk_samples in (1, 2, 3, 17):
        assert outcome(chunk_samples) == reference


def test_weights_hold_in_tokens_when_documents_differ_a_hundredfold() -> None:
    given_mixture = mixture(
        {"short": {"weight": 1, "on_exhausted": "repeat"}, "long": {"weight": 1, "on_exhausted": "repeat"}},
        steps=200,
    )
    plans = run(given_mixture, FakeMetadata([[[160]] * 50, [[2]] * 50], SEQ_LEN))
    tokens = np.zeros(2, int)
    for plan in plans:
        np.add.at(tokens, plan.pieces["source"], plan.pieces["length"].astype(int))
    assert abs(tokens[0] - tokens[1]) <= 2 * 160 + 2 * 4 * SEQ_LEN


def test_a_schedule_changes_the_weights_at_its_step() -> None:
    given_mixture = mixture(
        {"a": {"on_exhausted": "repeat"}, "b": {"weight": 0, "on_exhausted": "repeat"}},
        steps=20,
        schedule=[{"step": 10, "weights": {"a": 0, "b": 1}}],
    )
    plans = run(given_mixture, FakeMetadata([[[8]] * 9, [[8]] * 9], SEQ_LEN))
    drawn = {(int(piece["born"]) >= 10, int(piece["source"])) for plan in plans for piece in plan.pieces}
    assert drawn == {(False, 0), (True, 1)}


@given(st.lists(st.integers(1, 3 * SEQ_LEN), min_size=1, max_size=60), st.integers(1, 9))
def test_a_source_that_says_stop_ends_the_stream_for_all(lengths: list[int], chunk_samples: int) -> None:
    given_mixture = mixture({"a": {"on_exhausted": "repeat"}, "b": {"on_exhausted": "stop"}}, steps=1000)
    rows = [[[8]] * 9, [[length] for length in lengths]]
    plans = run(given_mixture, FakeMetadata(rows, SEQ_LEN, chunk_samples))
    # Half of the tokens are b's, give or take two of the longest samples and what is left over.
    assert len(plans) * 4 * SEQ_LEN <= 2 * sum(lengths) + 4 * 3 * SEQ_LEN + 2 * 4 * SEQ_LEN


def test_a_source_without_weight_is_never_drawn_even_when_the_others_are_spent() -> None:
    given_mixture = mixture(
        {"a": {"on_exhausted": "drop_source"}, "b": {"weight": 0, "on_exhausted": "repeat"}}, steps=50
    )
    plans = run(given_mixture, FakeMetadata([[[8]] * 20, [[8]] * 20], SEQ_LEN))
    assert plans
    assert {int(piece["source"]) for plan in plans for piece in plan.pieces} == {0}


def test_repeat_reads_a_source_as_often_as_it_says() -> None:
    given_mixture = mixture({"a": {"repeat": 3}})
    plans = run(given_mixture, FakeMetadata([[[16]] * 12], SEQ_LEN))
    epochs = [int(piece["epoch"]) for plan in plans for piece in plan.pieces]
    assert len(plans) == 9
    assert [epochs.count(epoch) for epoch in range(4)] == [12, 12, 12, 0]


def test_no_piece_waits_much_longer_than_the_bound() -> None:
    generator = np.random.default_rng(1)
    # Pieces of 9 to 16 tokens never share a pack, so the short ones are always the last choice.
    lengths = [[int(n)] for n in generator.integers(9, 17, 400)]
    plans = run(mixture({"a": {"on_exhausted": "repeat"}}, steps=300), FakeMetadata([lengths], SEQ_LEN))
    waits = [plan.step - int(piece["born"]) for plan in plans for piece in plan.pieces]
    assert max(waits) >= 2, "nothing ever waited: the test proves nothing"
    assert max(waits) <= 4


@pytest.mark.parametrize("policy", ["stop", "drop_source", "repeat"])
def test_a_source_without_a_token_is_an_error_not_a_hang_nor_silence(policy: str) -> None:
    given_mixture = mixture({"a": {"on_exhausted": policy}})
    with pytest.raises(SourceError, match="source 'a' gave no token in a whole pass"):
        run(given_mixture, FakeMetadata([[[], []]], SEQ_LEN))


@pytest.mark.parametrize("chunk_samples", [1, 2, 100])
def test_a_pass_that_gives_nothing_after_one_that_did_is_no_error(chunk_samples: int) -> None:
    """Whatever the cut of the chunks, and from whatever step the run is resumed."""

    class OddPassesGiveNothing:
        def __init__(self) -> None:
            self.full = FakeMetadata([[[9], [9], [9]]], SEQ_LEN, chunk_samples, window_rows=2)
            self.empty = FakeMetadata([[[], [], []]], SEQ_LEN, chunk_samples, window_rows=2)

        def read(self, source: int, cursor: Cursor) -> SampleChunk:
            return (self.empty if cursor.epoch % 2 else self.full).read(source, cursor)

    given_mixture = mixture({"a": {"on_exhausted": "repeat"}}, steps=20)
    planner = Planner(given_mixture, OddPassesGiveNothing(), StreamState.initial(1))
    hashes, states = [], [planner.state]
    while (plan := planner.next()) is not None:
        hashes.append(plan.hash)
        states.append(planner.state)
    assert len(hashes) == 20
    assert states[-1].sources[0].cursor.epoch > 20
    for step, state in enumerate(states):
        resumed = Planner(given_mixture, OddPassesGiveNothing(), state)
        rest = []
        while (plan := resumed.next()) is not None:
            rest.append(plan.hash)
        assert rest == hashes[step:]


def test_more_passes_than_sixteen_bits_hold() -> None:
    state = StreamState(
        step=0,
        sources=(SourceState(cursor=Cursor(epoch=70_000), read_tokens=9),),
        deficits=(0,),
        carried=StreamState.initial(1).carried,
    )
    given_mixture = mixture({"a": {"on_exhausted": "repeat"}}, steps=1)
    [plan] = run(given_mixture, FakeMetadata([[[9], [9]]], SEQ_LEN), state)
    assert int(plan.pieces["epoch"].min()) == 70_000


@pytest.mark.parametrize(
    "damage", [{"sources": {}}, {"carried": "!"}, {"sources": {"a": [1]}}, {"step": None}]
)
def test_a_damaged_state_is_refused(damage: dict[str, Any]) -> None:
    values = {**StreamState.initial(1).to_json(["a"]), **damage}
    with pytest.raises(StateError):
        StreamState.from_json(values, ["a"])


def test_a_state_whose_carried_pieces_are_damaged_is_refused() -> None:
    planner = Planner(mixture({"a": {}}), FakeMetadata([[[9]] * 30], SEQ_LEN), StreamState.initial(1))
    planner.next()
    values = planner.state.to_json(["a"])
    packed = bytearray(base64.b64decode(values["carried"]))
    assert len(planner.state.carried), "nothing is carried"
    assert len(StreamState.from_json(values, ["a"]).carried)
    for at in range(len(packed)):
        packed[at] ^= 1
        damaged = {**values, "carried": base64.b64encode(packed).decode()}
        with pytest.raises(StateError, match="its carried pieces are not those that were saved"):
            StreamState.from_json(damaged, ["a"])
        packed[at] ^= 1


def test_the_state_stays_small() -> None:
    generator = np.random.default_rng(2)
    sources = [[[int(n)] for n in generator.integers(1, 40, 200)] for _ in range(20)]
    given_mixture = mixture({f"s{i:02}": {"on_exhausted": "repeat"} for i in range(20)}, steps=50)
    planner = Planner(given_mixture, FakeMetadata(sources, SEQ_LEN), StreamState.initial(20))
    while planner.next() is not None:
        pass
    assert len(planner.state.carried) > 0
    size = len(json.dumps(planner.state.to_json(given_mixture.names)))
    assert size <= 200 + 128 * 20 + 48 * len(planner.state.carried)
