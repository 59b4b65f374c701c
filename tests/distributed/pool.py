"""Warm pools of worker processes, so that a distributed test does not pay for starting Python, torch and DeepSpeed.

``pools(4)(function, *arguments, timeout=60)`` calls ``function(rank, world_size, *arguments)`` on four workers that
share a fresh gloo process group, and returns the results by rank. Functions travel by name: they must be module-level.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.distributed.memory_file import MemoryFile
from tests.distributed.worker import DUMP_SIGNAL

REPOSITORY = Path(__file__).resolve().parents[2]
MAX_LIVE_WORKERS = 10
START_LIMIT_S = 180.0
RESET_LIMIT_S = 60.0
# How long the other ranks may take to notice that one has failed; their tracebacks help to understand it.
GRACE_S = 5.0
# Below the test's own limit, so that a rank left alone in a collective says so itself.
GROUP_LIMIT_SHARE = 0.8
RESET = "reset"


@dataclass(frozen=True)
class Failure:
    """Why a rank gave no result; ``kind`` is the exception's type name, or ``died``, or ``timeout``."""

    rank: int
    when: float
    kind: str
    detail: str


class WorkersFailed(AssertionError):
    """At least one rank gave no result. The failure that happened first comes first."""

    def __init__(self, title: str, failures: list[Failure]) -> None:
        self.failures = sorted(failures, key=lambda failure: failure.when)
        reports = [f"----- rank {one.rank}: {one.kind} -----\n{one.detail.rstrip()}" for one in self.failures]
        super().__init__("\n".join([title, *reports]))


class Worker:
    """The parent's side of one worker process."""

    def __init__(self, rank: int, world_size: int, store_port: int) -> None:
        self.rank = rank
        self.output = MemoryFile(f"output-{rank}")
        self.stacks = MemoryFile(f"stacks-{rank}")
        ours, theirs = socket.socketpair()
        self.connection = connection.Connection(ours.detach())
        numbers = (rank, world_size, theirs.fileno(), self.stacks.descriptor, os.getpid(), store_port)
        environment = {
            **os.environ,
            "DS_ACCELERATOR": "cpu",
            "GLOO_SOCKET_IFNAME": "lo",
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store_port),
            "OMP_NUM_THREADS": "1",
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
        }
        # A session of its own: killpg then reaches what a test started, and a terminal's ctrl-C only pytest.
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.distributed.worker", *map(str, numbers)],
            cwd=REPOSITORY,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self.output.descriptor,
            stderr=self.output.descriptor,
            pass_fds=(theirs.fileno(), self.stacks.descriptor),
            start_new_session=True,
        )
        theirs.close()

    def receive(self) -> Any:
        """The worker's next message, or None if it has died."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            return None

    def send(self, request: object) -> None:
        # If it has died, whoever waits for the answer finds out, with the exit status.
        with contextlib.suppress(OSError):
            self.connection.send(request)

    def describe_death(self) -> str:
        try:
            status = self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "closed its connection but still runs"
        name = f" ({signal.Signals(-status).name})" if status < 0 else ""
        return f"exit status {status}{name}\n{self.stacks.read()}{self.tail()}"

    def tail(self) -> str:
        text = self.output.read()[-4000:]
        return f"output:\n{text}" if text.strip() else ""

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.connection.close()
        self.output.close()
        self.stacks.close()


class Pool:
    """The workers of one world size."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = int(listener.getsockname()[1])
            # The store listens on every interface unless it is given a socket.
            self.store: TCPStore | None = TCPStore(
                "127.0.0.1", self.port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
            )
        self.workers = [Worker(rank, world_size, self.port) for rank in range(world_size)]
        self.closed = False
        self._ready_limit = START_LIMIT_S

    def wait_ready(self) -> str | None:
        """None when every worker waits for work, else what is wrong."""
        deadline = time.monotonic() + self._ready_limit
        waiting = list(self.workers)
        while waiting:
            heard = self._wait(waiting, deadline)
            if not heard:
                return f"ranks {[worker.rank for worker in waiting]} did not become ready"
            for worker in heard:
                message = worker.receive()
                if message is None:
                    return f"rank {worker.rank} died: {worker.describe_death()}"
                waiting.remove(worker)
        return None

    def call(self, function: Callable[..., Any], arguments: tuple[Any, ...], timeout: float) -> list[Any]:
        """Run the function on every worker; then reset the pool, or close it if it cannot be used again."""
        __tracebackhide__ = True
        deadline = time.monotonic() + timeout
        payload = pickle.dumps((function, arguments))
        for worker in self.workers:
            worker.output.clear()
            worker.stacks.clear()
        reusable = False
        try:
            for worker in self.workers:
                worker.send((timeout * GROUP_LIMIT_SHARE, sys.path, payload))
            results, failures = self._collect(deadline)
            reusable = not any(failure.kind in ("died", "timeout") for failure in failures)
        finally:
            # Also after ctrl-C, or a result that cannot be unpickled here: answers nobody reads would follow.
            if reusable:
                self._ready_limit = RESET_LIMIT_S
                for worker in self.workers:
                    worker.send(RESET)
            else:
                self.close()
        if failures:
            name = getattr(function, "__qualname__", str(function))
            raise WorkersFailed(f"{name} on {self.world_size} workers, limit {timeout:g} s", failures)
        return [results[rank] for rank in range(self.world_size)]

    def _collect(self, deadline: float) -> tuple[dict[int, Any], list[Failure]]:
        """The results by rank, and why there is none of the other ranks."""
        results: dict[int, Any] = {}
        failures: list[Failure] = []
        waiting = list(self.workers)
        while waiting and (heard := self._wait(waiting, deadline)):
            for worker in heard:
                waiting.remove(worker)
                message = worker.receive()
                if message is None:
                    failures.append(Failure(worker.rank, time.monotonic(), "died", worker.describe_death()))
                elif message[0] == "returned":
                    results[worker.rank] = pickle.loads(message[1])
                else:
                    _, when, kind, text = message
                    failures.append(Failure(worker.rank, when, kind, f"{text}{worker.tail()}"))
            if failures:
                deadline = min(deadline, failures[0].when + GRACE_S)
        return results, failures + self._dump_stacks(waiting)

    def close(self) -> None:
        """Kill the workers and what they started."""
        if self.closed:
            return
        self.closed = True
        for worker in self.workers:
            worker.close()
        self.store = None

    @staticmethod
    def _wait(workers: list[Worker], deadline: float) -> list[Worker]:
        by_connection = {worker.connection: worker for worker in workers}
        limit = max(0.0, deadline - time.monotonic())
        return [by_connection[ready] for ready in connection.wait(list(by_connection), limit)]  # type: ignore[index]

    @staticmethod
    def _dump_stacks(workers: list[Worker]) -> list[Failure]:
        """What each of these workers is doing right now."""
        when = time.monotonic()
        for worker in workers:
            if worker.process.poll() is None:
                worker.process.send_signal(DUMP_SIGNAL)
        for worker in workers:
            worker.stacks.wait_until_quiet(limit=2.0)
        reports = (f"{worker.stacks.read() or '(no stack: it is stopped)'}\n{worker.tail()}" for worker in workers)
        return [
            Failure(worker.rank, when, "timeout", f"no answer; what it was doing:\n{report}")
            for worker, report in zip(workers, reports, strict=True)
        ]


class Pools:
    """One pool per world size, started when first used; the least recently used go when there are too many workers."""

    def __init__(self) -> None:
        self._pools: OrderedDict[int, Pool] = OrderedDict()

    def __call__(self, world_size: int) -> Callable[..., list[Any]]:
        """The function that runs another one on ``world_size`` workers."""

        def run(function: Callable[..., Any], *arguments: Any, timeout: float = 60.0) -> list[Any]:
            __tracebackhide__ = True
            return self.get(world_size).call(function, arguments, timeout)

        return run

    def get(self, world_size: int) -> Pool:
        """A pool whose workers are all waiting for work."""
        pool = self._pools.pop(world_size, None)
        if pool is not None and not pool.closed and pool.wait_ready() is not None:
            # The test that broke it has been told already, or passed: the next one gets a new pool.
            pool.close()
        if pool is None or pool.closed:
            self._make_room(world_size)
            pool = Pool(world_size)
            problem = pool.wait_ready()
            if problem is not None:
                pool.close()
                raise RuntimeError(f"a pool of {world_size} workers did not start: {problem}")
        self._pools[world_size] = pool
        return pool

    def close(self) -> None:
        while self._pools:
            self._pools.popitem()[1].close()

    def _make_room(self, world_size: int) -> None:
        while self._pools and sum(self._pools) + world_size > MAX_LIVE_WORKERS:
            self._pools.popitem(last=False)[1].close()
