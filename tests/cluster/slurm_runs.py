"""The scripts of ``scripts/slurm`` on a cluster of virtual nodes: ``bash scripts/run_cluster_tests.sh`` (needs root).

A run trains the tiny GPT while nodes are powered off and come back, elements are cancelled and preempted. It must go
on long before Slurm itself has noticed anything, end well by Slurm's account, and have the undisturbed loss curve.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from megatron_lazarus.reporting.loss_curves import read_curve
from tests.cluster.slurm import Slurm, SlurmError, slurm

REPOSITORY = Path(__file__).resolve().parents[2]
ITERATIONS = 600
NODES = 4
LIMIT_S = 120.0
TOLERANCE = 1e-2
"""Relative, of the loss: float32 sums of other worlds are rounded otherwise, and training multiplies that."""

Found = TypeVar("Found")


@dataclass
class Run:
    """One training run under Slurm. ``notes``: what was seen."""

    cluster: Slurm
    name: str
    folder: Path
    data: Path
    notes: list[str] = field(default_factory=list)

    @property
    def log_dir(self) -> Path:
        return self.folder / "logs"

    def submit(self, pattern: str, *options: str) -> str:
        """Returns the job's number."""
        variables = {
            "DATA_PATH": str(self.data),
            "TRAIN_SCRIPT": "tests/cluster/paced_pretrain.py",
            "PACE_S": "0.4",
            "HURRY": str(self.folder / "hurry"),
            **settings(),
        }
        command = [sys.executable, "-m", "megatron_lazarus.cli", "submit", pattern, "--job-name", self.name]
        command += ["--pretrain", "scripts/pretrain_gpt_tiny.sh", "--gpus-per-node", "1", "--output", str(self.folder)]
        pairs = [f"{name}={value}" for name, value in variables.items()]
        shown = self.cluster.command(*command, "--env", *pairs, *options)
        self.note(shown.strip())
        return shown.split()[-1]

    def note(self, text: str) -> None:
        self.notes.append(text)
        print(f"{time.strftime('%H:%M:%S')} {self.name}: {text}", flush=True)

    def events(self) -> list[dict[str, Any]]:
        path = self.log_dir / "events.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.split("\n")[:-1]]

    def wait_until(self, condition: Callable[[], Found | None], what: str, limit_s: float = LIMIT_S) -> Found:
        return self.cluster.wait_until(condition, f"{self.name}: {what} has not happened", limit_s)

    def generation(self) -> tuple[int, list[str]]:
        """Of the newest one that works: its number and nodes."""
        newest: dict[str, Any] = {"generation": 0, "nodes": []}
        working = 0
        for event in self.events():
            if event["kind"] == "generation":
                newest = event
            elif event["kind"] == "working":
                working = event["generation"]
        return (working, sorted(newest["nodes"])) if working == newest["generation"] else (0, [])

    def wait_for_nodes(self, *nodes: str, limit_s: float = LIMIT_S) -> None:
        wanted = sorted(nodes)
        self.wait_until(lambda: self.generation()[1] == wanted or None, f"training on {wanted}", limit_s)

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

    def hurry(self) -> None:
        (self.folder / "hurry").touch()

    def compare(self, reference: Mapping[int, float]) -> None:
        result = json.loads((self.log_dir / "result.json").read_text())
        assert result["status"] == "completed", result
        curve = read_curve(self.log_dir)
        assert curve.keys() == reference.keys(), f"iterations {sorted(curve.keys() ^ reference.keys())}"
        worst = max(abs(curve[step] - loss) / loss for step, loss in reference.items())
        assert worst <= TOLERANCE, f"the loss curve differs by {worst:.1e}"
        self.note(f"largest relative difference of the loss from the undisturbed run's: {worst:.1e}")


def settings() -> dict[str, str]:
    """Of the training script, for all runs."""
    chosen = {"TRAIN_ITERS": ITERATIONS, "SAVE_INTERVAL": 100, "LOG_INTERVAL": 10}
    chosen |= {"EVAL_INTERVAL": ITERATIONS // 2, "EVAL_ITERS": 2}
    return {name: str(value) for name, value in chosen.items()} | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


def prepare_data(folder: Path) -> Path:
    """A data set of this repository's own text; its prefix."""
    patterns = ("*.md", "docs/*.md", "megatron_lazarus/*/*.py")
    files = sorted(path for pattern in patterns for path in REPOSITORY.glob(pattern))
    source = folder / "text.jsonl"
    source.write_text("".join(json.dumps({"text": path.read_text()}) + "\n" for path in files))
    command = [sys.executable, "scripts/preprocess_data.py", "--input", str(source), "--append-eod"]
    command += ["--output-prefix", str(folder / "text"), "--tokenizer-type", "ByteLevelTokenizer"]
    subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL, timeout=300)
    return folder / "text_text_document"


def undisturbed(folder: Path, data: Path) -> dict[int, float]:
    """The loss curve of the same training, on two nodes that nothing happens to."""
    variables = {**os.environ, **settings(), "DATA_PATH": str(data), "OUTPUT": str(folder), "LAUNCHER": "lazarus"}
    variables |= {"NUM_GPUS": "2", "NODES": "2"}
    command = ["bash", "scripts/pretrain_gpt_tiny.sh"]
    log = folder.with_suffix(".log")
    with log.open("wb") as output:
        code = subprocess.call(command, cwd=REPOSITORY, env=variables, stdout=output, stderr=output, timeout=900)
    assert code == 0, log.read_text()[-3000:]
    return read_curve(folder / "logs")


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


@contextmanager
def cluster_of(folder: Path) -> Iterator[Slurm]:
    place = folder / "slurm"
    place.mkdir()
    with slurm(place, NODES) as cluster:
        yield cluster


def run_all(folder: Path, names: list[str], data: Path, reference: Mapping[int, float]) -> list[str]:
    """Run these; returns what failed."""
    failed = []
    for name in names:
        place = folder / name
        place.mkdir()
        try:
            with cluster_of(place) as cluster:
                run = Run(cluster, name, place, data)
                RUNS[name](run, reference)
            print(f"{name}: passed", flush=True)
        except (AssertionError, SlurmError, subprocess.TimeoutExpired) as error:
            failed.append(name)
            print(f"{name}: FAILED: {type(error).__name__}: {error}", flush=True)
            for path in sorted((place / "logs").glob("*.out")):
                print(f"-- {path.name}\n{path.read_text()[-1500:]}", flush=True)
    return failed
