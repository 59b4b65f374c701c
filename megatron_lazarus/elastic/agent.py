"""The agent of a node: starts its workers, tells how they end, and kills them when the coordinator says so.

``python -m megatron_lazarus.elastic.agent --node NAME --coordinator HOST:PORT --nproc-per-node K script arguments``.
It imports no torch, so that it starts at once and stays small.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import resource
import signal
import sys
import time
import uuid
from collections.abc import Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megatron_lazarus.elastic import spot
from megatron_lazarus.elastic.election import Charter
from megatron_lazarus.elastic.journal import ENDED_WELL, RESULT_FILE, write_json
from megatron_lazarus.elastic.messages import Channel, Message, split_address
from megatron_lazarus.elastic.processes import describe_exit, kill_group, start_process
from megatron_lazarus.elastic.reign import election_timeout_s
from megatron_lazarus.elastic.settings import (
    HANDSHAKE_TIMEOUT_S,
    RESOLVER_OPTIONS,
    SHUTDOWN_LIMIT_S,
    ElasticConfig,
)
from megatron_lazarus.elastic.succession import Succession

logger = logging.getLogger(__name__)

_POLL_S = 0.05

START_LIMIT_S = 120.0
"""How long the agent tries to reach the coordinator."""


class RefusedHere(ConnectionError):
    """The coordinator does not want this node."""


class Agent:
    """One node. ``command`` is what every worker runs; ``log_dir`` gets a file per worker, else they share ours."""

    stays = True
    """Whether the host goes on serving the coordinator when the node has failed; else others do, if there are any."""

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
        self.succession = Succession(node, self._incarnation, token, self._orphaned, log_dir)
        self._channel: Channel | None = None
        self._former: list[Channel] = []
        self._config = ElasticConfig()
        self._contact = time.monotonic()
        self._received_at, self._beats = 0.0, 0
        self._coordinator_closed = self._coordinator_dead = False
        self._member_of, self._killed = 0, ""
        self._drain_until: float | None = None
        self._over = asyncio.Event()
        self._result: Message | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Run the node's workers until they end; 0 if they all ended well, else 1. Raises OSError, ConnectionError."""
        await self._connect()
        for number in (signal.SIGTERM, signal.SIGUSR1):
            asyncio.get_running_loop().add_signal_handler(number, self._drain)
        try:
            await self.succession.serve()
            for local_rank in range(self.local_size):
                self._workers[local_rank] = await self._start(local_rank)
                self._spawn(self._watch(local_rank))
            self._spawn(self._beat())
            self._spawn(self._keep_coordinator())
            await self._over.wait()
            await self._host_on()
        finally:
            self.kill("the agent ends")
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            for process in self._workers.values():
                await process.wait()
            await self.succession.close()
            for channel in filter(None, (self._channel, *self._former)):
                channel.close()
        failed = {rank: status for rank, status in self._statuses.items() if status != "exit status 0"}
        if failed or len(self._statuses) < self.local_size:
            logger.error("node %s: %s", self.node, "; ".join(f"local rank {r}: {s}" for r, s in sorted(failed.items())))
            return 1
        return 0

    async def _host_on(self) -> None:
        """A coordinator on this host outlives the node's workers, unless the host is to be given back."""
        coordinator = self.succession.coordinator
        if coordinator is None or coordinator.returncode is not None:
            return
        ended = asyncio.ensure_future(coordinator.wait())
        while not (await asyncio.wait([ended], timeout=_POLL_S))[0]:
            charter = self.succession.ballot.charter
            others = charter is not None and charter.voters and not charter.lists(self._incarnation)
            if others and (self._drain_until is not None or not self.stays):
                logger.warning("node %s: gives up the coordinator: others elect one", self.node)
                coordinator.kill()
            if self._result is not None and self._channel is not None:
                # It waits until all agents are gone.
                self._channel.close()

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
                await self._turn_to(f"{host}:{port}", HANDSHAKE_TIMEOUT_S)
                return
            except (OSError, asyncio.TimeoutError) as error:
                if time.monotonic() > deadline or isinstance(error, RefusedHere):
                    why = f"node {self.node}: no coordinator at {host}:{port}: {error}"
                    raise ConnectionError(why) from error
                await asyncio.sleep(0.1)

    async def _turn_to(self, address: str, limit_s: float) -> None:
        """Follow the coordinator at that address from now on. Raises OSError, TimeoutError or RefusedHere."""
        channel = await Channel.connect(*split_address(address), self._token, limit_s)
        try:
            self.succession.open(channel.local_address)
            place = {"node": self.node, "incarnation": self._incarnation, "local_size": self.local_size}
            contact = {"port": self.succession.port, "generation": self._member_of}
            channel.send({"role": "agent", **place, **contact, "pid": os.getpid()})
            async with asyncio.timeout(limit_s):
                answer = await channel.receive()
            if answer is None and self._channel is not None:
                # The token was right so far: this is a coordinator that ends.
                raise ConnectionResetError("it closed the connection before it answered")
            if answer is None or "refused" in answer:
                why = (answer or {}).get("refused", "it closed the connection (another job's token?)")
                raise RefusedHere(f"refused: {why}")
            if not self.succession.follow(int(answer["term"]), address):
                raise ConnectionError(f"it is of term {answer['term']}, before {self.succession.ballot.term}")
        except BaseException:
            channel.close()
            raise
        before, self._channel = self._channel, channel
        self._config, self._contact = ElasticConfig(**answer["welcome"]), time.monotonic()
        self._received_at, self._coordinator_closed, self._coordinator_dead = float(answer["at"]), False, False
        if before is not None:
            # Should it still be there, it hears that its term is over. The connection stays: its end would tell that
            # this agent has died.
            before.send(self._heartbeat())
            self._former.append(before)
        self._say(self._heartbeat())
        for local_rank, status in self._statuses.items():
            self._say({"do": "exit", "local_rank": local_rank, "status": status})
        if self._drain_until is not None:
            self._say({"do": "drain", "grace_s": max(0.1, self._drain_until - time.monotonic())})
        self._spawn(self._obey(channel))

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
            "LAZARUS_AGENT": self.succession.address,
            "LAZARUS_TOKEN": self._token,
            "LAZARUS_NODE": self.node,
            "LAZARUS_INCARNATION": self._incarnation,
            "LAZARUS_LOCAL_SIZE": str(self.local_size),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_SIZE": str(self.local_size),
            "PYTHONUNBUFFERED": "1",
        }
        log = None if self._log_dir is None else self._log_dir / f"{self.node}.{local_rank}.log"
        prepare = partial(self.prepare, local_rank)
        return await start_process(self.command(local_rank), environment, log, prepare=prepare)

    async def _watch(self, local_rank: int) -> None:
        code = await self._workers[local_rank].wait()
        status = self._statuses[local_rank] = describe_exit(code)
        kill_group(self._workers[local_rank].pid)
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
                kill_group(process.pid)

    # -- the coordinator ----------------------------------------------------------------------------------------

    def _say(self, message: Message) -> None:
        if self._channel is not None:
            self._channel.send(message)

    async def _obey(self, channel: Channel) -> None:
        """Do what the coordinator at the other end says, as long as it is the one that this agent follows."""
        while (message := await channel.receive()) is not None:
            if channel is not self._channel:
                return
            self._contact = time.monotonic()
            self._do(message)
        if channel is self._channel:
            self._coordinator_closed = True
            if self._result is None:
                logger.error("node %s: lost the coordinator", self.node)

    def _do(self, message: Message) -> None:
        loop = asyncio.get_running_loop()
        if "ack" in message:
            self._received_at = float(message["at"])
        elif message["do"] == "kill":
            why, grace_s = str(message["why"]), float(message["grace_s"])
            if grace_s:
                loop.call_later(grace_s, self.kill, why)
            else:
                self.kill(why, stacks=bool(message["stacks"]))
        elif message["do"] == "charter":
            self._accept(message["charter"])
        elif message["do"] == "draining":
            self._drain_until = time.monotonic() + float(message["grace_s"])
        elif message["do"] == "shutdown":
            self._result = dict(message["result"])
            well = self._result["status"] in ENDED_WELL
            if self._log_dir is not None and not (self._log_dir / RESULT_FILE).exists():
                # The coordinator may be on another host, with a folder of its own.
                write_json(self._log_dir / RESULT_FILE, self._result)
            loop.call_later(SHUTDOWN_LIMIT_S if well else HANDSHAKE_TIMEOUT_S, self.kill, "the job has ended")

    def _accept(self, given: Message | None) -> None:
        charter = None if given is None else Charter.from_json(given)
        if charter is None or not self.succession.ballot.accept(charter):
            return
        if charter.established and charter.lists(self._incarnation):
            self._member_of = charter.generation
        self._say({"do": "accept", "generation": charter.generation})

    def _heartbeat(self) -> Message:
        self._beats += 1
        term = self.succession.ballot.term
        return {"do": "heartbeat", "number": self._beats, "heard": self._received_at, "term": term}

    async def _beat(self) -> None:
        while True:
            self._say(self._heartbeat())
            await asyncio.sleep(self._config.heartbeat_interval_s)
            if self._result is None and time.monotonic() - self._contact > self._config.lease_s:
                why = self.succession.hindrance or "no other was elected"
                self.kill(f"no contact with the coordinator for {self._config.lease_s:g} s (lease_s); {why}")

    # -- another coordinator ------------------------------------------------------------------------------------

    def _orphaned(self) -> bool:
        """Whether the coordinator has ended, or has been silent for so long that it does not rule any more."""
        silent_s = time.monotonic() - self._contact
        return self._result is None and (self._coordinator_dead or silent_s > election_timeout_s(self._config))

    async def _keep_coordinator(self) -> None:
        """Look after a coordinator to follow, until the job has its result."""
        turn: float | None = None
        while self._result is None:
            await asyncio.sleep(_POLL_S)
            if self._coordinator_closed and not self._coordinator_dead:
                await self._look_for_it()
            if not self._orphaned() and not self.succession.was_announced:
                turn = None
                continue
            if turn is None:
                turn = time.monotonic() + self.succession.delay_s
            if time.monotonic() < turn and not self.succession.was_announced:
                continue
            if found := await self.succession.attempt(self._config):
                await self._try(found[1])
            elif self._coordinator_dead and (hindrance := self.succession.hindrance):
                self.kill(f"the coordinator is gone; {hindrance}")
                return
            else:
                turn = time.monotonic() + self.succession.delay_s / 2

    async def _look_for_it(self) -> None:
        """The coordinator has closed the connection: has its process ended?"""
        assert self.succession.followed is not None
        try:
            await self._turn_to(self.succession.followed[1], self._config.heartbeat_timeout_s)
        except ConnectionRefusedError:
            self._coordinator_dead = True
        except RefusedHere as error:
            self.kill(str(error))
        except (OSError, asyncio.TimeoutError) as error:
            logger.info("node %s: the coordinator is out of reach: %s", self.node, error)

    async def _try(self, address: str) -> None:
        try:
            await self._turn_to(address, self._config.heartbeat_timeout_s)
            logger.warning("node %s: follows the coordinator at %s", self.node, address)
        except RefusedHere as error:
            self.kill(str(error))
        except ConnectionRefusedError:
            self.succession.avoid(address)
        except (OSError, asyncio.TimeoutError) as error:
            logger.warning("node %s: does not reach the coordinator at %s: %s", self.node, address, error)

    def _drain(self) -> None:
        grace = self._config.drain_grace_s
        self._drain_until = time.monotonic() + grace
        logger.warning("node %s: asked to leave within %g s", self.node, grace)
        self._say({"do": "drain", "grace_s": grace})
        asyncio.get_running_loop().call_later(grace, self.kill, "the drain grace is over")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a node with the token in LAZARUS_TOKEN; exits 0 if all its workers do, also after a drain."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--node", default=os.environ.get("LAZARUS_NODE") or os.uname().nodename)
    parser.add_argument("--coordinator", required=True, metavar="HOST:PORT[,HOST:PORT…]")
    parser.add_argument("--nproc-per-node", type=int, default=1, metavar="K")
    parser.add_argument("--log-dir", type=Path)
    spot.add_arguments(parser)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what every worker runs")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s agent: %(message)s")
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    coordinators = [split_address(address) for address in arguments.coordinator.split(",")]
    spot.watch(arguments)

    async def run() -> int:
        token, size = os.environ["LAZARUS_TOKEN"], arguments.nproc_per_node
        return await Agent(arguments.node, coordinators, token, size, command, arguments.log_dir).run()

    try:
        return asyncio.run(run())
    except ConnectionError as error:
        logger.error("%s", error)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
