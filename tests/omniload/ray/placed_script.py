"""A job on a cluster of three nodes: says on which of them its actors are."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

from omniload import DataLoader
from tests.omniload.mixtures import hard_mixture


def main(folder: Path) -> None:
    """Train on the first of the nodes, which has processors for a rank and two loaders."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    nodes: dict[str, str] = {}
    dirs: dict[str, str] = {}
    for name, num_cpus in (("trainer", 3), ("one", 4), ("other", 4)):
        # The names of sockets must not be long.
        dirs[name] = tempfile.mkdtemp(prefix="omniload-")
        node = cluster.add_node(num_cpus=num_cpus, object_store_memory=80 << 20, temp_dir=dirs[name])
        nodes[node.node_id] = name
    ray.init(cluster.address, _temp_dir=dirs["trainer"], log_to_driver=False, configure_logging=False)
    mixture = hard_mixture(folder / "data", steps=2)
    options = {"job": "placed", "loaders": 3, "shadows": 1, "loader_cpus": 0.5}
    with DataLoader(mixture, execution="ray", ray=options, timeout_s=240.0) as loader:
        list(loader)
        at = {}
        for one in ray.util.list_named_actors(all_namespaces=True):
            actor = ray.get_actor(one["name"], namespace=one["namespace"])
            stats, _ = ray.get(actor.stats.remote(), timeout=240.0)
            at[one["name"].split("-")[0] if "constructor" in one["name"] else one["name"]] = nodes.get(
                stats.node, stats.node
            )
    ray.shutdown()
    cluster.shutdown()
    for path in dirs.values():
        shutil.rmtree(path, ignore_errors=True)
    sys.stdout.write(json.dumps(at))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
