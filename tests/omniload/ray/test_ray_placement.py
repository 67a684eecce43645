"""Where the actors of a job run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniload.runtime.ray.layout import Loader, deal
from omniload.runtime.ray.placement import Node, home, places


def node(name: str, cpus: float, *, ranks: int = 0, **resources: float) -> Node:
    return Node(name=name, cpus=cpus, ranks=ranks, trains=ranks > 0, resources=resources)


def placed(
    loaders: Sequence[Loader], nodes: Sequence[Node], cpus: float = 0.0, **resources: float
) -> dict[str, str]:
    return places(loaders, nodes, cpus=cpus, resources=resources)


def loaders_of(num_loaders: int, num_shadows: int = 0) -> Sequence[Loader]:
    return deal([1.0] * num_loaders, num_loaders, num_shadows).loaders


def test_spare_processors_of_nodes_that_train_come_first_and_then_other_nodes() -> None:
    nodes = [node("a", 8), node("b", 4, ranks=2), node("c", 3, ranks=2), node("d", 2)]
    found = placed(loaders_of(6), nodes)
    assert [found[f"loader-{i}"] for i in range(6)] == ["b", "b", "c", "a", "a", "a"]


def test_what_loaders_reserve_is_what_they_need() -> None:
    nodes = [node("trains", 8, ranks=4), node("other", 8)]
    found = placed(loaders_of(4), nodes, cpus=2.0)
    assert [found[f"loader-{i}"] for i in range(4)] == ["trains", "trains", "other", "other"]


def test_where_no_node_has_room_the_least_loaded_takes_it() -> None:
    nodes = [node("a", 2, ranks=2), node("b", 2, ranks=2)]
    found = placed(loaders_of(4), nodes)
    assert sorted(found.values()) == ["a", "a", "b", "b"]


def test_a_shadow_is_on_another_node_than_what_it_stands_for_even_if_that_has_no_room() -> None:
    nodes = [node("big", 64, ranks=1), node("small", 1, ranks=1)]
    found = placed(loaders_of(3, 1), nodes)
    for i in range(3):
        assert found[f"loader-{i}"] == "big"
        assert found[f"loader-{i}.shadow-0"] == "small"


def test_two_shadows_are_on_two_nodes_where_there_are_three() -> None:
    nodes = [node(name, 8) for name in "abc"]
    found = placed(loaders_of(1, 2), nodes)
    assert set(found.values()) == {"a", "b", "c"}


def test_on_one_node_everything_is_on_it() -> None:
    assert set(placed(loaders_of(2, 1), [node("only", 2, ranks=2)]).values()) == {"only"}


def test_loaders_go_only_where_their_resources_are_and_while_they_last() -> None:
    nodes = [node("train", 64, ranks=1), node("ssd", 2, ssd=2.0), node("more", 2, ssd=1.0)]
    found = placed(loaders_of(4), nodes, ssd=1.0)
    assert sorted(found.values()) == ["more", "ssd", "ssd"]
    assert len(found) == 3, "Ray says what is missing for the fourth"


@given(
    st.integers(1, 6),
    st.integers(0, 2),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), min_size=1, max_size=5),
    st.randoms(use_true_random=False),
)
def test_the_order_of_nodes_is_no_matter_and_no_loader_is_without_one(
    num_loaders: int, num_shadows: int, sizes: list[tuple[int, int]], order: object
) -> None:
    nodes = [node(str(i), cpus, ranks=ranks) for i, (cpus, ranks) in enumerate(sizes)]
    loaders = loaders_of(num_loaders, num_shadows)
    found = placed(loaders, nodes)
    assert found.keys() == {one.name for one in loaders}
    order.shuffle(nodes)  # type: ignore[attr-defined]
    assert placed(loaders, nodes) == found
    for one in loaders:
        if one.shadow and len(nodes) > num_shadows:
            assert found[one.name] != found[one.name.split(".")[0]]


def test_the_home_of_a_job_is_the_node_of_rank_0() -> None:
    nodes = [
        Node(name=name, cpus=1, resources={}, addresses=frozenset({address, f"host-{name}"}))
        for name, address in (("a", "10.0.0.1"), ("b", "10.0.0.2"), ("c", "10.0.0.2"))
    ]
    assert home(nodes, "b", "10.0.0.1") == "a"
    assert home(nodes, "c", "host-a") == "a"
    assert home(nodes, "c", "10.0.0.2") == "c", "of several on one machine, the own"
    assert home(nodes, "b", "localhost") == "b"
    assert home(nodes, "b", None) == "b"


@pytest.mark.slow
def test_actors_are_where_they_were_placed_on_a_cluster_of_several_nodes(tmp_path: Path) -> None:
    script = [sys.executable, "-m", "tests.omniload.ray.placed_script", str(tmp_path)]
    env = os.environ | {"OMNILOAD_RUNTIME_DIR": str(tmp_path / "runtime")}
    done = subprocess.run(script, capture_output=True, text=True, timeout=600, env=env, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    at = json.loads(done.stdout.splitlines()[-1])
    # Where the planner goes is a wish only: it reserves nothing, and Ray may find the node too busy to start it.
    assert at["constructor"] == at["loader-0"] == at["loader-1"] == "trainer"
    assert at["loader-2"] in ("one", "other")
    for i in range(3):
        assert at[f"loader-{i}.shadow-0"] != at[f"loader-{i}"]
