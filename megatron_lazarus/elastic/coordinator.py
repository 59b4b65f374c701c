"""The control server of a job, in a process of its own: ``python -m megatron_lazarus.elastic.coordinator``.

Workers, agents and the ``lazarus`` command connect to it. It decides nothing itself: the rules of membership are in
``job.py``, those of its own right to apply them in ``reign.py``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from megatron_lazarus.elastic.election import Charter
from megatron_lazarus.elastic.job import Job
from megatron_lazarus.elastic.journal import ENDED_WELL, JOB_FILE, Journal, write_json
from megatron_lazarus.elastic.messages import MAX_LINE, Channel, Message, ProtocolError, split_address
from megatron_lazarus.elastic.roster import Node, Worker
from megatron_lazarus.elastic.ruling import Ruling
from megatron_lazarus.elastic.settings import (
    BEAT_S,
    EXIT_DEPOSED,
    HANDSHAKE_TIMEOUT_S,
    RESOLVER_OPTIONS,
    SHUTDOWN_LIMIT_S,
    ElasticConfig,
)
from megatron_lazarus.elastic.stores import StoreHost

logger = logging.getLogger(__name__)


class Refused(Exception):
    """A peer that must not take part; the message says why."""


class Coordinator:
    """Serves one job on ``listener`` until it has a result, or until another coordinator may have been elected.

    ``hosted``: an agent has started it.
    """

    def __init__(
        self,
        config: ElasticConfig,
        listener: socket.socket,
        token: str,
        ruling: Ruling,
        log_dir: Path | None = None,
        *,
        hosted: bool = False,
    ) -> None:
        self._listener, self._token, self._ruling, self._log_dir = listener, token, ruling, log_dir
        self._hosted = hosted
        self._host, port = listener.getsockname()[:2]
        self._address = f"{self._host}:{port}"
        self._journal = Journal(log_dir, fresh=ruling.charter is None)
        self._stores = StoreHost(self._host)
        self.job = ruling.job = Job(config, self._journal, self._stores.open, time.monotonic, ruling.propose)
        if ruling.charter is not None:
            self.job.resume(ruling.charter)
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> int:
        """Run the job; returns 0 if it completed or was drained, EXIT_DEPOSED if it may go on under another, else 1."""
        server = await asyncio.start_server(self._connected, sock=self._listener, limit=MAX_LINE)
        self._handle_signals()
        self.job.event("listening", address=self._address, pid=os.getpid(), term=self._ruling.reign.term)
        lease = asyncio.ensure_future(self._ruling.keep_lease())
        rule = asyncio.ensure_future(self._rule())
        beat = asyncio.ensure_future(self._beat())
        try:
            while not self._ruling.stopped and not rule.done():
                await asyncio.wait([rule], timeout=self.job.config.heartbeat_interval_s)
            if self._ruling.stopped and self.job.result is None:
                logger.error("this coordinator stops: %s", self._ruling.stopped)
                return EXIT_DEPOSED
            await rule
            await self._wait_for_departures()
            self._ruling.release()
        finally:
            server.close()
            self._stores.close()
            for task in (left := [rule, lease, beat, *self._tasks]):
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            self._remove_job_file()
            self._journal.close()
        assert self.job.result is not None
        return 0 if self.job.result["status"] in ENDED_WELL else 1

    def _handle_signals(self) -> None:
        """Who has started this process ends the job with one; an agent's coordinator lives as long as the agent wants.

        Batch systems signal all processes of a node that is to go.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            name = signal.Signals(number).name
            if self._hosted:
                loop.add_signal_handler(number, logger.info, "%s is for the agent of this node", name)
            elif number != signal.SIGUSR1:
                loop.add_signal_handler(number, self._stop, f"stopped by {name}")

    def _stop(self, why: str) -> None:
        if self._ruling.holds:
            self.job.end("failed", why)
        else:
            self._ruling.stopped = why

    async def _rule(self) -> None:
        """Look at the clock, again and again, as long as the job has no result."""
        await self._ruling.wait()
        self._write_job_file()
        for node in self.job.living():
            if node.incarnation in self._ruling.dead:
                self.job.fail_node(node, "died", "its agent was gone when this coordinator was elected")
        pause = self.job.config.heartbeat_interval_s / 2
        while self.job.phase != "ended":
            before = time.monotonic()
            await asyncio.sleep(pause)
            await self._ruling.wait()
            late = time.monotonic() - before - pause
            if late > self.job.config.heartbeat_interval_s:
                # Silence that this process slept through, or did not listen in, is not the workers' fault.
                logger.warning("the coordinator was not scheduled, or did not rule, for %.1f s", late)
                self.job.forgive(late)
            self._ruling.establish()
            self.job.tick()

    async def _wait_for_departures(self) -> None:
        limit = time.monotonic() + SHUTDOWN_LIMIT_S + HANDSHAKE_TIMEOUT_S
        while self._tasks and time.monotonic() < limit:
            await asyncio.wait(self._tasks, timeout=limit - time.monotonic())

    def _write_job_file(self) -> None:
        if self._log_dir is not None:
            # Whoever can read the token can command the job.
            contents = {"coordinator": self._address, "token": self._token}
            write_json(self._log_dir / JOB_FILE, contents, mode=0o600)

    async def _beat(self) -> None:
        """Show those who only see the folder that this coordinator rules."""
        while self._log_dir is not None:
            await asyncio.sleep(BEAT_S)
            await self._ruling.wait()
            try:
                # Storage that hangs must not stop the coordinator.
                await asyncio.to_thread(os.utime, self._log_dir / JOB_FILE)
            except OSError as error:
                logger.warning("the folder of the job: %s", error)

    def _remove_job_file(self) -> None:
        """Unless it is a successor's."""
        path = None if self._log_dir is None else self._log_dir / JOB_FILE
        if path is not None and path.exists():
            with contextlib.suppress(FileNotFoundError):
                if json.loads(path.read_text(encoding="utf-8"))["coordinator"] == self._address:
                    path.unlink()

    # -- connections --------------------------------------------------------------------------------------------

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        address = (writer.get_extra_info("peername") or ("?",))[0]
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                channel, hello = await self._welcome(reader, writer)
            roles: dict[str, Callable[[Channel, Message], Awaitable[None]]]
            roles = {"worker": self._serve_worker, "agent": self._serve_agent, "client": self._serve_client}
            role = str(hello.get("role"))
            if role not in roles:
                raise ProtocolError(f"unknown role {role!r}")
            try:
                await roles[role](channel, hello)
            except Refused as reason:
                self.job.event("refused", address=address, role=role, node=hello.get("node"), why=str(reason))
                channel.send({"refused": str(reason)})
                async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                    await channel.flush()
        except (ProtocolError, KeyError, TypeError, ValueError, asyncio.TimeoutError) as error:
            why = str(error) or f"no proof of the job token within {HANDSHAKE_TIMEOUT_S:g} s"
            self.job.event("refused", address=address, why=f"{type(error).__name__}: {why}")
        except ConnectionError as error:
            logger.info("lost %s: %s", address, error)
        except asyncio.CancelledError:
            # This coordinator ends; asyncio would report it as an error of the connection.
            logger.info("closed the connection of %s", address)
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[Channel, Message]:
        channel = await Channel.accept(reader, writer, self._token)
        hello = await channel.receive()
        if hello is None:
            raise ProtocolError("closed before it proved to know the job token")
        return channel, hello

    def _node_of(self, hello: Message) -> Node:
        """The node a newcomer belongs to, known or new; raises Refused for one that is dead, or shall not come back."""
        name, incarnation, size = str(hello["node"]), str(hello["incarnation"]), int(hello["local_size"])
        node = self.job.nodes.get(name)
        if self.job.phase == "ended":
            raise Refused("the job has ended")
        if node is not None and node.incarnation == incarnation:
            if not node.alive:
                raise Refused(f"node {name} ({incarnation}) was declared dead or has left; it can only join anew")
            return node
        if node is not None and node.alive:
            raise Refused(f"another node {name!r} is in the job")
        if incarnation in self.job.past or int(hello.get("generation", 0)):
            raise Refused(f"node {name} ({incarnation}) is of the past; it can only join anew")
        left_s = self.job.quarantine.left_s(name, time.monotonic())
        if left_s > 0:
            raise Refused(f"node {name!r} has failed again and again; it is in quarantine for {left_s:.0f} s more")
        return self.job.add_node(name, incarnation, size)

    async def _serve_worker(self, channel: Channel, hello: Message) -> None:
        node, local_rank = self._node_of(hello), int(hello["local_rank"])
        if not 0 <= local_rank < node.local_size or local_rank in node.workers:
            raise Refused(f"node {node.name} has its worker {local_rank} already, or no room for it")
        worker = Worker(node, local_rank, channel, time.monotonic(), since=time.monotonic())
        worker.step = int(hello.get("step", -1))
        node.workers[local_rank] = worker
        channel.send({"welcome": self.job.config.to_json(), "host": self._host, "term": self._ruling.reign.term})
        await self._ruling.wait()
        self._compare(node, dict(hello["check"]))
        if node.state == "member":
            self.job.came_back(worker, int(hello["generation"]), int(hello["built"]))
        why = "closed its connection"
        try:
            while (message := await channel.receive()) is not None:
                await self._ruling.wait()
                worker.heard = time.monotonic()
                self._worker_says(worker, message)
        except (ProtocolError, KeyError, TypeError, ValueError) as error:
            why = f"sent what is no message: {type(error).__name__}: {error}"
        await self._ruling.wait()
        if not worker.left:
            self.job.fail_node(node, "died", f"local rank {local_rank} {why}")

    def _compare(self, node: Node, check: Message) -> None:
        """All workers must agree on versions, code and configuration, as far as they tell."""
        agreed = self.job.check = self.job.check if self.job.check is not None else check
        differing = sorted(key for key in agreed.keys() | check.keys() if agreed.get(key) != check.get(key))
        if differing:
            listed = "; ".join(f"{key}: {check.get(key)!r} here, {agreed.get(key)!r} there" for key in differing)
            self.job.fail_node(node, "check", listed)
            raise Refused(f"node {node.name} does not fit the job: {listed}")

    def _worker_says(self, worker: Worker, message: Message) -> None:
        job, do = self.job, message["do"]
        if do == "heartbeat":
            worker.step = max(worker.step, int(message["step"]))
            worker.phase, worker.collective = str(message["phase"]), int(message["collective"])
            worker.since = time.monotonic() - float(message["age_s"])
            worker.channel.send({"ack": message["number"]})
        elif do == "join":
            job.ask_join(worker, message)
        elif do == "next":
            job.ask_next(worker, message)
        elif do == "finish":
            job.ask_finish(worker, message)
        elif do == "failed":
            job.worker_failed(worker, message)
        elif do == "built":
            job.built(worker, int(message["generation"]))
        elif do == "leave":
            job.leave(worker)
        elif do == "drain":
            job.drain(worker.node.name)
        elif do == "may_publish":
            allowed = job.may_publish(worker, int(message["generation"]))
            worker.channel.send({"re": message["id"], "allowed": allowed})
        elif do == "event":
            job.event(str(message["kind"]), node=worker.node.name, **dict(message["fields"]))
        else:
            raise ProtocolError(f"unknown request {do!r}")

    async def _serve_agent(self, channel: Channel, hello: Message) -> None:
        node = self._node_of(hello)
        if node.agent is not None:
            raise Refused(f"node {node.name} has its agent already")
        node.agent, node.agent_port, node.agent_heard = channel, int(hello["port"]), time.monotonic()
        welcome = {"welcome": self.job.config.to_json(), "term": self._ruling.reign.term}
        channel.send({**welcome, "at": time.monotonic()})
        channel.send(self._ruling.message())
        why = "closed its connection"
        try:
            while (message := await channel.receive()) is not None:
                node.agent_heard = time.monotonic()
                self._agent_says(node, channel, message)
        except (ProtocolError, KeyError, TypeError, ValueError) as error:
            why = f"sent what is no message: {type(error).__name__}: {error}"
        if channel.closed_by_peer:
            self._ruling.reign.died(node.incarnation, time.monotonic())
        await self._ruling.wait()
        node.agent = None
        self.job.fail_node(node, "died", f"its agent {why}")
        self._ruling.establish()

    def _agent_says(self, node: Node, channel: Channel, message: Message) -> None:
        if message["do"] == "heartbeat":
            self._ruling.heard(node, int(message["term"]), float(message["heard"]))
            channel.send({"ack": message["number"], "at": time.monotonic()})
        elif message["do"] == "accept":
            self._ruling.reign.accepted(node.incarnation, int(message["generation"]))
            self._ruling.establish()
        elif self._ruling.holds:
            self._agent_asks(node, message)
        else:
            # Not here: the heartbeats behind it are what may give us our right back.
            task = asyncio.ensure_future(self._agent_asks_later(node, message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _agent_asks_later(self, node: Node, message: Message) -> None:
        await self._ruling.wait()
        self._agent_asks(node, message)

    def _agent_asks(self, node: Node, message: Message) -> None:
        if message["do"] == "exit":
            self._worker_exited(node, int(message["local_rank"]), str(message["status"]))
        elif message["do"] == "drain":
            self.job.drain(node.name, float(message["grace_s"]))
        else:
            raise ProtocolError(f"unknown request {message['do']!r}")

    def _worker_exited(self, node: Node, local_rank: int, status: str) -> None:
        self.job.event("exit", node=node.name, local_rank=local_rank, status=status)
        worker = node.workers.get(local_rank)
        if worker is None or not worker.left:
            self.job.fail_node(node, "died", f"local rank {local_rank} ended: {status}")

    async def _serve_client(self, channel: Channel, hello: Message) -> None:
        channel.send({"welcome": None})
        while (message := await channel.receive()) is not None:
            if message["do"] == "status":
                channel.send(self.job.status())
                continue
            await self._ruling.wait()
            if message["do"] == "drain":
                channel.send({"error": self.job.drain(str(message["node"]))})
            elif message["do"] == "end":
                self.job.end("failed", str(message["why"]))
                channel.send({"error": None})
            else:
                raise ProtocolError(f"unknown request {message['do']!r}")


def main(argv: list[str] | None = None) -> int:
    """Serve a job with the token in LAZARUS_TOKEN; exits 0 if it completed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--listen", metavar="HOST:PORT", help="address of the interface to serve on")
    parser.add_argument("--log-dir", type=Path, help="folder of the events file and the completion marker")
    parser.add_argument("--settings", default="{}", help='the "lazarus.elastic" section, as JSON')
    parser.add_argument("--listen-fd", type=int, help="instead of --listen: a socket that the agent has opened")
    parser.add_argument("--succession", default="{}", help="of a successor: its term, charter and lease, as JSON")
    arguments = parser.parse_args(argv)
    for name, value in RESOLVER_OPTIONS.items():
        os.environ.setdefault(name, value)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s coordinator: %(message)s")
    if hosted := arguments.listen_fd is not None:
        listener = socket.socket(fileno=arguments.listen_fd)
    else:
        listener = socket.create_server(split_address(arguments.listen))
    config = ElasticConfig(**json.loads(arguments.settings))
    given: dict[str, Any] = json.loads(arguments.succession)
    seed = Charter.from_json(given["charter"]) if given else None
    token = os.environ["LAZARUS_TOKEN"]
    ruling = Ruling(config, token, given.get("term", 1), seed, given.get("dead", ()), given.get("lease_until"))
    coordinator = Coordinator(config, listener, token, ruling, arguments.log_dir, hosted=hosted)
    with contextlib.suppress(KeyboardInterrupt):
        return asyncio.run(coordinator.serve())
    return 1


if __name__ == "__main__":
    sys.exit(main())
