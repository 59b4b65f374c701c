"""Starts the processes of jobs as forks of one that has loaded torch and DeepSpeed: in milliseconds, not many seconds.

Nodes are real agents and their workers real children of them; only the start of an interpreter is left out.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import faulthandler
import importlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

REPOSITORY = Path(__file__).resolve().parents[2]
START_LIMIT_S = 180.0
MARK = "lz-"
_PR_SET_NAME = 15


def marked(tag: str) -> list[psutil.Process]:
    """Every living process of the job with this tag, told by the name of its main thread, which forks inherit."""
    found = []
    for process in psutil.process_iter(["name", "status"]):
        if process.info["name"] == MARK + tag and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


class Forked:
    """A process of the nursery, with the interface of Popen."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self._nursery, self.pid = nursery, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._nursery.ask({"do": "poll", "pid": self.pid})
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (3600.0 if timeout is None else timeout)
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode


class Nursery:
    """The parent's side. Its end takes all processes along."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.nursery", str(theirs.fileno())],
            cwd=REPOSITORY,
            env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"},
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
        theirs.close()
        ours.settimeout(START_LIMIT_S)
        self._file = ours.makefile("rw")
        assert self._file.readline() == "ready\n", "the nursery did not start"

    def ask(self, request: Mapping[str, Any]) -> Any:
        self._file.write(json.dumps(request) + "\n")
        self._file.flush()
        return json.loads(self._file.readline())

    def start(self, kind: str, tag: str, output: Path, arguments: list[str], environment: Mapping[str, str]) -> Forked:
        """``kind``: coordinator, node or reference; ``environment`` comes on top of this process's."""
        request = {"do": "start", "kind": kind, "tag": tag, "output": str(output), "arguments": arguments}
        return Forked(self, self.ask({**request, "environment": dict(environment)}))

    def close(self) -> None:
        self._file.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


# -- the nursery's own process ------------------------------------------------------------------------------------


def _serve(descriptor: int) -> None:
    _load(descriptor)
    import deepspeed

    # A worker killed while it builds this extension would leave a lock that every later start waits for.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"forks would lack {len(threads) - 1} threads"
    file = socket.socket(fileno=descriptor).makefile("rw")
    children: dict[int, int | None] = {}
    file.write("ready\n")
    file.flush()
    while line := file.readline():
        request = json.loads(line)
        if request["do"] == "start":
            pid = os.fork()
            if pid == 0:
                os.close(descriptor)
                _become(request)
            children[pid] = None
            answer: int | None = pid
        else:
            answer = _status(request["pid"], children)
        file.write(json.dumps(answer) + "\n")
        file.flush()
    for pid, status in children.items():
        if status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _load(descriptor: int) -> None:
    """Import all that a training run imports on the way; a fork finds out what that is."""
    import tests.chaos.worker  # noqa: F401

    with tempfile.TemporaryDirectory() as folder:
        names = Path(folder, "modules")
        pid = os.fork()
        if pid == 0:
            os.close(descriptor)
            options = {"total_steps": 1, "micro_batches": 1}
            run = {"kind": "rehearsal", "tag": "", "output": "/dev/null", "environment": {}}
            _become({**run, "arguments": [folder, json.dumps(options)]})
        os.waitpid(pid, 0)
        for name in names.read_text().split():
            with contextlib.suppress(Exception):
                importlib.import_module(name)


def _rehearsal(arguments: list[str]) -> int:
    _reference(arguments)
    Path(arguments[0], "modules").write_text("\n".join(sys.modules))
    return 0


def _status(pid: int, children: dict[int, int | None]) -> int | None:
    if children[pid] is None:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            children[pid] = os.waitstatus_to_exitcode(status)
    return children[pid]


def _become(request: dict[str, Any]) -> None:
    """The forked process: never returns."""
    code = 1
    try:
        os.setsid()
        output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        os.environ.update(request["environment"])
        if path := os.environ.get("CHAOS_NETNS"):
            _enter_network(path)
        ctypes.CDLL(None).prctl(_PR_SET_NAME, (MARK + request["tag"]).encode())
        # Where the core pattern has them written, cores of torch are large.
        faulthandler.enable()
        kinds: dict[str, Callable[[list[str]], int]]
        kinds = {"coordinator": _coordinator, "node": _node, "reference": _reference, "rehearsal": _rehearsal}
        code = kinds[request["kind"]](request["arguments"])
    except SystemExit as ending:
        code = int(ending.code or 0)
    except BaseException:
        traceback.print_exc()
    _leave(code)


def _enter_network(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, 0):
        raise OSError(ctypes.get_errno(), f"setns to {path}")
    os.close(descriptor)


def _leave(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _coordinator(arguments: list[str]) -> int:
    from megatron_lazarus.elastic.coordinator import main

    return main(arguments)


def _reference(arguments: list[str]) -> int:
    from tests.chaos.worker import reference

    reference(Path(arguments[0]), json.loads(arguments[1]))
    return 0


class _Child:
    """A forked process as the agent sees its subprocesses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    async def wait(self) -> int:
        while self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
            else:
                await asyncio.sleep(0.01)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _CoordinatorInWaiting:
    """A process forked while there is no event loop; it becomes a coordinator if its node's agent is elected."""

    def __init__(self) -> None:
        from megatron_lazarus.elastic.processes import die_with

        self._socket, theirs = socket.socketpair()
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            self._socket.close()
            os.setsid()
            die_with(parent)
            self._wait(theirs)
        theirs.close()
        self._child = _Child(pid)

    @staticmethod
    def _wait(connection: socket.socket) -> None:
        """Never returns."""
        text, descriptors, *_ = socket.recv_fds(connection, 1 << 20, 1)
        code = 1
        try:
            options = json.loads(text)
            options[options.index("--listen-fd") + 1] = str(descriptors[0])
            code = _coordinator(options)
        except BaseException:
            traceback.print_exc()
        _leave(code)

    async def spawn(self, options: list[str], descriptor: int) -> _Child:
        socket.send_fds(self._socket, [json.dumps(options).encode()], [descriptor])
        return self._child

    def close(self) -> None:
        self._child.kill()
        if self._child.returncode is None:
            os.waitpid(self._child.pid, 0)


def _node(arguments: list[str]) -> int:
    """An agent whose workers are forked before its event loop exists, so that they inherit nothing of it."""
    from megatron_lazarus.elastic.agent import Agent
    from megatron_lazarus.elastic.messages import split_address
    from megatron_lazarus.elastic.processes import die_with
    from megatron_lazarus.elastic.spot import SpotWatch

    parser = argparse.ArgumentParser()
    for name in ("--node", "--coordinator", "--nproc-per-node", "--log-dir", "--options"):
        parser.add_argument(name, required=True)
    options = parser.parse_args(arguments)
    address, size = split_address(options.coordinator), int(options.nproc_per_node)
    agent: Any = Agent(options.node, [address], os.environ["LAZARUS_TOKEN"], size, [], Path(options.log_dir))
    agent.succession.open(os.environ.get("CHAOS_ADDRESS", "127.0.0.1"))
    pids = []
    for local_rank in range(size):
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            os.setsid()
            die_with(parent)
            os.environ.update(
                LAZARUS_COORDINATOR=options.coordinator,
                LAZARUS_AGENT=agent.succession.address,
                LAZARUS_NODE=options.node,
                LAZARUS_INCARNATION=agent._incarnation,
                LAZARUS_LOCAL_SIZE=str(size),
                LOCAL_RANK=str(local_rank),
                LOCAL_SIZE=str(size),
            )
            _worker(Path(options.log_dir), f"{options.node}.{local_rank}", json.loads(options.options))
        pids.append(pid)

    waiting = _CoordinatorInWaiting()

    async def start(local_rank: int) -> _Child:
        return _Child(pids[local_rank])

    async def run() -> int:
        return int(await agent.run())

    if cloud := os.environ.get("CHAOS_SPOT"):
        # Not earlier: a thread would not be in the forks.
        SpotWatch(cloud, os.environ["CHAOS_SPOT_URL"]).start()
    agent._start = start
    agent.succession.spawn = waiting.spawn
    logging.basicConfig(level=logging.INFO, format="%(asctime)s agent: %(message)s", force=True)
    try:
        return asyncio.run(run())
    except ConnectionError as error:
        logging.error("%s", error)
        return 1
    finally:
        waiting.close()


def _worker(log_dir: Path, name: str, options: dict[str, Any]) -> None:
    """The worker's process: never returns."""
    from tests.chaos.worker import main

    output = os.open(log_dir / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    code = 0
    try:
        main(log_dir, options)
    except SystemExit as ending:
        code = int(ending.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    _leave(code)


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
