"""Which node a rank of the ``deepspeed`` command belongs to, and what of the host is that node's."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from megatron_lazarus.elastic.place import Place, PlaceError
from tests.distributed.launch import REPOSITORY


def place(**changes: int) -> Place:
    values = {"RANK": 5, "LOCAL_RANK": 1, "LOCAL_SIZE": 4, "WORLD_SIZE": 8, "CROSS_RANK": 1, "CROSS_SIZE": 2}
    size = changes.pop("size", None)
    environment = {name: str(value) for name, value in {**values, "MASTER_PORT": 29500, **changes}.items()}
    return Place.from_environment({**environment, "MASTER_ADDR": "host0"}, size)


@pytest.mark.parametrize(
    ("size", "hosts", "node", "first", "nodes"),
    [
        (None, 2, "node1", 0, 2),
        (4, 2, "node1", 0, 2),
        (2, 2, "node1-0", 0, 4),
        (1, 2, "node1-1", 1, 8),
        (None, 1, "node0", 0, 1),
        (2, 1, "node0", 0, 2),
        (1, 1, "node1", 1, 4),
    ],
)
def test_nodes_of_hosts(size: int | None, hosts: int, node: str, first: int, nodes: int) -> None:
    found = place(size=size, CROSS_SIZE=hosts, CROSS_RANK=hosts - 1, WORLD_SIZE=4 * hosts)
    assert (found.node, found.first, found.nodes) == (node, first, nodes)


def test_devices_of_a_node() -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "4,5,6,7", "ZE_AFFINITY_MASK": "0"}
    assert place(size=2, LOCAL_RANK=3).device_lists(environment) == {"CUDA_VISIBLE_DEVICES": "6,7"}
    assert place().device_lists(environment) == {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}


def test_impossible_places() -> None:
    with pytest.raises(PlaceError, match="--ranks-per-node is 3; host 1 has 4 ranks"):
        place(size=3)
    with pytest.raises(PlaceError, match=r"WORLD_SIZE, CROSS_RANK.*deepspeed command"):
        Place.from_environment({"RANK": "0", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}, None)


LAUNCHER_OF_TWO = """
import os, subprocess, sys
cores = sorted(os.sched_getaffinity(0))[:2]
def start(rank, *command):
    bind = lambda: os.sched_setaffinity(0, {cores[rank]})
    return subprocess.Popen(command, env={**os.environ, "LOCAL_RANK": str(rank)}, preexec_fn=bind)
other = start(1, "sleep", "60")
leader = start(0, sys.executable, "-c", sys.argv[1])
status = leader.wait(60)
other.kill()
sys.exit(status)
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_workers_get_the_cores_of_their_ranks() -> None:
    # With a parent of their own, as under DeepSpeed's launcher: the worker pools of other tests are our children too.
    cores = sorted(os.sched_getaffinity(0))[:2]
    code = "import os; from megatron_lazarus.elastic.place import Place, bound_cores\n"
    code += "print({k: sorted(v) for k, v in bound_cores(Place.from_environment(os.environ, None)).items()})"
    names = {"RANK": "0", "LOCAL_SIZE": "2", "WORLD_SIZE": "2", "CROSS_RANK": "0", "CROSS_SIZE": "1"}
    result = subprocess.run(
        [sys.executable, "-c", LAUNCHER_OF_TWO, code],
        env={**os.environ, **names, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
        timeout=90,
    )
    assert result.stdout == f"{{0: [{cores[0]}], 1: [{cores[1]}]}}\n"
