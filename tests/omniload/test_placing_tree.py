"""Which rank of a mesh runs, fetches, receives and needs what."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import omniload.placing
from omniload.errors import PlaceError
from omniload.placing import ClientPlaceTree, Needs
from omniload.placing.axes import AXES, DATA_AXES, SHARED_AXES


@st.composite
def meshes(draw: st.DrawFn) -> ClientPlaceTree:
    """Meshes of up to five axes in any order and up to 3 ranks along each."""
    names = draw(st.permutations(AXES))[: draw(st.integers(0, 5))]
    return ClientPlaceTree.of({name: draw(st.integers(1, 3)) for name in names})


def by_counting(tree: ClientPlaceTree) -> list[dict[str, int]]:
    """Coordinates of every rank, by walking the tree."""
    return [
        dict(zip(tree.names, place, strict=True))
        for place in itertools.product(*(range(n) for n in tree.sizes))
    ]


@given(meshes())
@settings(max_examples=1000)
def test_every_answer_is_that_of_a_walk_through_the_tree(tree: ClientPlaceTree) -> None:
    places = by_counting(tree)
    assert tree.world_size == len(places)
    data = [tuple(value for name, value in place.items() if name in DATA_AXES) for place in places]
    dp_rank = [sorted(set(data)).index(one) for one in data]
    assert tree.bucket_of(tree.ranks).tolist() == dp_rank
    assert tree.bucket_of(tree.ranks, "world").tolist() == list(range(tree.world_size))
    by_axis = tree.coordinates_of(tree.ranks)
    assert {name: values.tolist() for name, values in by_axis.items()} == {
        name: [place[name] for place in places] for name in tree.names
    }
    for rank in {0, tree.world_size // 2, tree.world_size - 1}:
        assert tree.coordinates_of(rank) == places[rank]
        place = places[rank]
        assert tree.slice_of(rank) == (place.get("cp", 0), tree.num_buckets("cp"))
    for axis in set(AXES) - {"dp"}:
        assert tree.coordinate_of(tree.ranks, axis).tolist() == [place.get(axis, 0) for place in places]


@given(meshes(), st.integers(1, 3))
@settings(max_examples=1000)
def test_the_lanes_of_all_ranks_are_the_same_step_on_every_mesh(tree: ClientPlaceTree, per_rank: int) -> None:
    num_lanes = per_rank * tree.dp_size
    lanes = tree.lanes_of(tree.ranks, num_lanes)
    assert lanes.shape == (tree.world_size, per_rank)
    shared = tree.world_size // tree.dp_size
    assert np.bincount(lanes.ravel(), minlength=num_lanes).tolist() == [shared] * num_lanes
    fetched = lanes[tree.fetchers(SHARED_AXES)]
    assert sorted(fetched.ravel().tolist()) == list(range(num_lanes)), "each lane is fetched once"
    for rank in {0, tree.world_size // 2, tree.world_size - 1}:
        assert tree.lanes_of(rank, num_lanes).tolist() == lanes[rank].tolist()
        assert tree.place(rank).dp_rank == tree.bucket_of(rank)
        assert tree.place(rank).dp_size == tree.dp_size


@given(meshes(), st.sets(st.sampled_from(SHARED_AXES)))
@settings(max_examples=1000)
def test_a_broadcast_reaches_every_rank_once_from_a_rank_with_the_same_lanes(
    tree: ClientPlaceTree, axes: set[str]
) -> None:
    groups = tree.broadcast_groups(sorted(axes))
    assert sorted(groups.ravel().tolist()) == tree.ranks.tolist()
    assert groups[:, 0].tolist() == tree.fetchers(sorted(axes)).tolist()
    for group in groups:
        assert (
            set(tree.root_of(group, sorted(axes)).tolist())
            == {int(group[0])}
            == {tree.root_of(int(group[-1]), sorted(axes))}
        )
        assert len(set(tree.bucket_of(group).tolist())) == 1
        assert group.tolist() == sorted(group.tolist())
    assert groups.shape[1] == math.prod(tree.num_buckets(axis) for axis in axes)


@given(meshes())
def test_each_lane_finds_its_inputs_and_targets_in_one_stage_of_each_pipeline(tree: ClientPlaceTree) -> None:
    stages = tree.num_buckets("pp")
    ends = [Needs.INPUTS in tree.needs(rank) for rank in tree.ranks.tolist()]
    assert sum(ends) == tree.world_size // stages
    for rank in tree.ranks.tolist():
        needs = tree.needs(rank)
        assert Needs.LAYOUT in needs
        assert (Needs.TARGETS in needs) == (tree.coordinate_of(rank, "pp") == stages - 1)


def test_a_stage_is_given_what_it_has_a_use_for() -> None:
    tree = ClientPlaceTree.of({"pp": 3})
    lane = (
        "input_ids",
        "targets",
        "labels",
        "cu_seqlens",
        "max_seqlen",
        "position_ids",
        "step",
        "pixel_values",
    )
    layout = ["cu_seqlens", "max_seqlen", "position_ids", "step"]
    kept = [[key for key in lane if tree.needs(rank).holds(key)] for rank in range(3)]
    assert kept == [["input_ids", *layout, "pixel_values"], layout, ["targets", "labels", *layout]]
    assert all(ClientPlaceTree.of({}).needs(0).holds(key) for key in lane)


def test_neighbours_form_buckets_of_the_size_asked_for() -> None:
    tree = ClientPlaceTree.of({"dp_replicate": 2, "cp": 2, "dp_shard": 4})
    assert tree.bucket_of(tree.ranks, "dp", group_size=4).tolist() == [0] * 8 + [1] * 8
    assert tree.bucket_of(tree.ranks, "world", group_size=8).tolist() == [0] * 8 + [1] * 8
    assert tree.bucket_of(tree.ranks, ("dp", "cp")).tolist() == tree.ranks.tolist()
    assert tree.bucket_of(tree.ranks, "cp").tolist() == [0, 0, 0, 0, 1, 1, 1, 1] * 2
    assert tree.bucket_of(tree.ranks, "tp").tolist() == [0] * 16, "an axis that the mesh lacks has one place"
    assert tree.bucket_of(13, "dp", group_size=2) == tree.bucket_of(tree.ranks, "dp", group_size=2)[13] == 2


def test_expert_parallel_ranks_run_lanes_of_their_own() -> None:
    tree = ClientPlaceTree.parse("dp=2,ep=4,tp=2")
    assert tree.dp_size == 8
    assert len({tuple(tree.lanes_of(rank, 16).tolist()) for rank in range(16)}) == 8


def test_a_mesh_is_written_and_described_outermost_first() -> None:
    tree = ClientPlaceTree.parse(" pp=4, dp=8,cp=2 ", world_size=64)
    assert tree == ClientPlaceTree.of({"pp": 4, "dp": 8, "cp": 2})
    assert (
        tree.describe() == "pp=4 x dp=8 x cp=2, outermost first: world_size 64, dp_size 8, ranks per lane 8"
    )
    assert (
        ClientPlaceTree.of({}).describe()
        == "dp=1, outermost first: world_size 1, dp_size 1, ranks per lane 1"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is not an axis and its size"),
        ("dp", "'dp' is not an axis and its size"),
        ("dp=", "'dp=' is not an axis"),
        ("dp=8;cp=2", "'dp=8;cp=2' is not an axis"),
        ("dp=-1", "'dp=-1' is not an axis"),
        ("dp=2.0", "'dp=2.0' is not an axis"),
        ("dp=0", "size of 'dp' is 0; give a whole number from 1 on"),
        ("dp=²", "'dp=²' is not an axis"),
        ("dp=2,dp=2", "axis 'dp' is there twice"),
        ("dp_shrad=2", "no axis 'dp_shrad'; did you mean 'dp_shard'?"),
        ("fsdp=2", "no axis 'fsdp'"),
        ("dp=99999999,tp=99999999", "is more than 16777216 ranks"),
        (f"dp={'9' * 5000}", "is not an axis and its size"),
    ],
)
def test_a_mesh_that_makes_no_sense_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(PlaceError) as caught:
        ClientPlaceTree.parse(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("size", [2.0, "2", None, True, 0, -3, float("nan")])
def test_a_size_is_a_whole_number(size: object) -> None:
    with pytest.raises(PlaceError, match="size of 'dp' is"):
        ClientPlaceTree.of({"dp": size})  # type: ignore[dict-item]
    with pytest.raises(PlaceError, match="size of 'dp' is"):
        ClientPlaceTree(names=("dp",), sizes=(size,))  # type: ignore[arg-type]


def test_names_that_are_none_are_refused_in_one_line() -> None:
    with pytest.raises(PlaceError, match=r"there is no axis 'dp\\n'; did you mean 'dp'\?"):
        ClientPlaceTree.of({"dp\n": 2})
    with pytest.raises(PlaceError, match="there is no axis 3; known are: dp"):
        ClientPlaceTree.of({3: 2})  # type: ignore[dict-item]
    with pytest.raises(PlaceError, match="2 axes and 1 sizes; give one size per axis"):
        ClientPlaceTree(names=("dp", "tp"), sizes=(2,))


def test_a_mesh_must_multiply_out_to_the_ranks_of_the_job() -> None:
    with pytest.raises(
        PlaceError, match=r"dp=8 x cp=2 is 16 ranks, but the job has 24; fitting.* dp=12 or cp=3"
    ):
        ClientPlaceTree.of({"dp": 8, "cp": 2}, world_size=24)
    with pytest.raises(PlaceError, match="is 6 ranks, but the job has 7; start 6 ranks, or change the sizes"):
        ClientPlaceTree.parse("dp=3,cp=2", world_size=7)
    with pytest.raises(PlaceError, match="the job has 0; start"):
        ClientPlaceTree.parse("dp=3,cp=2", world_size=0)


def test_lanes_that_ranks_cannot_share_are_refused_with_the_nearest_that_they_can() -> None:
    tree = ClientPlaceTree.of({"dp": 8, "tp": 2})
    with pytest.raises(PlaceError) as caught:
        tree.lanes_of(0, 12)
    assert str(caught.value) == (
        "lanes: 12 cannot be shared by the 8 data-parallel ranks of dp=8 x tp=2; nearest dp_size for these lanes:"
        " [4, 6, 12]; nearest lanes for this mesh: [8, 16]"
    )
    with pytest.raises(PlaceError, match="nearest lanes for this mesh: \\[8"):
        tree.lanes_of(0, 4)
    with pytest.raises(PlaceError, match="lanes: 0 is below 1"):
        tree.lanes_of(0, 0)


def test_ranks_and_axes_that_are_not_there_are_refused() -> None:
    tree = ClientPlaceTree.of({"dp": 6, "tp": 2})
    for rank in (-1, 12, 10**30):
        with pytest.raises(PlaceError, match=f"rank: {rank} is not in 0..11 of dp=6 x tp=2"):
            tree.bucket_of(rank)
    with pytest.raises(PlaceError, match="rank: 12 is not in"):
        tree.lanes_of(np.array([0, 12]), 6)
    with pytest.raises(PlaceError, match="no axis 'wolrd'; did you mean 'world'"):
        tree.bucket_of(0, "wolrd")
    with pytest.raises(
        PlaceError, match=r"group_size: 4 does not divide the 6 places of dp; nearest.*\[2, 3, 6\]"
    ):
        tree.bucket_of(0, "dp", group_size=4)
    with pytest.raises(PlaceError, match="group_size: 0 does not divide"):
        tree.num_buckets("world", 0)
    for axes in ("dp", "world", "ep", ("tp", "dp_shard")):
        with pytest.raises(PlaceError, match="need different lanes; broadcast over pp, cp, tp"):
            tree.fetchers(axes)


def test_the_public_surface_is_sorted_and_complete() -> None:
    names = omniload.placing.__all__
    assert names == sorted(names)
    assert all(getattr(omniload.placing, name).__name__ == name for name in names)


def test_importing_it_loads_no_torch() -> None:
    script = "import sys, omniload.placing; assert not {'torch', 'pyarrow', 'pydantic'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
