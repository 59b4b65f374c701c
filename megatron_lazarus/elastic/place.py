"""Where a process that DeepSpeed's launcher has started stands: its node, its siblings on the host, its devices."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

SIBLING_LIMIT_S = 10.0
"""How long the launcher may take to start a sibling, and to bind it to its cores."""

_DEVICE_LISTS = (
    "CUDA_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
    "ASCEND_RT_VISIBLE_DEVICES",
    "MLU_VISIBLE_DEVICES",
    "SDAA_VISIBLE_DEVICES",
    "SUPA_VISIBLE_DEVICES",
)
_RUNNER_NAMES = ("deepspeed", "ds", "deepspeed.launcher.runner", "runner.py")


class PlaceError(ValueError):
    """The environment is not that of DeepSpeed's launcher, or a host cannot be split as asked for."""


@dataclass(frozen=True)
class Place:
    """What DeepSpeed's launcher says of a rank, and the size of the nodes its host is split into."""

    rank: int
    local_rank: int
    local_size: int
    world_size: int
    host: int
    hosts: int
    address: str
    port: int
    node_size: int

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], ranks_per_node: int | None) -> Place:
        """``ranks_per_node``: None makes a host one node. Raises PlaceError."""
        names = ("RANK", "LOCAL_RANK", "LOCAL_SIZE", "WORLD_SIZE", "CROSS_RANK", "CROSS_SIZE", "MASTER_PORT")
        missing = [name for name in (*names, "MASTER_ADDR") if name not in environment]
        if missing:
            raise PlaceError(f"{', '.join(missing)} not set: start it with the deepspeed command, or use `lazarus run`")
        rank, local_rank, local_size, world_size, host, hosts, port = (int(environment[name]) for name in names)
        size = local_size if ranks_per_node is None else ranks_per_node
        if size < 1 or local_size % size:
            raise PlaceError(f"--ranks-per-node is {size}; host {host} has {local_size} ranks, no multiple of it")
        return cls(rank, local_rank, local_size, world_size, host, hosts, environment["MASTER_ADDR"], port, size)

    @property
    def first(self) -> int:
        """Local rank of the process that acts for the whole node."""
        return self.local_rank - self.local_rank % self.node_size

    @property
    def nodes(self) -> int:
        """Nodes of the job."""
        return self.hosts if self.node_size == self.local_size else self.world_size // self.node_size

    @property
    def node(self) -> str:
        """Name of this node."""
        index = self.local_rank // self.node_size
        if self.node_size == self.local_size:
            return f"node{self.host}"
        return f"node{index}" if self.hosts == 1 else f"node{self.host}-{index}"

    def device_lists(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Variables that leave this node's devices visible; local ranks count from 0 on every node."""
        lists = {name: environment[name].split(",") for name in _DEVICE_LISTS if name in environment}
        last = self.first + self.node_size
        return {n: ",".join(ids[self.first : last]) for n, ids in lists.items() if len(ids) == self.local_size}


def divided_devices(
    environment: Mapping[str, str], nodes: int, size: int, nvidia: Path = Path("/proc/driver/nvidia/gpus")
) -> list[dict[str, str]]:
    """For each of ``nodes`` nodes of ``size`` workers on this host, variables that show it devices of its own.

    Nothing is divided among fewer than two nodes, on a CPU, and where no devices are known. Raises PlaceError if there
    are too few.
    """
    lists = {name: environment[name].split(",") for name in _DEVICE_LISTS if environment.get(name)}
    if not lists and "CUDA_VISIBLE_DEVICES" not in environment and nvidia.is_dir():
        lists = {"CUDA_VISIBLE_DEVICES": [str(index) for index, _ in enumerate(nvidia.iterdir())]}
    if nodes < 2 or environment.get("DS_ACCELERATOR") == "cpu":
        lists = {}
    for name, devices in lists.items():
        if 0 < len(devices) < nodes * size:
            raise PlaceError(
                f"{name} is {','.join(devices)}; {nodes} nodes of {size} workers need {nodes * size} devices (on the "
                "CPU: set DS_ACCELERATOR=cpu)"
            )
    return [
        {name: ",".join(devices[node * size : (node + 1) * size]) for name, devices in lists.items()}
        for node in range(nodes)
    ]


def sibling(local_rank: int) -> int | None:
    """Process id of the rank that our launcher has started, if it is there."""
    wanted, parent = f"LOCAL_RANK={local_rank}".encode(), os.getppid()
    for pid in _processes():
        # Processes come and go, and others' cannot be read.
        with contextlib.suppress(OSError):
            if parent_of(pid) == parent and wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                return pid
    return None


def wait_for_sibling(local_rank: int) -> int | None:
    """The same, as soon as it has been started; None if it is not within the limit."""
    deadline = time.monotonic() + SIBLING_LIMIT_S
    while (pid := sibling(local_rank)) is None and time.monotonic() < deadline:
        time.sleep(0.1)
    return pid


def bound_cores(place: Place) -> dict[int, set[int]]:
    """Cores that ``deepspeed --bind_cores_to_rank`` has bound our node's siblings to, by local rank in the node.

    Empty if it has not. Raises TimeoutError.
    """
    unbound, own = os.sched_getaffinity(os.getppid()), os.sched_getaffinity(0)
    if own == unbound or place.node_size == 1:
        return {}
    cores = {0: own}
    deadline = time.monotonic() + SIBLING_LIMIT_S
    while len(cores) < place.node_size:
        index = len(cores)
        pid = wait_for_sibling(place.first + index)
        if pid is not None and (found := os.sched_getaffinity(pid)) != unbound:
            cores[index] = found
        elif time.monotonic() > deadline:
            raise TimeoutError(f"local rank {place.first + index} is not there, or not bound to cores")
        else:
            time.sleep(0.1)
    return cores


def runner() -> int | None:
    """Process id of the deepspeed command, if it is the one that has started our launcher."""
    pid = parent_of(os.getppid())
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:4]
    except OSError:
        return None
    return pid if any(Path(os.fsdecode(word)).name in _RUNNER_NAMES for word in words) else None


def parent_of(pid: int) -> int:
    """Raises OSError if there is no such process."""
    # The name, in parentheses, may itself hold any character.
    return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])


def _processes() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())
