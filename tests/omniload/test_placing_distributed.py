"""Places of the ranks of a real job, and rows between them by its all-to-all."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from omniload.errors import PlaceError
from omniload.placing import ClientPlaceTree, Exchange, Parts, assign_encoders, parts_of_slices
from omniload.placing.slicing import zigzag
from tests.distributed import run_distributed
from tests.omniload.placing import encoded_by

WORLD = 4


def _refused_meshes(rank: int, world_size: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    tree = ClientPlaceTree.from_mesh(mesh)
    assert tree == ClientPlaceTree.of({"dp_replicate": 2, "dp_shard": 1, "tp": 2})
    for name in tree.names:
        assert tree.coordinate_of(rank, name) == mesh.get_local_rank(name)
    refused = []
    for other in (
        mesh["tp"],
        init_device_mesh("cpu", (world_size,)),
        DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("dp", "tp")),
        init_device_mesh("cpu", (4,), mesh_dim_names=("data",)),
    ):
        with pytest.raises(PlaceError) as caught:
            ClientPlaceTree.from_mesh(other)
        refused.append(str(caught.value))
    return refused


def _exchange(tree: ClientPlaceTree, seed: int) -> tuple[Exchange, list[list[int]]]:
    """The images of lanes of 64 tokens, their rows to the slices; with it, the rows that each rank wants."""
    rng = np.random.default_rng(seed)
    cp = tree.num_buckets("cp")
    parts: list[Parts] = []
    counts = [16 + 12 * lane for lane in range(tree.dp_size)]  # unlike, so that rows must move
    rows = np.concatenate([rng.multinomial(count, [1 / 8] * 8) for count in counts])
    roots = tree.fetchers(("pp", "tp"))
    wanted: list[list[int]] = [[] for _ in range(tree.world_size)]
    for lane, count in enumerate(counts):
        tokens = np.sort(rng.permutation(64)[:count])
        cut = zigzag(np.array([0, 30, 64]), cp)
        slices = [cut.of(place) for place in range(cp)]
        receivers = roots[tree.bucket_of(roots) == lane]
        items = slice(8 * lane, 8 * lane + 8)
        parts.append(parts_of_slices(rows[items], tokens=tokens, slices=slices, receivers=receivers))
        parts[-1].item[:] += 8 * lane
        row_at = {token: sum(counts[:lane]) + row for row, token in enumerate(tokens.tolist())}
        for rank, here in zip(receivers.tolist(), slices, strict=True):
            wanted[rank] = [row_at[token] for token in here.tolist() if token in row_at]
    joined = {
        name: np.concatenate([getattr(one, name) for one in parts])
        for name in ("item", "start", "rows", "receiver")
    }
    home = np.repeat(tree.fetchers(("pp", "cp", "tp")), 8)
    encoder = assign_encoders(rows, rows, home, num_ranks=tree.world_size)
    return Exchange.of_parts(rows, encoder=encoder, parts=Parts(**joined), num_ranks=tree.world_size), wanted


def _there_and_back(rank: int, text: str, seed: int) -> tuple[int, int]:
    exchange, wanted = _exchange(ClientPlaceTree.parse(text, world_size=dist.get_world_size()), seed)
    encoded = torch.from_numpy(encoded_by(exchange, rank))[:, None].repeat(1, 2)
    send_order, receive_order = (
        torch.from_numpy(order) for order in (exchange.send_order(rank), exchange.receive_order(rank))
    )
    send, receive = exchange.send_rows(rank).tolist(), exchange.receive_rows(rank).tolist()
    received = encoded.new_empty(sum(receive), 2)
    dist.all_to_all_single(received, encoded[send_order], receive, send)
    placed = received[receive_order]
    assert placed[:, 0].tolist() == placed[:, 1].tolist() == wanted[rank]

    gradient, back = torch.empty_like(received), torch.empty_like(encoded)
    gradient[receive_order] = placed
    arrived = torch.empty_like(encoded)
    dist.all_to_all_single(arrived, gradient, send, receive)
    back[send_order] = arrived
    assert torch.equal(back, encoded)
    return len(encoded), exchange.num_moved_rows


def _in_a_job(rank: int, world_size: int) -> tuple[list[str], list[tuple[int, int]]]:
    meshes = ("dp=4", "dp=2,tp=2", "dp=2,cp=2", "cp=4", "pp=2,dp=2")
    return _refused_meshes(rank, world_size), [
        _there_and_back(rank, text, seed) for seed, text in enumerate(meshes)
    ]


@pytest.mark.slow
def test_a_job_finds_its_places_and_its_rows_there_and_back() -> None:
    by_rank = run_distributed(_in_a_job, WORLD)
    for (part, nameless, swapped, unknown), _ in by_rank:
        assert part.startswith("mesh: tp=2 is not all ranks of the job in their order; pass the whole mesh")
        assert nameless.startswith("mesh: its axes have no names; give them some of dp, dp_replicate")
        assert swapped.startswith("mesh: dp=2 x tp=2 is not all ranks of the job in their order")
        assert unknown.startswith("mesh: there is no axis 'data'")
    for case in zip(*(rows for _, rows in by_rank), strict=True):
        assert all(encoded > 0 and moved > 0 for encoded, moved in case), "all ranks encode, and rows do move"
