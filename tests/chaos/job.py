"""A training job that is disturbed on purpose, and what must be true of it in the end."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil

from megatron_lazarus.elastic.settings import ElasticConfig
from tests.chaos.nursery import Forked, Nursery, marked
from tests.chaos.worker import HOLD
from tests.elastic.harness import TOKEN, LocalJob

JOB_LIMIT_S = 60.0
REFERENCES: dict[str, Ledger] = {}

Line = dict[str, Any]
AnyJob = TypeVar("AnyJob", bound="TrainingJob")


@dataclass
class Ledger:
    """All that the members of a run wrote down."""

    lines: list[Line] = field(default_factory=list)

    @classmethod
    def read(cls, log_dir: Path) -> Ledger:
        ledger = cls()
        for path in sorted(log_dir.glob("ledger-*.jsonl")):
            # A killed member may leave half a line.
            for text in path.read_text().split("\n")[:-1]:
                ledger.lines.append({**json.loads(text), "member": path.stem})
        return ledger

    def of(self, kind: str) -> list[Line]:
        return [line for line in self.lines if line["kind"] == kind]

    def losses(self, kind: str = "step") -> dict[int, set[float]]:
        """By step, the losses that members saw."""
        found: dict[int, set[float]] = {}
        for line in self.of(kind):
            found.setdefault(line["step"], set()).add(line["loss"])
        return found

    def committed_samples(self) -> Counter[tuple[int, int]]:
        """(step, micro-batch) trained on in the generation in which the step was committed.

        Those to whom recovery brought the outcome write it in a later one.
        """
        generations: dict[int, int] = {}
        for line in self.of("step"):
            generations[line["step"]] = min(line["generation"], generations.get(line["step"], 1 << 62))
        return Counter(
            (line["step"], line["number"])
            for line in self.of("sample")
            if generations.get(line["step"]) == line["generation"]
        )


class TrainingJob(LocalJob):
    """Use with ``training_job``. ``options`` are those of tests.chaos.worker.

    Whatever a test does to a node it does by these methods, so that the checks know which failures it has caused.
    """

    def __init__(self, nursery: Nursery, log_dir: Path, config: ElasticConfig, options: dict[str, Any]) -> None:
        self.nursery, self.options = nursery, options
        self.mark = uuid.uuid4().hex[:10]
        self.caused: Counter[str] = Counter()
        self.killed: set[str] = set()
        super().__init__(log_dir, config, 1, {})

    def _start(self, name: str, *arguments: str, **environment: str) -> Any:
        kind = "coordinator" if name == "coordinator" else "node"
        environment = {"LAZARUS_TOKEN": TOKEN, "GLOO_SOCKET_IFNAME": "lo", **environment}
        return self.nursery.start(kind, self.mark, self.log_dir / f"{name}.log", list(arguments[1:]), environment)

    def add(self, *names: str, fault: str = "", **environment: str) -> None:
        """Start nodes; ``fault``, if any, is the end of each of them."""
        for name in names:
            options = ["", "--node", name, "--coordinator", self.address, "--nproc-per-node", str(self.nproc)]
            options += ["--log-dir", str(self.log_dir), "--options", json.dumps(self.options)]
            self.agents[name] = self._start(f"agent-{name}", *options, CHAOS_FAULT=fault, **environment)
            self.killed.discard(name)
            if fault and ":slow" not in fault and ":lose" not in fault:
                self.expect_failure(name)

    def expect_failure(self, name: str) -> None:
        self.caused[name] += 1
        self.killed.add(name)

    # -- looking ------------------------------------------------------------------------------------------------

    def ledger(self) -> Ledger:
        return Ledger.read(self.log_dir)

    def generations(self) -> dict[int, list[str]]:
        """The nodes of every generation so far."""
        return {event["generation"]: event["nodes"] for event in self.events() if event["kind"] == "generation"}

    def events_of(self, kind: str) -> int:
        return sum(event["kind"] == kind for event in self.events())

    def waited(self, node: str) -> int:
        """How often this node has come to be admitted."""
        return sum(event["kind"] == "waiting" and event["node"] == node for event in self.events())

    def working(self, node: str) -> bool:
        """Whether the newest generation has worked with this node as a member."""
        generations = self.generations()
        newest = max(generations, default=0)
        told = any(event["kind"] == "working" and event["generation"] == newest for event in self.events())
        return told and node in generations[newest]

    def wait_until_working(self, node: str) -> None:
        self.wait_until(lambda: self.working(node) or None, JOB_LIMIT_S, f"node {node} did not become a member")

    def step(self) -> int:
        """Committed steps so far."""
        return 1 + max((line["step"] for line in self.ledger().of("step")), default=-1)

    def wait_for_step(self, step: int, limit: float = JOB_LIMIT_S) -> None:
        self.wait_until(lambda: True if self.step() >= step else None, limit, f"step {step}")

    def worker(self, node: str, local_rank: int = 0) -> psutil.Process:
        return psutil.Process(self.agents[node].pid).children()[local_rank]

    def dump_stacks(self) -> None:
        for process in marked(self.mark):
            with contextlib.suppress(psutil.Error):
                process.rlimit(psutil.RLIMIT_CORE, (0, 0))
                process.send_signal(signal.SIGCONT)
                process.send_signal(signal.SIGABRT)
        time.sleep(1)

    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        """Members do not get on with their steps meanwhile."""
        (self.log_dir / HOLD).touch()
        yield
        (self.log_dir / HOLD).unlink()

    # -- faults -------------------------------------------------------------------------------------------------

    def kill_node(self, *nodes: str) -> float:
        for node in nodes:
            self.expect_failure(node)
        return super().kill_node(*nodes)

    def kill_worker(self, node: str, local_rank: int = 0) -> float:
        self.expect_failure(node)
        return super().kill_worker(node, local_rank)

    def stop_worker(self, node: str) -> None:
        """It stays there, silent."""
        self.expect_failure(node)
        self.worker(node).send_signal(signal.SIGSTOP)

    def coordinator_process(self, index: int = -1) -> psutil.Process:
        """Of all that there have been, by default the newest."""
        return psutil.Process([event["pid"] for event in self.events() if event["kind"] == "listening"][index])

    def kill_coordinator(self) -> None:
        self.coordinator_process().kill()

    def kill_coordinators_host(self, first: str) -> str:
        """SIGKILL the coordinator and the node it lives on: for the first one, which has a node of no one, ``first``.

        Returns that node.
        """
        process = self.coordinator_process()
        hosts = [name for name, agent in self.agents.items() if process.ppid() == agent.pid]
        node = hosts[0] if hosts else first
        process.kill()
        self.kill_node(node)
        return node

    def drain(self, node: str, number: int = signal.SIGTERM, of_worker: bool = False) -> None:
        """Ask a node to leave; that is no failure, but for one that has not begun yet."""
        if not any(node in nodes for nodes in self.generations().values()):
            self.expect_failure(node)
        psutil.Process(self.worker(node).pid if of_worker else self.agents[node].pid).send_signal(number)

    # -- the end ------------------------------------------------------------------------------------------------

    def end(self, limit: float = JOB_LIMIT_S) -> dict[str, Any]:
        """Wait until every process has ended by itself; returns the completion marker."""
        result = self.finish(limit)
        assert marked(self.mark) == [], f"processes are left\n{self.logs()}"
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", self.port)) != 0, "the coordinator's port is still open"
        return result

    def check(self, tolerance: float = 1e-9, limit: float = JOB_LIMIT_S) -> Ledger:
        """The run has completed, and is the undisturbed one; nobody failed whom the test has not made to fail."""
        result = self.end(limit)
        try:
            assert result["status"] == "completed", result
            members = {node for nodes in self.generations().values() for node in nodes}
            for name, process in self.agents.items():
                # One that came too late finds no coordinator any more.
                fine = process.returncode == 0 or name in self.killed or name not in members
                assert fine, f"node {name}: status {process.returncode}"
            failures = [event for event in self.events() if event["kind"] == "failure"]
            # A coordinator may be lost before it has done anything about a failure; its successor finds the same one.
            failed = Counter(node for node, _ in {(event["node"], event["generation"]) for event in failures})
            assert failed <= self.caused, f"failed {failed}, but caused were {self.caused}"
            ledger = self.ledger()
            self._check_training(ledger, self.reference(), tolerance)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.logs()}") from error
        return ledger

    def _check_training(self, ledger: Ledger, reference: Ledger, tolerance: float) -> None:
        total, micro_batches = self.options["total_steps"], self.options.get("micro_batches", 12)
        for kind in ("step", "eval"):
            wanted, found = reference.losses(kind), ledger.losses(kind)
            assert found.keys() == wanted.keys(), f"{kind}s {sorted(found)}"
            for step, (loss,) in wanted.items():
                assert len(found[step]) == 1, f"members disagree on {kind} {step}: {found[step]}"
                difference = abs(next(iter(found[step])) - loss) / abs(loss)
                assert difference <= tolerance, f"loss of {kind} {step} differs by {difference:.3g} of {loss}"
        samples = ledger.committed_samples()
        every = Counter((step, number) for step in range(total) for number in range(micro_batches))
        assert samples == every, f"lost {every - samples}, repeated {samples - every}"
        newest = max(line["generation"] for line in ledger.of("end"))
        final = [line for line in ledger.of("end") if line["generation"] == newest]
        assert len({line["dense"] for line in final}) == 1, "dense parameters differ"
        digests: dict[tuple[int, int], set[str]] = {}
        for line in final:
            for layer, expert, digest in line["records"]:
                digests.setdefault((layer, expert), set()).add(digest)
        assert all(len(found) == 1 for found in digests.values()), "replicas differ"

    def reference(self) -> Ledger:
        """The undisturbed run with these options."""
        ignored = ("pause_s", "save_every", "measure")
        key = json.dumps({name: value for name, value in self.options.items() if name not in ignored}, sort_keys=True)
        if key not in REFERENCES:
            folder = self.log_dir / "reference"
            folder.mkdir()
            arguments = [str(folder), json.dumps(self.options)]
            process: Forked = self.nursery.start("reference", self.mark, folder / "log", arguments, {})
            assert process.wait(JOB_LIMIT_S) == 0, (folder / "log").read_text()
            REFERENCES[key] = Ledger.read(folder)
        return REFERENCES[key]


@contextlib.contextmanager
def training_job(
    nursery: Nursery, log_dir: Path, nodes: int, options: dict[str, Any] | None = None, **settings: Any
) -> Iterator[TrainingJob]:
    """A job that starts when ``nodes`` of them are there, which the caller adds; nothing of it is left behind."""
    settings = {"min_nodes": 1, "start_nodes": nodes, "heartbeat_interval_s": 0.25, **settings}
    chosen = {"total_steps": 8, "micro_batches": 6, "dropout": 0.1, "pause_s": 0.02, **(options or {})}
    with closing(TrainingJob(nursery, log_dir, ElasticConfig(**settings), chosen)) as job:
        yield job


@contextlib.contextmanager
def closing(job: AnyJob) -> Iterator[AnyJob]:
    """Nothing of the job is left behind."""
    try:
        yield job
    finally:
        while left := marked(job.mark):
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            time.sleep(0.02)
        for process in (job.coordinator, *job.agents.values()):
            process.wait(10)
