"""Fresh processes for tests that need them: a command with a hard time limit, of which nothing survives."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.distributed.memory_file import MemoryFile

REPOSITORY = Path(__file__).resolve().parents[2]
# Inherited by every descendant, also by those that leave the process group or lose their parent.
TAG = "LAZARUS_TEST_LAUNCH"


@dataclass(frozen=True)
class Launched:
    """How a command ended; ``leftovers`` are the processes that outlived it and had to be killed."""

    returncode: int
    output: str
    seconds: float
    leftovers: list[str] = field(default_factory=list)


def free_port() -> int:
    """A TCP port that is free on the loopback interface now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def tagged(tag: str) -> list[psutil.Process]:
    """Every living process that descends from the launch with this tag."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(TAG) == tag and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def kill_tagged(tag: str) -> list[str]:
    """Kill them until none is left, since they may start others meanwhile; returns their command lines."""
    killed: list[str] = []
    while processes := tagged(tag):
        for process in processes:
            try:
                killed.append(" ".join(process.cmdline()))
                process.kill()
            except psutil.Error:
                continue
        psutil.wait_procs(processes, timeout=1)
    return killed


def run_command(
    command: Sequence[str | Path],
    *,
    timeout: float,
    environment: Mapping[str, str] | None = None,
    cwd: Path = REPOSITORY,
) -> Launched:
    """Run a command and everything it starts; a time-out fails the test with the stacks of all Python processes."""
    tag = uuid.uuid4().hex
    output = MemoryFile("launch")
    started = time.monotonic()
    process = subprocess.Popen(
        [str(part) for part in command],
        cwd=cwd,
        env={
            **os.environ,
            "DS_ACCELERATOR": "cpu",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "PYTHONFAULTHANDLER": "1",
            **(environment or {}),
            TAG: tag,
        },
        stdin=subprocess.DEVNULL,
        # Not a pipe: a descendant that keeps it open would keep the reader waiting.
        stdout=output.descriptor,
        stderr=output.descriptor,
        start_new_session=True,
    )
    try:
        returncode = process.wait(timeout)
    except subprocess.TimeoutExpired:
        for descendant in tagged(tag):
            with contextlib.suppress(psutil.Error):
                # PYTHONFAULTHANDLER answers this signal with the stacks; a core dump of torch would be large.
                descendant.rlimit(psutil.RLIMIT_CORE, (0, 0))
                descendant.send_signal(signal.SIGABRT)
        output.wait_until_quiet(limit=3)
        raise AssertionError(f"{command} exceeded {timeout:g} s; its output:\n{output.read()[-20000:]}") from None
    else:
        seconds = time.monotonic() - started
        return Launched(returncode, output.read(), seconds, kill_tagged(tag))
    finally:
        kill_tagged(tag)
        process.wait()
        output.close()


def launch(
    script: str | Path,
    *arguments: str,
    ranks: int,
    timeout: float,
    environment: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
) -> Launched:
    """Run a script on ``ranks`` local ranks under the ``deepspeed`` command, whose own flags are ``options``."""
    deepspeed = [sys.executable, "-m", "deepspeed.launcher.runner"]
    flags = ["--num_gpus", str(ranks), "--master_addr", "127.0.0.1", "--master_port", str(free_port()), *options]
    return run_command([*deepspeed, *flags, script, *arguments], timeout=timeout, environment=environment)
