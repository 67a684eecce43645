"""The ledger balances to the token: over any data, any overflow policy, any place of resume, and at the end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from omniload import DataLoader
from omniload.ledger import Ledger
from omniload.loader import open_loader
from omniload.mixture import Mixture
from omniload.pieces import Cursor, SampleChunk
from omniload.planner import Planner, StreamState
from tests.omniload.mixtures import hard_mixture, on_both_runtimes, write_parquet

SEQ_LEN = 16


class Read:
    """What the planner reads, straight from the loaders, in chunks of any size."""

    def __init__(self, mixture: Mixture, chunk_samples: int) -> None:
        self._loaders = [open_loader(name, mixture) for name in mixture.names]
        self._chunk_samples = chunk_samples

    def read(self, source: int, cursor: Cursor) -> SampleChunk:
        return self._loaders[source].read(cursor, self._chunk_samples)


# None stands for a row that is quarantined; one row fits whatever the policy.
lengths = st.lists(st.none() | st.integers(1, 4 * SEQ_LEN), max_size=40).map(lambda rows: [*rows, 5])
policies = st.sampled_from(["split", "truncate", "drop"])


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(lengths, policies, st.integers(1, 3), st.sampled_from(["stop", "drop_source"])),
        min_size=1,
        max_size=3,
    ),
    st.integers(1, 9),
    st.sampled_from(["tokens", "samples"]),
    st.none() | st.integers(1, 12),
)
@example(
    [([40, None, 9] * 9, policy, 2, "drop_source") for policy in ("split", "truncate", "drop")],
    4,
    "tokens",
    None,
)
def test_every_token_is_served_truncated_dropped_or_carried(
    tmp_path: Path,
    sources: list[tuple[list[int | None], str, int, str]],
    chunk_samples: int,
    unit: str,
    steps: int | None,
) -> None:
    specs = {}
    for i, (rows, overflow, repeat, on_exhausted) in enumerate(sources):
        ids = [[1] * length if length else [] for length in rows]
        table = pa.table({"input_ids": pa.array(ids, pa.list_(pa.int32()))})
        pq.write_table(table, tmp_path / f"{i}.parquet", row_group_size=7)
        specs[f"s{i}"] = {
            "path": str(tmp_path / f"{i}.parquet"),
            "weight": i + 1,
            "overflow": overflow,
            "repeat": repeat,
            "on_exhausted": on_exhausted,
        }
    keys = {"seq_len": SEQ_LEN, "packs": 2, "unit": unit, "steps": steps, "window_blocks": 2}
    mixture = Mixture.load({**keys, "sources": specs})
    names = mixture.names
    served, samples = np.zeros(len(names), np.int64), [0] * len(names)
    planner = Planner(mixture, Read(mixture, chunk_samples), StreamState.initial(len(names)))
    while True:
        before = planner.state
        plan = planner.next()
        ledger = Ledger.of(mixture, planner.state)
        if plan is not None:
            np.add.at(served, plan.pieces["source"], plan.pieces["length"].astype(np.int64))
        carried = planner.state.carried
        for i, name in enumerate(names):
            account = ledger.sources[name]
            assert (
                account.read_tokens
                == account.emitted_tokens + account.truncated_tokens + account.dropped_tokens
            )
            assert account.emitted_tokens == account.served_tokens + account.carried_tokens
            assert account.served_tokens == served[i]
            assert account.carried_tokens == int(
                carried["length"][carried["source"] == i].sum(dtype=np.int64)
            )
            last = plan is None or planner.state.step == steps
            assert account.dropped_at_end == (account.carried_tokens if last else 0)
            assert account.emitted_samples >= samples[i]
            samples[i] = account.emitted_samples
            _holds_against_the_data(sources[i], account)
        if plan is None:
            break
        assert planner.state != before
        state = StreamState.from_json(json.loads(json.dumps(planner.state.to_json(names))), names)
        planner = Planner(mixture, Read(mixture, chunk_samples), state)


def _holds_against_the_data(source: tuple[list[int | None], str, int, str], account: Any) -> None:
    """At the end of its last pass, the account of a source is what its rows and policy say."""
    rows, overflow, repeat, _ = source
    if not account.exhausted:
        return
    good = [length for length in rows if length]
    long = [length for length in good if length > SEQ_LEN]
    assert account.rows == repeat * len(rows)
    assert account.failures == repeat * (len(rows) - len(good))
    assert account.read_tokens == repeat * sum(good)
    assert account.truncated_tokens == (
        repeat * sum(n - SEQ_LEN for n in long) if overflow == "truncate" else 0
    )
    assert account.dropped_tokens == (repeat * sum(long) if overflow == "drop" else 0)
    assert account.emitted_samples == repeat * (len(good) - (len(long) if overflow == "drop" else 0))


@on_both_runtimes
def test_the_loader_reports_what_it_served(tmp_path: Path) -> None:
    """Against the tokens in the lanes themselves, over a resume, with what is left at the end named so."""
    mixture = hard_mixture(tmp_path, steps=20)
    served: dict[str, int] = dict.fromkeys(mixture["sources"], 0)

    def serve(loader: DataLoader, steps: int) -> None:
        for group in loader.steps():
            for lane in group:
                for row in loader.samples(lane).to_pylist():
                    served[row["source"]] += row["end"] - row["start"]
            if group[0]["step"] == steps - 1:
                break

    with DataLoader(mixture) as loader:
        serve(loader, 7)
        state = json.loads(json.dumps(loader.state_dict()))
        assert all(source.dropped_at_end == 0 for source in loader.ledger().sources.values())
    with DataLoader(mixture) as loader:
        loader.load_state_dict(state)
        serve(loader, 20)
        ledger = loader.ledger()
    assert {name: source.served_tokens for name, source in ledger.sources.items()} == served
    assert sum(source.dropped_at_end for source in ledger.sources.values()) > 0
    for source in ledger.sources.values():
        assert source.dropped_at_end == source.carried_tokens == source.emitted_tokens - source.served_tokens


def test_the_share_is_in_the_unit_of_the_weights(tmp_path: Path) -> None:
    write_parquet(tmp_path / "long.parquet", [[1] * 16] * 50)
    write_parquet(tmp_path / "short.parquet", [[1] * 2] * 50)
    sources = {
        name: {"path": str(tmp_path / f"{name}.parquet"), "weight": 1, "on_exhausted": "repeat"}
        for name in ("long", "short")
    }
    shares = {}
    for unit in ("tokens", "samples"):
        with DataLoader({"seq_len": 16, "packs": 4, "steps": 50, "unit": unit, "sources": sources}) as loader:
            list(loader)
            shares[unit] = {name: source.share for name, source in loader.ledger().sources.items()}
            tokens = loader.ledger().sources
    assert shares["tokens"] == pytest.approx({"long": 0.5, "short": 0.5}, abs=0.01)
    assert shares["samples"] == pytest.approx({"long": 0.5, "short": 0.5}, abs=0.01)
    assert tokens["long"].emitted_tokens == pytest.approx(8 * tokens["short"].emitted_tokens, rel=0.02)
