"""A node dies: seconds until the first new step, with Lazarus and with stock DeepSpeed-MoE, side by side.

    python scripts/benchmarks/recovery.py [--steps 75] [--json out.json]

Local nodes of one rank, one thread each, gloo, float32, one model, data and optimizer for all. Three failures:
a node's process tree is killed under ``lazarus run``; a worker of such a job is stopped (it hangs); and a worker is
killed under the ``deepspeed`` launcher, whose job is relaunched at once, loads its last checkpoint and redoes what was
lost. All times count from the fault to the first committed step that nobody had committed before.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

TAG = "LAZARUS_BENCHMARK"
WORKER = Path(__file__).with_name("recovery_worker.py")
REPOSITORY = Path(__file__).resolve().parents[2]
START_LIMIT_S, STEP_LIMIT_S, RECOVERY_LIMIT_S = 300.0, 60.0, 600.0
EXTRA_STEPS = 3
VICTIM = 2

Line = dict[str, Any]


class BenchmarkFailed(Exception):
    """A job did not do what is to be measured; the message ends with its logs."""


@dataclass(frozen=True)
class Row:
    """Seconds by phase, which add up to ``total``, from a fault to the first new step; load average at the fault."""

    name: str
    detect: float
    regroup: float
    plan: float
    migrate: float
    resume: float
    total: float
    redone: int
    step: float
    load: float


class Job:
    """The processes of one job; whatever is left of it when the context ends is killed."""

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        self.folder, self.options, self.tag = folder, options, uuid.uuid4().hex
        self.environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", TAG: self.tag}
        paths = [str(REPOSITORY), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        self.environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        while left := list(tagged(self.tag)):
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(left, timeout=1)
        if self.process is not None:
            self.process.wait()

    def start(self, *command: str) -> None:
        with (self.folder / "output.log").open("ab") as output:
            # Ctrl-C must reach only this process, which then kills the rest.
            self.process = subprocess.Popen(
                command,
                env=self.environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def start_lazarus(self) -> None:
        nodes = str(self.options["nodes"])
        run = [sys.executable, "-m", "megatron_lazarus.cli", "run", "--nnodes", f"1:{nodes}", "--local-nodes", nodes]
        config = self.folder / "config.json"
        config.write_text(json.dumps({"lazarus": {"elastic": {}}}), encoding="utf-8")
        run += ["--config", str(config), "--log-dir", str(self.folder / "logs")]
        self.start(*run, str(WORKER), "lazarus", str(self.folder), json.dumps(self.options))

    def start_stock(self) -> None:
        launcher = str(Path(sys.executable).with_name("deepspeed"))
        options = ["--num_gpus", str(self.options["nodes"]), "--master_port", str(free_port())]
        self.start(launcher, *options, str(WORKER), "stock", str(self.folder), json.dumps(self.options))

    def marks(self, kind: str) -> list[Line]:
        """Marks of all workers, by time."""
        lines = [line for path in self.folder.glob("marks-*.jsonl") for line in read_lines(path)]
        return sorted((line for line in lines if line["kind"] == kind), key=lambda line: float(line["time"]))

    def events(self) -> list[Line]:
        return read_lines(self.folder / "logs" / "events.jsonl")

    def wait(self, found: Callable[[], Any], limit_s: float, what: str) -> Any:
        deadline = time.monotonic() + limit_s
        while not (result := found()):
            if time.monotonic() > deadline:
                raise BenchmarkFailed(f"{what}: not within {limit_s:g} s\n{self.logs()}")
            time.sleep(0.01)
        return result

    def wait_for_step(self, step: int) -> None:
        """Until all ranks have committed it."""
        everybody = self.options["nodes"]

        def reached(target: int) -> bool:
            if self.ended():
                raise BenchmarkFailed(f"the job ended before step {step}\n{self.logs()}")
            return sum(line["step"] == target for line in self.marks("step")) >= everybody

        for target in range(1, step + 1):
            limit_s = START_LIMIT_S if target == 1 else STEP_LIMIT_S
            self.wait(partial(reached, target), limit_s, f"step {target} on every rank")

    def ended(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    def first_new_step(self, after: int) -> float:
        """When the first step after that one was committed."""

        def found() -> Line | None:
            return next((line for line in self.marks("step") if line["step"] > after), None)

        return float(self.wait(found, RECOVERY_LIMIT_S, f"a step after {after}")["time"])

    def step_s(self) -> float:
        """Median seconds of a step."""
        first: dict[int, float] = {}
        for line in self.marks("step"):
            first.setdefault(line["step"], line["time"])
        times = sorted(first.values())
        # The first steps also allocate.
        gaps = sorted(after - before for before, after in pairwise(times[1:]))
        return gaps[len(gaps) // 2]

    def logs(self) -> str:
        paths = [self.folder / "output.log", *sorted((self.folder / "logs").glob("*.log"))]
        return "\n".join(f"== {p.name}\n{p.read_text(errors='replace')[-2000:]}" for p in paths if p.exists())


def read_lines(path: Path) -> list[Line]:
    """The JSON lines that are whole."""
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def tagged(tag: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(TAG) == tag and process.status() != psutil.STATUS_ZOMBIE:
                yield process


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def lazarus(options: dict[str, Any], hang: bool) -> Row:
    """A node's process tree is killed, or its worker is stopped."""
    with workspace(options) as job:
        job.start_lazarus()
        step = int(options["fault_step"])
        job.wait_for_step(step)
        # In the middle of a step, where a fault costs most of what it can.
        pause = job.step_s() / 2
        time.sleep(pause)
        agent = next(p for p in tagged(job.tag) if is_agent(p, f"node{VICTIM}"))
        victims = agent.children(recursive=True) if hang else [agent, *agent.children(recursive=True)]
        load, fault = os.getloadavg()[0], time.time()
        for victim in victims:
            (victim.suspend if hang else victim.kill)()
        committed = max(line["step"] for line in job.marks("step") if line["time"] <= fault)
        end = job.first_new_step(committed)
        events = job.events()

        def when(kind: str) -> float:
            return next(float(e["time"]) for e in events if e["kind"] == kind and e["time"] > fault)

        regrouped = next(e for e in events if e["kind"] == "regrouped" and e["time"] > fault)
        seconds = regrouped["seconds"]
        return Row(
            "lazarus, " + ("hang" if hang else "kill"),
            detect=when("broken") - fault,
            regroup=float(regrouped["time"]) - when("broken") - seconds["plan"] - seconds["migrate"],
            plan=seconds["plan"],
            migrate=seconds["migrate"],
            resume=end - float(regrouped["time"]),
            total=end - fault,
            redone=0,
            step=job.step_s(),
            load=load,
        )


def is_agent(process: psutil.Process, node: str) -> bool:
    with contextlib.suppress(psutil.Error):
        return {"megatron_lazarus.elastic.agent", node} <= set(process.cmdline())
    return False


def stock(options: dict[str, Any]) -> Row:
    """A worker is killed; the job is relaunched as soon as its launcher has gone."""
    with workspace(options) as job:
        job.start_stock()
        step = int(options["fault_step"])
        job.wait_for_step(step)
        time.sleep(job.step_s() / 2)
        victim = next(p for p in tagged(job.tag) if p.environ().get("RANK") == str(VICTIM) and is_worker(p))
        load, fault = os.getloadavg()[0], time.time()
        victim.kill()
        committed = max(line["step"] for line in job.marks("step") if line["time"] <= fault)
        job.wait(job.ended, RECOVERY_LIMIT_S, "the launcher's end")
        gone, step_s = time.time(), job.step_s()
        job.start_stock()
        end = job.first_new_step(committed)

        def when(kind: str) -> Line:
            return next(line for line in reversed(job.marks(kind)) if line["time"] > fault)

        ready, loaded = when("ready"), when("loaded")
        return Row(
            "stock, kill",
            detect=gone - fault,
            regroup=ready["time"] - gone,
            plan=0.0,
            migrate=loaded["time"] - ready["time"],
            resume=end - loaded["time"],
            total=end - fault,
            redone=committed - loaded["step"],
            step=step_s,
            load=load,
        )


def is_worker(process: psutil.Process) -> bool:
    return str(WORKER) in process.cmdline() and not process.children()


@contextlib.contextmanager
def workspace(options: dict[str, Any]) -> Iterator[Job]:
    with tempfile.TemporaryDirectory(prefix="lazarus-recovery-") as folder, Job(Path(folder), options) as job:
        yield job


def table(rows: list[Row], options: dict[str, Any], steps: int) -> str:
    phases = ("detect", "regroup", "plan", "migrate", "resume", "total")
    lines = [
        f"{options['nodes']} local nodes of one rank, {options['layers']} MoE layers, hidden {options['hidden']}, "
        f"{options['experts']} experts, top-1, {options['tokens']} tokens a rank; stock: fault after step {steps}, "
        f"checkpoint every {options['save_interval']} steps, relaunched at once; {os.cpu_count()} cores",
        "seconds".ljust(16) + "".join(phase.rjust(9) for phase in phases) + "  steps redone  median step  load",
    ]
    for row in rows:
        cells = "".join(f"{getattr(row, phase):9.3f}" for phase in phases)
        lines.append(f"{row.name:<16}{cells}{row.redone:14}{row.step:11.2f} s{row.load:6.1f}")
    lines.append(
        "regroup: gather, build, state (stock: relaunch, imports, build); migrate (stock: load the checkpoint)"
    )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=75, help="stock's fault comes after this step (%(default)s)")
    parser.add_argument("--lazarus-steps", type=int, default=15, help="the same for Lazarus, whose cost does not grow")
    parser.add_argument("--save-interval", type=int, default=50, help="steps between stock's checkpoints (%(default)s)")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a rank (%(default)s)")
    parser.add_argument("--json", type=Path, help="also write the table as JSON")
    arguments = parser.parse_args()
    if arguments.nodes <= VICTIM:
        parser.error(f"--nodes must be above {VICTIM}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    names = ("nodes", "layers", "hidden", "experts", "tokens", "save_interval")
    options = {name: getattr(arguments, name) for name in names}

    def fault_after(step: int) -> dict[str, Any]:
        return {**options, "fault_step": step, "last_step": step + EXTRA_STEPS}

    try:
        rows = [lazarus(fault_after(arguments.lazarus_steps), hang) for hang in (False, True)]
        rows.append(stock(fault_after(arguments.steps)))
    except BenchmarkFailed as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    from megatron_lazarus.elastic.settings import ElasticConfig

    timeout_s = ElasticConfig().heartbeat_timeout_s
    print(table(rows, options, arguments.steps))
    kill, hang, relaunch = (row.total for row in rows)
    print(f"after a kill: {kill:.2f} s; after a hang: heartbeat_timeout_s ({timeout_s:g} s) + {hang - timeout_s:.2f} s")
    print(f"stock / lazarus after a kill: {relaunch / kill:.1f}x")
    if arguments.json:
        report = {"options": options, "rows": [asdict(row) for row in rows], "ratio": relaunch / kill}
        arguments.json.write_text(json.dumps(report, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
