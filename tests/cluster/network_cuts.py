"""Cuts the network of a training job in two, and heals it: ``bash scripts/network_cuts.sh`` (needs root).

Whoever goes on must be the side that may, the other side must fence itself within its lease, no checkpoint may be
published by two sides, and the run must be the undisturbed one.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from megatron_lazarus.checkpoint.manifest import Manifest
from megatron_lazarus.elastic.settings import ElasticConfig
from tests.chaos.job import Line, TrainingJob, closing
from tests.chaos.nursery import Nursery
from tests.cluster.network import Network, network

CUT_AT_STEP = 6
SLACK_S = 2.0
"""A side may need this much longer than its lease to be gone: heartbeats, and the time of a loaded machine."""

LIMIT_S = 120.0
BOUND = "eth0"


@dataclass(frozen=True)
class Cut:
    """``away``: the hosts that are cut off from the others. ``goes_on``: the hosts that must go on, all others fence
    themselves, or (``may_return``) come back in time for the coordinator that was elected meanwhile. ``blip_s``: the
    network is healed after so long; None: never."""

    name: str
    hosts: int
    coordinator: int
    away: tuple[int, ...]
    goes_on: tuple[int, ...]
    heartbeat_timeout_s: float = 3.0
    lease_s: float = 10.0
    blip_s: float | None = None
    may_return: bool = False


CUTS = (
    Cut("3:2, coordinator with the 3", 5, 0, (3, 4), (0, 1, 2)),
    Cut("3:2, coordinator with the 2", 5, 4, (3, 4), (0, 1, 2)),
    Cut("2:2, coordinator's side goes on", 4, 0, (2, 3), (0, 1)),
    Cut("2:2, the same from the other side", 4, 3, (0, 1), (2, 3)),
    Cut("3:2 for 6 s, limit 8 s", 5, 0, (3, 4), (0, 1, 2, 3, 4), 8.0, 20.0, 6.0),
    Cut("3:2 for 6 s, limit 3 s", 5, 0, (3, 4), (0, 1, 2), blip_s=6.0),
    Cut("the same, coordinator with the 2", 5, 4, (3, 4), (0, 1, 2), blip_s=6.0, may_return=True),
)


class CutJob(TrainingJob):
    """Node ``nI`` lives on host I."""

    def __init__(self, nursery: Nursery, log_dir: Path, cut: Cut, net: Network, options: dict[str, Any]) -> None:
        self.net, self.cut = net, cut
        config = ElasticConfig(
            start_nodes=cut.hosts,
            heartbeat_interval_s=0.25,
            heartbeat_timeout_s=cut.heartbeat_timeout_s,
            lease_s=cut.lease_s,
        )
        super().__init__(nursery, log_dir, config, options)

    @property
    def address(self) -> str:
        return f"{self.net.address(self.cut.coordinator)}:{self.port}"

    def _start(self, name: str, *arguments: str, **environment: str) -> Any:
        host = self.cut.coordinator if name == "coordinator" else int(name.removeprefix("agent-n"))
        place = {"CHAOS_NETNS": self.net.path(host), "CHAOS_ADDRESS": self.net.address(host)}
        return super()._start(name, *arguments, **{**place, "GLOO_SOCKET_IFNAME": BOUND, **environment})

    def wait_until_fenced(self, nodes: list[str], since: float) -> dict[str, float]:
        """Seconds after which each of these nodes' workers had ended."""
        workers = {node: self.worker(node) for node in nodes}
        seconds: dict[str, float] = {}
        while len(seconds) < len(nodes):
            for node, worker in workers.items():
                if node not in seconds and not _lives(worker):
                    seconds[node] = time.monotonic() - since
            limit = self.cut.lease_s + SLACK_S
            assert time.monotonic() - since < limit, f"{set(nodes) - set(seconds)} live {limit:g} s after the cut"
            time.sleep(0.02)
        return seconds


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def run(nursery: Nursery, cut: Cut, log_dir: Path) -> dict[str, Any]:
    """One job with one cut; returns a line of the table. Raises AssertionError."""
    # Long enough that the side that goes on still trains when the other one has given up.
    options = {"total_steps": 60, "micro_batches": 6, "dropout": 0.1, "pause_s": 0.05, "save_every": 5}
    options["section"] = {"experts": {"min_replicas": 3}}
    fenced = [f"n{host}" for host in range(cut.hosts) if host not in cut.goes_on]
    with network(cut.hosts) as net, closing(CutJob(nursery, log_dir, cut, net, options)) as job:
        job.add(*(f"n{host}" for host in range(cut.hosts)))
        job.wait_for_step(CUT_AT_STEP)
        for node in fenced:
            job.expect_failure(node)
        began = time.time()
        net.cut(cut.away)
        since = time.monotonic()
        if cut.blip_s is not None:
            time.sleep(cut.blip_s)
            net.heal()
        seconds = {} if cut.may_return else job.wait_until_fenced(fenced, since)
        job.check(limit=LIMIT_S)
        return judge(job, cut, began, seconds)


def judge(job: CutJob, cut: Cut, began: float, seconds: Mapping[str, float]) -> dict[str, Any]:
    """Check what ``TrainingJob.check`` does not know of."""
    events = job.events()
    generations = [event for event in events if event["kind"] == "generation"]
    numbers = [event["generation"] for event in generations]
    assert numbers == sorted(set(numbers)), f"generations {numbers}"
    alive = sorted(f"n{host}" for host in cut.goes_on)
    last = sorted(generations[-1]["nodes"])
    assert last == alive or (cut.may_return and set(last) > set(alive)), generations[-1]
    published = list(publications(job.log_dir / "checkpoint"))
    assert published == sorted(published), f"checkpoints by time: {published}"
    # Two sides would both have committed something while they were apart.
    steps = [line for line in job.ledger().of("step") if line["time"] > began]
    worlds: dict[int, set[int]] = {}
    for line in steps:
        worlds.setdefault(line["generation"], set()).add(line["world"])
    assert all(len(sizes) == 1 for sizes in worlds.values()), worlds
    first = min((line["time"] for line in steps if line["generation"] == numbers[-1]), default=began)
    return {
        "cut": cut.name,
        "goes on": " ".join(last),
        "after s": f"{first - began:.1f}",
        "fenced after s": " ".join(f"{node} {value:.1f}" for node, value in sorted(seconds.items())) or "nobody",
        "lease_s": f"{cut.lease_s:g}",
        "coordinators": str(job.events_of("listening")),
        "published in generations": " ".join(str(generation) for _, generation in published),
        "largest difference of the loss": f"{difference(job):.1e}",
    }


def publications(folder: Path) -> Iterator[tuple[int, int]]:
    """(global step, generation) of every checkpoint, in the order in which they were published."""
    manifests = sorted(folder.glob("*/manifest.json"), key=lambda path: path.stat().st_mtime_ns)
    for path in manifests:
        manifest = Manifest.read(str(path.parent))
        yield manifest.global_steps, manifest.generation


def difference(job: CutJob) -> float:
    """Largest relative difference of a step's loss from the undisturbed run's."""
    wanted, found = job.reference().losses(), job.ledger().losses()
    return max(abs(loss - min(wanted[step])) / min(wanted[step]) for step in found for loss in found[step])


def show(lines: list[Line]) -> None:
    columns = list(lines[0])
    widths = [max(len(column), *(len(line[column]) for line in lines)) for column in columns]
    for line in [dict(zip(columns, columns, strict=True)), *lines]:
        print("  ".join(line[column].ljust(width) for column, width in zip(columns, widths, strict=True)).rstrip())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", type=int, nargs="*", metavar="I", help="only these cuts, counted from 0")
    parser.add_argument("--repeat", type=int, default=1)
    arguments = parser.parse_args()
    if os.geteuid():
        print("network_cuts: it makes network namespaces, for which it must be root", file=sys.stderr)
        return 2
    chosen = [CUTS[index] for index in arguments.only or range(len(CUTS))]
    lines: list[Line] = []
    failed = 0
    nursery = Nursery()
    try:
        for cut in chosen * arguments.repeat:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    lines.append(run(nursery, cut, Path(folder)))
                    print(f"{cut.name}: passed", flush=True)
                except AssertionError as error:
                    failed += 1
                    print(f"{cut.name}: FAILED: {error}", flush=True)
    finally:
        nursery.close()
    if lines:
        show(lines)
    print(f"{len(lines)} passed, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
