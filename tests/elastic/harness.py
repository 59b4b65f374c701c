"""A job of real processes: a coordinator, agents as nodes of this machine, and workers that run loop.py."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from megatron_lazarus.elastic.processes import die_with
from megatron_lazarus.elastic.settings import ElasticConfig
from tests.distributed.launch import REPOSITORY, TAG, free_port, kill_tagged, tagged

START_LIMIT_S = 90.0
TOKEN = "token-of-this-test"

Event = dict[str, Any]


class LocalJob:
    """Use with ``local_job``. Times are in seconds."""

    def __init__(self, log_dir: Path, config: ElasticConfig, nproc: int, environment: Mapping[str, str]) -> None:
        self.log_dir, self.config, self.nproc = log_dir, config, nproc
        self.port = free_port()
        self.tag = uuid.uuid4().hex
        self.environment = {
            **os.environ,
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "PYTHONFAULTHANDLER": "1",
            "LAZARUS_TOKEN": TOKEN,
            **environment,
            TAG: self.tag,
        }
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        options = ["--listen", self.address, "--settings", json.dumps(config.to_json()), "--log-dir", str(log_dir)]
        self.coordinator = self._start("coordinator", "megatron_lazarus.elastic.coordinator", *options)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def _start(self, name: str, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
        parent = os.getpid()
        with (self.log_dir / f"{name}.log").open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", *arguments],
                cwd=REPOSITORY,
                env={**self.environment, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=lambda: die_with(parent),
            )

    def add(self, *names: str, **environment: str) -> None:
        """Start agents."""
        for name in names:
            options = ["--node", name, "--coordinator", self.address, "--nproc-per-node", str(self.nproc)]
            options += ["--log-dir", str(self.log_dir)]
            worker = [sys.executable, "-m", "tests.elastic.loop", str(self.log_dir)]
            agent = ["megatron_lazarus.elastic.agent", *options, *worker]
            self.agents[name] = self._start(f"agent-{name}", *agent, **environment)

    # -- looking ------------------------------------------------------------------------------------------------

    def events(self) -> list[Event]:
        path = self.log_dir / "events.jsonl"
        if not path.exists():
            return []
        lines = path.read_text().split("\n")[:-1]
        return [json.loads(line) for line in lines]

    def wait_for(self, kind: str, limit: float = START_LIMIT_S, **fields: Any) -> Event:
        """The first event of a kind with these fields."""

        def found() -> Event | None:
            for event in self.events():
                if event["kind"] == kind and all(event.get(key) == value for key, value in fields.items()):
                    return event
            return None

        return self.wait_until(found, limit, f"no event {kind!r} {fields}")

    def wait_until(self, found: Callable[[], Any], limit: float, what: str) -> Any:
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            if (result := found()) is not None:
                return result
            if self._is_over() and (result := found()) is None:
                raise AssertionError(f"{what}: the job has ended\n{self.logs()}")
            time.sleep(0.02)
        self.dump_stacks()
        raise AssertionError(f"{what} within {limit:g} s\n{self.logs()}")

    def _is_over(self) -> bool:
        return all(process.poll() is not None for process in (self.coordinator, *self.agents.values()))

    def dump_stacks(self) -> None:
        for process in tagged(self.tag):
            with contextlib.suppress(psutil.Error):
                process.rlimit(psutil.RLIMIT_CORE, (0, 0))
                process.send_signal(signal.SIGABRT)
        time.sleep(1)

    def logs(self) -> str:
        texts = []
        for path in sorted(self.log_dir.glob("*")):
            if path.is_file() and path.stat().st_size:
                texts.append(f"===== {path.name}\n{path.read_text(errors='replace')[-3000:]}")
        return "\n".join(texts)

    def worker(self, node: str, local_rank: int = 0) -> psutil.Process:
        for process in psutil.Process(self.agents[node].pid).children():
            if process.environ()["LOCAL_RANK"] == str(local_rank):
                return process
        raise AssertionError(f"node {node} has no worker {local_rank}")

    def newest_working(self, after: int) -> int | None:
        """The newest generation if it works and came after that one."""
        generations = [event["generation"] for event in self.events() if event["kind"] in ("generation", "working")]
        newest = max(generations, default=0)
        return newest if newest > after and generations.count(newest) == 2 else None

    # -- faults -------------------------------------------------------------------------------------------------

    def kill_worker(self, node: str, local_rank: int = 0) -> float:
        process = self.worker(node, local_rank)
        process.kill()
        return time.time()

    def kill_node(self, *nodes: str) -> float:
        """SIGKILL of whole process trees."""
        victims = []
        for node in nodes:
            agent = psutil.Process(self.agents[node].pid)
            victims += [agent, *agent.children(recursive=True)]
        for victim in victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()
        return time.time()

    def stop(self) -> None:
        """Have the loop end after the step it is in."""
        (self.log_dir / "stop").touch()

    def finish(self, limit: float = 30.0) -> dict[str, Any]:
        """Wait for everything to end; returns the completion marker."""
        deadline = time.monotonic() + limit
        for name, process in {"coordinator": self.coordinator, **self.agents}.items():
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.dump_stacks()
                raise AssertionError(f"{name} has not ended within {limit:g} s\n{self.logs()}") from None
        assert [process.cmdline() for process in tagged(self.tag)] == []
        path = self.log_dir / "result.json"
        assert path.exists(), f"the job has no result\n{self.logs()}"
        return json.loads(path.read_text())

    def seconds_until_working(self, since: float, generation: int, limit: float = START_LIMIT_S) -> float:
        return float(self.wait_for("working", limit, generation=generation)["time"]) - since


@contextlib.contextmanager
def local_job(
    log_dir: Path,
    *nodes: str,
    nproc: int = 1,
    environment: Mapping[str, str] | None = None,
    **settings: Any,
) -> Iterator[LocalJob]:
    """A job that works in generation 1; whatever is left of it in the end is killed."""
    settings = {"min_nodes": 1, "start_nodes": len(nodes), "heartbeat_interval_s": 0.25, **settings}
    job = LocalJob(log_dir, ElasticConfig(**settings), nproc, environment or {})
    try:
        job.add(*nodes)
        yield job
    finally:
        kill_tagged(job.tag)
        for process in (job.coordinator, *job.agents.values()):
            process.wait()
