"""The agent of a node: starts its workers, tells how they end, and kills them when the coordinator says so.

``python -m megatron_lazarus.elastic.agent --node NAME --coordinator HOST:PORT --nproc-per-node K script arguments``.
It imports no torch, so that it starts at once and stays small.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import logging
import os
import resource
import signal
import sys
import time
import uuid
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from megatron_lazarus.elastic.messages import Channel, Message, split_address
from megatron_lazarus.elastic.settings import (
    EXIT_MEANINGS,
    HANDSHAKE_TIMEOUT_S,
    RESOLVER_OPTIONS,
    SHUTDOWN_LIMIT_S,
    ElasticConfig,
)

logger = logging.getLogger(__name__)

START_LIMIT_S = 120.0
"""How long the agent tries to reach the coordinator."""

_PR_SET_PDEATHSIG = 1


class Agent:
    """One node. ``command`` is what every worker runs; ``log_dir`` gets a file per worker, else they share ours."""

    def __init__(
        self,
        node: str,
        coordinators: Sequence[tuple[str, int]],
        token: str,
        local_size: int,
        command: Sequence[str],
        log_dir: Path | None = None,
    ) -> None:
        self.node, self.local_size = node, local_size
        self._coordinators, self._token, self._command, self._log_dir = list(coordinators), token, command, log_dir
        self._incarnation = uuid.uuid4().hex
        self._workers: dict[int, asyncio.subprocess.Process] = {}
        self._statuses: dict[int, str] = {}
        self._channel: Channel | None = None
        self._config = ElasticConfig()
        self._contact = time.monotonic()
        self._killed = ""
        self._over = asyncio.Event()
        self._completed: bool | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Run the node's workers until they end; 0 if they all ended well, else 1. Raises OSError, ConnectionError."""
        await self._connect()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGUSR1):
            loop.add_signal_handler(number, self._drain)
        try:
            for local_rank in range(self.local_size):
                self._workers[local_rank] = await self._start(local_rank)
                self._spawn(self._watch(local_rank))
            self._spawn(self._listen())
            self._spawn(self._beat())
            await self._over.wait()
        finally:
            self.kill("the agent ends")
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            for process in self._workers.values():
                await process.wait()
            if self._channel is not None:
                self._channel.close()
        failed = {rank: status for rank, status in self._statuses.items() if status != "exit status 0"}
        if failed or len(self._statuses) < self.local_size:
            logger.error("node %s: %s", self.node, "; ".join(f"local rank {r}: {s}" for r, s in sorted(failed.items())))
            return 1
        return 0

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(coroutine)
        task.add_done_callback(self._task_ended)
        self._tasks.add(task)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("node %s: %s", self.node, error, exc_info=error)
            self.kill(f"the agent failed: {error}")

    async def _connect(self) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        attempt = 0
        while True:
            host, port = self._coordinators[attempt % len(self._coordinators)]
            attempt += 1
            try:
                channel = await Channel.connect(host, port, self._token, HANDSHAKE_TIMEOUT_S)
                break
            except (OSError, asyncio.TimeoutError) as error:
                if time.monotonic() > deadline:
                    raise ConnectionError(f"node {self.node}: no coordinator at {host}:{port}: {error}") from error
                await asyncio.sleep(0.1)
        place = {"node": self.node, "incarnation": self._incarnation, "local_size": self.local_size}
        channel.send({"role": "agent", **place, "pid": os.getpid()})
        answer = await asyncio.wait_for(channel.receive(), HANDSHAKE_TIMEOUT_S)
        if answer is None or "refused" in answer:
            channel.close()
            why = (answer or {}).get("refused", "it closed the connection (another job's token?)")
            raise ConnectionError(f"node {self.node}: refused by the coordinator at {host}:{port}: {why}")
        self._config, self._channel, self._contact = ElasticConfig(**answer["welcome"]), channel, time.monotonic()

    # -- workers ------------------------------------------------------------------------------------------------

    def command(self, local_rank: int) -> Sequence[str]:
        """What that worker runs."""
        return self._command

    def prepare(self, local_rank: int) -> None:
        """Called in that worker's process before its command takes over."""

    async def _start(self, local_rank: int) -> asyncio.subprocess.Process:
        environment = {
            **RESOLVER_OPTIONS,
            **os.environ,
            "LAZARUS_COORDINATOR": ",".join(f"{host}:{port}" for host, port in self._coordinators),
            "LAZARUS_TOKEN": self._token,
            "LAZARUS_NODE": self.node,
            "LAZARUS_INCARNATION": self._incarnation,
            "LAZARUS_LOCAL_SIZE": str(self.local_size),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_SIZE": str(self.local_size),
            "PYTHONUNBUFFERED": "1",
        }
        output = None
        if self._log_dir is not None:
            self._log_dir.mkdir(parents=True, exist_ok=True)
            output = os.open(
                self._log_dir / f"{self.node}.{local_rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644
            )
        parent = os.getpid()

        def prepare() -> None:
            die_with(parent)
            self.prepare(local_rank)

        try:
            return await asyncio.create_subprocess_exec(
                *self.command(local_rank),
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # A group of its own: what a worker has started is killed with it.
                start_new_session=True,
                preexec_fn=prepare,
            )
        finally:
            if output is not None:
                os.close(output)

    async def _watch(self, local_rank: int) -> None:
        code = await self._workers[local_rank].wait()
        status = f"killed by {_signal_name(-code)}" if code < 0 else f"exit status {code}"
        if code in EXIT_MEANINGS:
            status += f" ({EXIT_MEANINGS[code]})"
        self._statuses[local_rank] = status
        _kill_group(self._workers[local_rank].pid)
        self._say({"do": "exit", "local_rank": local_rank, "status": status})
        if len(self._statuses) == self.local_size:
            # The coordinator should hear of the last exit before the connection ends.
            if self._channel is not None:
                with contextlib.suppress(ConnectionError):
                    await self._channel.flush()
            self._over.set()

    def kill(self, why: str, *, stacks: bool = False) -> None:
        """SIGKILL the workers and all they have started; with ``stacks`` they get a moment to write their stacks."""
        running = [process for process in self._workers.values() if process.returncode is None]
        if not running:
            return
        self._killed = self._killed or why
        logger.warning("node %s: killing %d workers: %s", self.node, len(running), why)
        for process in running:
            if stacks:
                with contextlib.suppress(ProcessLookupError):
                    resource.prlimit(process.pid, resource.RLIMIT_CORE, (0, 0))
                    process.send_signal(signal.SIGABRT)
        if stacks:
            asyncio.get_running_loop().call_later(0.5, self.kill, why)
        else:
            for process in running:
                _kill_group(process.pid)

    # -- the coordinator ----------------------------------------------------------------------------------------

    def _say(self, message: Message) -> None:
        if self._channel is not None:
            self._channel.send(message)

    async def _listen(self) -> None:
        channel = self._channel
        assert channel is not None
        while (message := await channel.receive()) is not None:
            self._contact = time.monotonic()
            if message.get("do") == "kill":
                why, grace_s = str(message["why"]), float(message["grace_s"])
                if grace_s:
                    asyncio.get_running_loop().call_later(grace_s, self.kill, why)
                else:
                    self.kill(why, stacks=bool(message["stacks"]))
            elif message.get("do") == "shutdown":
                self._completed = bool(message["completed"])
                limit = SHUTDOWN_LIMIT_S if self._completed else HANDSHAKE_TIMEOUT_S
                asyncio.get_running_loop().call_later(limit, self.kill, "the job has ended")
        if self._completed is None and len(self._statuses) < self.local_size:
            logger.error("node %s: the coordinator is gone; its workers stop within their lease", self.node)

    async def _beat(self) -> None:
        number = 0
        while True:
            number += 1
            self._say({"do": "heartbeat", "number": number})
            await asyncio.sleep(self._config.heartbeat_interval_s)
            if self._completed is None and time.monotonic() - self._contact > self._config.lease_s:
                self.kill(f"no contact with the coordinator for {self._config.lease_s:g} s (lease_s)")

    def _drain(self) -> None:
        grace = self._config.drain_grace_s
        logger.warning("node %s: asked to leave within %g s", self.node, grace)
        self._say({"do": "drain", "grace_s": grace})
        asyncio.get_running_loop().call_later(grace, self.kill, "the drain grace is over")


def die_with(parent: int) -> None:
    """In a new process: be killed when the parent dies, however it dies."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a node with the token in LAZARUS_TOKEN; exits 0 if all its workers do, also after a drain."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--node", default=os.environ.get("LAZARUS_NODE") or os.uname().nodename)
    parser.add_argument("--coordinator", required=True, metavar="HOST:PORT[,HOST:PORT…]")
    parser.add_argument("--nproc-per-node", type=int, default=1, metavar="K")
    parser.add_argument("--log-dir", type=Path)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what every worker runs")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s agent: %(message)s")
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    coordinators = [split_address(address) for address in arguments.coordinator.split(",")]

    async def run() -> int:
        agent = Agent(
            arguments.node,
            coordinators,
            os.environ["LAZARUS_TOKEN"],
            arguments.nproc_per_node,
            command,
            arguments.log_dir,
        )
        return await agent.run()

    try:
        return asyncio.run(run())
    except ConnectionError as error:
        logger.error("%s", error)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
