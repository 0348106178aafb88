"""Ray has an environment of its own (`make test-ray`); elsewhere these tests are not collected.

The cluster has three nodes, each with processes and an object store of its own, all on this machine.
"""

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.engine.conftest import TOY
from tests.random_model import TWO_LAYERS, random_model

collect_ignore_glob = [] if find_spec("ray") else ["*"]


@pytest.fixture(scope="session")
def cluster():
    """The address of a cluster of three nodes with one CPU each. Its first node has no actor."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    store = {"object_store_memory": 100 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **store})
    for _ in range(2):
        cluster.add_node(num_cpus=1, object_store_memory=100 << 20)
    yield cluster
    cluster.shutdown()


@pytest.fixture(scope="session")
def base(tmp_path_factory) -> dict[str, object]:
    """Settings of a small run, and the module `toy` and tasks `acts:NAME` for every process."""
    folder = tmp_path_factory.mktemp("ray")
    (folder / "toy.py").write_text(TOY)
    acts = Path(__file__).parents[1] / "engine" / "rollout"
    for path in (folder, acts):
        sys.path.insert(0, str(path))
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, (folder, acts)))
    return {
        "model": str(random_model(folder / "model", TWO_LAYERS)),
        "prompts": "4",
        "num_generations": "3",
        "sampling.max_tokens": "8",
        "virtual_shards": "4",
        "optimizer.lr": "1e-2",
        "evaluation.every": "3",
        "task.reward": "toy:letters",
        "task.reward_processes": "1",
        "workers": "1",
        "task.options": {"max_value": 9, "train": 20, "held_out": 10},
        "tracking": [],
        "staleness_schedule": "lagged",
        "max_staleness": 1,
    }


@pytest.fixture(scope="session")
def read_lines():
    return lambda path: [json.loads(line) for line in path.read_text().splitlines()]
