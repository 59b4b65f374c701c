"""Random faults over many short runs: ``python -m tests.chaos.storm --runs 50 --seed 1 --minutes 10``.

Every run is planned from its seed alone, printed before it starts; when each fault strikes depends on the machine.
Every expert has three replicas and at most two nodes fail between two steps, so nothing may be lost. In every third run
half of the tokens go to one expert, to another one every few steps, and experts follow.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.chaos.faults import RECOVERY_POINTS, STEP_POINTS
from tests.chaos.job import JOB_LIMIT_S, TrainingJob, training_job
from tests.chaos.nursery import Nursery

STEPS = 30
FIRST_STEP, LAST_STEP, STEPS_BETWEEN = 2, 25, 3
FEWEST = 3
"""Nodes that are left for the next event, so that two of them may fail."""
DRIFTING: dict[str, Any] = {
    "experts": 8,
    "k": 1,
    "hot_expert": 6,
    "section": {
        # On four nodes an expert with three replicas leaves one without: it is worth having a fourth.
        "experts": {"min_replicas": 3, "slots_per_rank": 7, "rebalance_interval": 10, "rebalance_min_gain": 0.0}
    },
}

Action = Callable[[TrainingJob], None]


@dataclass
class Storm:
    """A plan: the nodes at the start, the end that is in store for each node, and what is done at which step."""

    seed: int
    nodes: int = 0
    faults: dict[str, list[str]] = field(default_factory=dict)
    actions: list[tuple[int, str, Action]] = field(default_factory=list)
    log: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.drifting = self.seed % 3 == 0
        self.fewest = FEWEST + self.drifting
        self.nodes = self.random.randint(3, 6) + self.drifting
        self.alive = [f"n{number}" for number in range(self.nodes)]
        self.named = self.nodes
        for step in range(FIRST_STEP, LAST_STEP, STEPS_BETWEEN):
            self._plan(step)

    def _plan(self, step: int) -> None:
        kinds = ["join", "join-and-death"]
        if len(self.alive) > self.fewest:
            kinds += ["node", "worker", "stop", "drain", "point", "point", "outside"]
        if len(self.alive) > self.fewest + 1:
            # With the coordinator gone as well, more than half must still be there to elect another.
            kinds += ["two", "recovery", "recovery", "drain-and-death", "coordinator", "coordinator"]
        if len(self.alive) > self.fewest + 2:
            kinds = kinds[2:]
        kind = self.random.choice(kinds)
        getattr(self, f"_{kind.replace('-', '_')}")(step)

    # -- events: each takes its victims out of those alive ------------------------------------------------------

    def _victim(self) -> str:
        return self.alive.pop(self.random.randrange(len(self.alive)))

    def _do(self, step: int, what: str, action: Action) -> None:
        self.actions.append((step, what, action))
        self.log.append(f"{what}@{step}")

    def _arm(self, node: str, point: str, step: int) -> None:
        self.faults.setdefault(node, []).append(f"{point}:{step}")
        self.log.append(f"{node} dies {point}@{step}")

    def _node(self, step: int) -> None:
        node = self._victim()
        self._do(step, f"kill node {node}", lambda job: _ignore_absence(job.kill_node, node))

    def _worker(self, step: int) -> None:
        node = self._victim()
        self._do(step, f"kill worker {node}", lambda job: _ignore_absence(job.kill_worker, node))

    def _stop(self, step: int) -> None:
        node = self._victim()
        self._do(step, f"stop {node}", lambda job: _ignore_absence(job.stop_worker, node))

    def _coordinator(self, step: int) -> None:
        """The host that it lives on; for the first one, which is no node's, it is chosen here."""
        node = self._victim()
        what = f"kill the coordinator's host (at first {node})"
        self._do(step, what, lambda job: _ignore_absence(job.kill_coordinators_host, node))

    def _two(self, step: int) -> None:
        one, other = self._victim(), self._victim()
        self._do(step, f"kill {one} and {other}", lambda job: _ignore_absence(job.kill_node, one, other))

    def _drain(self, step: int) -> None:
        node, number = self._victim(), self.random.choice([signal.SIGTERM, signal.SIGUSR1])
        of_worker = self.random.random() < 0.5
        self._do(step, f"drain {node}", lambda job: _ignore_absence(job.drain, node, number, of_worker))

    def _drain_and_death(self, step: int) -> None:
        self._drain(step)
        self._node(step)

    def _join(self, step: int) -> None:
        name = f"n{self.named}"
        self.named += 1
        self.alive.append(name)
        self._do(step, f"add {name}", lambda job: self._add(job, name))

    def _add(self, job: TrainingJob, name: str) -> None:
        job.add(name, fault=",".join(self.faults.get(name, [])))

        def heard(*kinds: str) -> bool:
            return any(event["kind"] in kinds and event["node"] == name for event in job.events())

        with job.holding():
            job.wait_until(lambda: heard("waiting", "failure") or None, JOB_LIMIT_S, f"node {name} did not come")
        job.wait_until(
            lambda: heard("failure") or job.working(name) or job.step() >= STEPS or None,
            JOB_LIMIT_S,
            f"node {name} was not admitted",
        )

    def _join_and_death(self, step: int) -> None:
        if self.random.random() < 0.5 or len(self.alive) <= self.fewest:
            self._join(step)
            self._arm(self.alive.pop(), self.random.choice(["join-state", "join-records", "join-barrier"]), 0)
        else:
            self._arm(self._victim(), self.random.choice(["change", "giving-state", "migration", "settled"]), step)
            self._join(step)

    def _point(self, step: int) -> None:
        points = (*STEP_POINTS, "rebalance") if self.drifting else STEP_POINTS
        self._arm(self._victim(), self.random.choice(points), step)

    def _outside(self, step: int) -> None:
        points = ["evaluation", "saving", "publishing", "published", "finish"]
        self._arm(self._victim(), self.random.choice(points), step)

    def _recovery(self, step: int) -> None:
        self._arm(self._victim(), self.random.choice(RECOVERY_POINTS), step)
        self._node(step)

    # -- running ------------------------------------------------------------------------------------------------

    def run(self, nursery: Nursery, log_dir: Path) -> Counter[str]:
        """Run it and check the run; returns what happened, by kind."""
        options: dict[str, Any] = {
            "total_steps": STEPS,
            "pause_s": 0.01,
            "micro_batches": self.random.choice([4, 7]),
            "eval_every": 5,
            "save_every": 7,
            "section": {"experts": {"min_replicas": 3}},
            **(DRIFTING if self.drifting else {}),
        }
        settings = {"heartbeat_timeout_s": 3.0, "lease_s": 8.0, "drain_grace_s": 20.0}
        with training_job(nursery, log_dir, self.nodes, options, **settings) as job:
            names = [f"n{number}" for number in range(self.nodes)]
            for name in names:
                job.add(name, fault=",".join(self.faults.get(name, [])))
            for step, _, action in self.actions:
                job.wait_for_step(step)
                action(job)
            job.check()
            return happened(job)


def _ignore_absence(action: Callable[..., Any], *arguments: Any) -> None:
    """A victim may have died by another fault before."""
    with contextlib.suppress(psutil.NoSuchProcess, IndexError):
        action(*arguments)


def happened(job: TrainingJob) -> Counter[str]:
    """Nodes that failed, joined and left, by kind, and how often experts followed their load."""
    found: Counter[str] = Counter()
    members: set[str] = set()
    for event in job.events():
        if event["kind"] == "listening" and event["term"] > 1:
            found["coordinator replaced"] += 1
        elif event["kind"] == "failure":
            found[f"failure: {event['cause']}"] += 1
        elif event["kind"] == "left":
            found["drain"] += 1
        elif event["kind"] == "rebalance" and event["adopted"]:
            found["rebalanced"] += 1
        elif event["kind"] == "generation":
            if members:
                found["join"] += len(set(event["nodes"]) - members)
            members |= set(event["nodes"])
            found["generations"] += 1
    return found


def events_in(found: Counter[str]) -> int:
    return sum(count for kind, count in found.items() if kind not in ("generations", "rebalanced"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--keep", type=Path, help="folder for the logs of runs that fail")
    arguments = parser.parse_args()
    total: Counter[str] = Counter()
    failed = []
    end = time.monotonic() + 60 * arguments.minutes
    nursery = Nursery()
    try:
        for seed in range(arguments.seed, arguments.seed + arguments.runs):
            if time.monotonic() > end:
                break
            storm, started = Storm(seed), time.monotonic()
            print(f"seed {seed}: {storm.nodes} nodes; {'; '.join(storm.log)}", flush=True)
            with tempfile.TemporaryDirectory() as folder:
                try:
                    found = storm.run(nursery, Path(folder))
                except Exception as error:
                    failed.append(seed)
                    print(f"seed {seed} FAILED: {str(error)[:1500]}", flush=True)
                    if arguments.keep is not None:
                        shutil.copytree(folder, arguments.keep / f"seed-{seed}", dirs_exist_ok=True)
                        (arguments.keep / f"seed-{seed}" / "error").write_text(str(error))
                    continue
            total += found
            total["runs"] += 1
            print(f"  {events_in(found)} events in {time.monotonic() - started:.1f} s: {dict(found)}", flush=True)
    finally:
        nursery.close()
    runs = total.pop("runs")
    print(f"{runs} runs passed, with {events_in(total)} events: {dict(total)}; failed seeds: {failed}")
    return 1 if failed or not runs else 0


if __name__ == "__main__":
    sys.exit(main())
