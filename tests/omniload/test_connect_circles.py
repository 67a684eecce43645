"""Who receives from whom on any mesh, and what of the lanes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniload.connecting.circles import View, circles_of
from omniload.errors import PlaceError
from omniload.placing import ClientPlaceTree, Needs
from omniload.placing.axes import SHARED_AXES
from omniload.placing.slicing import SLICINGS

AXES = ("dp", "pp", "cp", "tp")


@st.composite
def meshes(draw: st.DrawFn) -> ClientPlaceTree:
    names = draw(st.permutations(AXES))[: draw(st.integers(0, 4))]
    return ClientPlaceTree.of({name: draw(st.integers(1, 3)) for name in names})


@given(
    meshes(),
    st.sets(st.sampled_from(SHARED_AXES)),
    st.sampled_from([None, *SLICINGS]),
    st.sampled_from(["loop", "v"]),
)
def test_every_rank_is_in_one_circle_of_ranks_with_the_same_lanes(
    tree: ClientPlaceTree, axes: set[str], slicing: str | None, order: str
) -> None:
    circles = circles_of(tree, sorted(axes), slicing=slicing, stage_order=order)  # type: ignore[arg-type]
    assert sorted(rank for circle in circles for rank in circle.ranks) == tree.ranks.tolist()
    for circle in circles:
        assert len({tree.bucket_of(rank) for rank in circle.ranks}) == 1
        assert circle.source == min(circle.ranks)
        assert [len(ranks) for _, ranks in circle.audiences()] == [
            len(ranks) for _, ranks in circles[0].audiences()
        ], "so that all ranks can make the groups of all circles"
        assert sorted(rank for _, ranks in circle.audiences() for rank in ranks) == sorted(circle.receivers)
        views = dict(zip(circle.ranks, circle.views, strict=True))
        for rank, view in views.items():
            part, parts = tree.slice_of(rank)
            assert (view.part, view.num_parts) == ((part, parts) if slicing else (0, 1))
        for view, ranks in circle.audiences():
            assert {views[rank] for rank in ranks} == {view}
        assert len({view for view, _ in circle.audiences()}) == len(circle.audiences())


def test_the_stages_of_a_pipeline_get_what_they_have_a_use_for() -> None:
    tree = ClientPlaceTree.parse("pp=4")
    [loop] = circles_of(tree, ["pp"], slicing=None, stage_order="loop")
    first, *middle, last = (view.needs for view in loop.views)
    assert first == Needs.LAYOUT | Needs.INPUTS
    assert middle == [Needs.LAYOUT] * 2
    assert last == Needs.LAYOUT | Needs.TARGETS
    assert [ranks for _, ranks in loop.audiences()] == [(1, 2), (3,)]
    [there_and_back] = circles_of(tree, ["pp"], slicing=None, stage_order="v")
    assert there_and_back.views[0] == View()
    assert {view.needs for view in there_and_back.views[1:]} == {Needs.LAYOUT}
    [alone] = circles_of(ClientPlaceTree.parse("tp=2"), ["tp"], slicing="zigzag", stage_order="v")
    assert alone.views == (View(), View())


@pytest.mark.parametrize(
    ("axes", "slicing", "order", "message"),
    [
        (["dp"], None, "loop", "broadcast: the ranks of 'dp' need different lanes"),
        (["tpp"], None, "loop", "mesh: there is no axis 'tpp'"),
        (
            ["cp"],
            "zagzig",
            "loop",
            "context_parallel: 'zagzig' is none of contiguous, zigzag, per_document, or None",
        ),
        (["cp"], None, "w", "stage_order: 'w' is neither 'loop' nor 'v'"),
    ],
)
def test_what_cannot_be_shared_is_refused(
    axes: list[str], slicing: str | None, order: str, message: str
) -> None:
    with pytest.raises(PlaceError, match=message):
        circles_of(ClientPlaceTree.parse("dp=2,cp=2"), axes, slicing=slicing, stage_order=order)  # type: ignore[arg-type]
