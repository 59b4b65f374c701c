"""The scripts of ``scripts/slurm`` on a cluster of virtual nodes: ``bash scripts/run_cluster_tests.sh`` (needs root).

A run trains the tiny GPT while nodes are powered off and come back, elements are cancelled and preempted. It must go
on long before Slurm itself has noticed anything, end well by Slurm's account, and have the undisturbed loss curve.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.cluster.runs import RunFolder, settings
from tests.cluster.slurm import Slurm, slurm

NODES = 4


@dataclass
class Run(RunFolder):
    """One under Slurm."""

    cluster: Slurm = field(kw_only=True)

    def submit(self, pattern: str, *options: str) -> str:
        """Returns the job's number."""
        variables = {
            "DATA_PATH": str(self.data),
            "TRAIN_SCRIPT": "tests/cluster/paced_pretrain.py",
            "PACE_S": "0.5",
            "HURRY": str(self.folder / "hurry"),
            **settings(),
        }
        command = [sys.executable, "-m", "megatron_lazarus.cli", "submit", pattern, "--job-name", self.name]
        command += ["--pretrain", "scripts/pretrain_gpt_tiny.sh", "--gpus-per-node", "1", "--output", str(self.folder)]
        pairs = [f"{name}={value}" for name, value in variables.items()]
        shown = self.cluster.command(*command, "--env", *pairs, *options)
        self.note(shown.strip())
        return shown.split()[-1]

    def coordinators_node(self) -> str:
        pid = next(event["pid"] for event in reversed(self.events()) if event["kind"] == "listening")
        nodes = [node for node in self.cluster.nodes if pid in {one.pid for one in self.cluster.processes(node)}]
        return nodes[0]

    def power_off(self, node: str, left: list[str]) -> None:
        """The others must train again before Slurm has noticed."""
        began = time.time()
        self.cluster.power_off(node)
        self.wait_for_nodes(*left, limit_s=60)
        regrouped = [event["time"] for event in self.events() if event["kind"] == "working"][-1] - began
        state = self.cluster.state(node)
        assert state in ("allocated", "mixed", "idle"), f"Slurm was faster: {node} is {state}"
        self.note(f"power-off of {node}: training again on {len(left)} nodes after {regrouped:.1f} s; Slurm: {state}")

    def power_on(self, node: str) -> None:
        """When Slurm has found it dead, so that it starts the node's element again."""
        began = time.time()
        self.wait_until(lambda: "down" in self.cluster.state(node) or None, f"Slurm's finding {node} dead")
        noticed = time.time() - began
        self.cluster.power_on(node)
        self.wait_for_nodes(*self.cluster.nodes)
        seconds = time.time() - began - noticed
        self.note(f"Slurm found {node} dead {noticed:.0f} s later; switched on, it trains after {seconds:.0f} s")


# -- the runs ---------------------------------------------------------------------------------------------------


def array(run: Run, reference: Mapping[int, float]) -> None:
    """A node that dies and comes back, one with the coordinator, a cancelled element, growth, preemption."""
    cluster = run.cluster
    job = run.submit("array", "--nodes", str(NODES))
    run.wait_for_nodes(*cluster.nodes)
    host = run.coordinators_node()
    victim, cancelled, preempted = (node for node in cluster.nodes if node != host)

    run.power_off(victim, [host, cancelled, preempted])
    run.power_on(victim)

    run.power_off(host, [victim, cancelled, preempted])
    run.note(f"the coordinator is now on {run.coordinators_node()}")
    run.power_on(host)

    element = element_on(cluster, job, cancelled)
    cluster.command("scancel", element)
    run.wait_until(lambda: departure(run, cancelled), f"the departure of {cancelled}")
    run.wait_for_nodes(*(node for node in cluster.nodes if node != cancelled))
    run.note(f"scancel of element {element}: {cancelled} has left")
    grown = run.submit("array", "--nodes", "1", "--first-element", str(NODES))
    run.wait_for_nodes(*cluster.nodes)
    run.note(f"one more element: training on {NODES} nodes")

    urgent = cluster.folder / "urgent.sh"
    urgent.write_text("#!/usr/bin/env bash\nsleep 5\n")
    options = [f"--nodelist={preempted}", "--exclusive", "--partition=urgent", f"--output={cluster.folder}/urgent.out"]
    other = cluster.command("sbatch", *options, str(urgent)).split()[-1]
    run.wait_until(lambda: departure(run, preempted), f"the departure of {preempted}")
    run.note(f"preemption: {preempted} has left, {cluster.job(other)['JobState']} is the job that wanted it")
    run.wait_until(lambda: cluster.job(other)["JobState"] == "COMPLETED" or None, "the end of the urgent job")
    run.wait_for_nodes(*cluster.nodes)
    run.note(f"{preempted} is back")

    run.hurry()
    jobs = cluster.wait_for_end(300)
    failed = [event for event in run.events() if event["kind"] == "failure"]
    assert {event["node"] for event in failed} == {victim, host}, failed
    for one in jobs:
        element = f"{one.get('ArrayJobId', one['JobId'])}_{one.get('ArrayTaskId', '')}"
        run.note(f"element {element}: {one['JobState']}, {one['ExitCode']}, restarts {one['Restarts']}")
        if one["JobId"] != other and one.get("ArrayJobId") in (job, grown):
            wanted = "CANCELLED" if one["JobState"] == "CANCELLED" else "COMPLETED"
            assert (one["JobState"], one["ExitCode"]) == (wanted, "0:0") or wanted == "CANCELLED", one
    assert sum(one["JobState"] == "CANCELLED" for one in jobs) == 1, jobs
    run.compare(reference)


def element_on(cluster: Slurm, job: str, node: str) -> str:
    listed = cluster.command("squeue", "--noheader", "--array", f"--jobs={job}", f"--nodelist={node}", "--format=%i")
    return listed.split()[0]


def departure(run: Run, node: str) -> bool | None:
    """Whether the node has left, and not come back since."""
    for event in reversed(run.events()):
        if event.get("node") == node and event["kind"] in ("left", "waiting", "failure"):
            return event["kind"] == "left" or None
    return None


def one_job(run: Run, reference: Mapping[int, float]) -> None:
    """A node of a job dies: the others end it well."""
    cluster = run.cluster
    job = run.submit("job", "--nodes", str(NODES))
    run.wait_for_nodes(*cluster.nodes)
    batch_host = cluster.job(job)["BatchHost"]
    victim = next(node for node in cluster.nodes if node not in (batch_host, run.coordinators_node()))
    run.power_off(victim, [node for node in cluster.nodes if node != victim])
    run.hurry()
    (ended,) = cluster.wait_for_end(300)
    run.note(f"job {job}: {ended['JobState']}, {ended['ExitCode']}")
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), ended
    run.compare(reference)
    cluster.power_on(victim)


def batch_host_dies(run: Run, reference: Mapping[int, float]) -> None:
    """Nobody is left to end the job but its tasks."""
    cluster = run.cluster
    job = run.submit("job", "--nodes", str(NODES), "--env", "ALIVE_LIMIT_S=20")
    run.wait_for_nodes(*cluster.nodes)
    batch_host = cluster.job(job)["BatchHost"]
    run.power_off(batch_host, [node for node in cluster.nodes if node != batch_host])
    run.hurry()
    (ended,) = cluster.wait_for_end(300)
    run.note(f"job {job}, whose batch host died: {ended['JobState']}")
    run.compare(reference)
    cluster.power_on(batch_host)


RUNS: Mapping[str, Callable[[Run, Mapping[int, float]], None]] = {
    "array": array,
    "job": one_job,
    "batch-host": batch_host_dies,
}


def run_on_slurm(name: str, folder: Path, data: Path, reference: Mapping[int, float]) -> None:
    """One of them on a cluster of its own. Raises AssertionError or SlurmError."""
    place = folder / "slurm"
    place.mkdir()
    with slurm(place, NODES) as cluster:
        RUNS[name](Run(name, folder, data, cluster=cluster), reference)
