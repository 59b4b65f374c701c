"""The control server of a job, in a process of its own: ``python -m megatron_lazarus.elastic.coordinator``.

Workers, agents and the ``lazarus`` command connect to it. It decides nothing itself: the rules are in ``job.py``.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megatron_lazarus.elastic.job import Job
from megatron_lazarus.elastic.journal import JOB_FILE, Journal, write_json
from megatron_lazarus.elastic.messages import MAX_LINE, Channel, Message, ProtocolError, split_address
from megatron_lazarus.elastic.roster import Node, Worker
from megatron_lazarus.elastic.settings import (
    BUILD_TIMEOUT_S,
    HANDSHAKE_TIMEOUT_S,
    RESOLVER_OPTIONS,
    SHUTDOWN_LIMIT_S,
    ElasticConfig,
)

logger = logging.getLogger(__name__)


class Refused(Exception):
    """A peer that must not take part; the message says why."""


def host_store(host: str) -> tuple[int, object]:
    """Serve a fresh TCPStore on ``host``; returns its port and the object that keeps it alive."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    with socket.create_server((host, 0)) as listener:
        port = int(listener.getsockname()[1])
        # The store listens on every interface unless it is given a socket.
        descriptor = listener.detach()
    return port, TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)


class StoreHost:
    """Opens the stores of generations ahead of need: a slow name server must not hold the control server up."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._thread = ThreadPoolExecutor(1, "lazarus-store")
        self._next = self._thread.submit(host_store, host)

    def open(self) -> tuple[int, object]:
        store = self._next.result(BUILD_TIMEOUT_S)
        self._next = self._thread.submit(host_store, self._host)
        return store

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


class Coordinator:
    """Serves one job at ``host:port`` until it has a result."""

    def __init__(self, config: ElasticConfig, host: str, port: int, token: str, log_dir: Path | None = None) -> None:
        self._host, self._port, self._token, self._log_dir = host, port, token, log_dir
        self._journal = Journal(log_dir)
        self._stores = StoreHost(host)
        self.job = Job(config, self._journal, self._stores.open, time.monotonic)
        self._check: Message | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> int:
        """Run the job; returns 0 if it completed, else 1. Raises OSError if the port cannot be had."""
        server = await asyncio.start_server(self._connected, self._host, self._port, limit=MAX_LINE)
        host, port = server.sockets[0].getsockname()[:2]
        if self._log_dir is not None:
            # Whoever can read the token can command the job.
            contents = {"coordinator": f"{host}:{port}", "token": self._token}
            write_json(self._log_dir / JOB_FILE, contents, mode=0o600)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.job.end, "failed", f"stopped by {signal.Signals(number).name}")
        self.job.event("listening", address=f"{host}:{port}", pid=os.getpid())
        try:
            await self._tick()
            await self._wait_for_departures()
        finally:
            server.close()
            self._stores.close()
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            if self._log_dir is not None:
                (self._log_dir / JOB_FILE).unlink(missing_ok=True)
            self._journal.close()
        assert self.job.result is not None
        return 0 if self.job.result["status"] == "completed" else 1

    async def _tick(self) -> None:
        pause = self.job.config.heartbeat_interval_s / 2
        before = time.monotonic()
        while self.job.phase != "ended":
            await asyncio.sleep(pause)
            now = time.monotonic()
            late = now - before - pause
            if late > self.job.config.heartbeat_interval_s:
                # Silence that this process slept through is not the workers' fault.
                logger.warning("the coordinator was not scheduled for %.1f s", late)
                for node in self.job.nodes.values():
                    node.agent_heard += late
                    for worker in node.workers.values():
                        worker.heard += late
            before = now
            self.job.tick()
            for node in list(self.job.nodes.values()):
                if node.alive and node.agent and now - node.agent_heard > self.job.config.heartbeat_timeout_s:
                    self.job.fail_node(node, "silent", "its agent is silent", now - node.agent_heard)

    async def _wait_for_departures(self) -> None:
        limit = time.monotonic() + SHUTDOWN_LIMIT_S + HANDSHAKE_TIMEOUT_S
        while self._tasks and time.monotonic() < limit:
            await asyncio.wait(self._tasks, timeout=limit - time.monotonic())

    # -- connections --------------------------------------------------------------------------------------------

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        address = (writer.get_extra_info("peername") or ("?",))[0]
        try:
            channel, hello = await asyncio.wait_for(self._welcome(reader, writer), HANDSHAKE_TIMEOUT_S)
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
                await asyncio.wait_for(channel.flush(), HANDSHAKE_TIMEOUT_S)
        except (ProtocolError, KeyError, TypeError, ValueError, asyncio.TimeoutError) as error:
            why = str(error) or f"no proof of the job token within {HANDSHAKE_TIMEOUT_S:g} s"
            self.job.event("refused", address=address, why=f"{type(error).__name__}: {why}")
        except ConnectionError as error:
            logger.info("lost %s: %s", address, error)
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
        if incarnation in self.job.past:
            raise Refused(f"node {name} ({incarnation}) is of the past; it can only join anew")
        left_s = self.job.quarantine.left_s(name, time.monotonic())
        if left_s > 0:
            raise Refused(f"node {name!r} has failed again and again; it is in quarantine for {left_s:.0f} s more")
        return self.job.add_node(name, incarnation, size)

    async def _serve_worker(self, channel: Channel, hello: Message) -> None:
        node, local_rank = self._node_of(hello), int(hello["local_rank"])
        if not 0 <= local_rank < node.local_size or local_rank in node.workers:
            raise Refused(f"node {node.name} has its worker {local_rank} already, or no room for it")
        self._compare(node, dict(hello["check"]))
        worker = Worker(node, local_rank, channel, time.monotonic(), since=time.monotonic())
        node.workers[local_rank] = worker
        channel.send({"welcome": self.job.config.to_json(), "host": self._host})
        why = "closed its connection"
        try:
            while (message := await channel.receive()) is not None:
                worker.heard = time.monotonic()
                self._worker_says(worker, message)
        except (ProtocolError, KeyError, TypeError, ValueError) as error:
            why = f"sent what is no message: {type(error).__name__}: {error}"
        finally:
            if not worker.left:
                self.job.fail_node(node, "died", f"local rank {local_rank} {why}")

    def _compare(self, node: Node, check: Message) -> None:
        """All workers must agree on versions, code and configuration, as far as they tell."""
        if self._check is None:
            self._check = check
        differing = sorted(key for key in self._check.keys() | check.keys() if self._check.get(key) != check.get(key))
        if differing:
            listed = "; ".join(f"{key}: {check.get(key)!r} here, {self._check.get(key)!r} there" for key in differing)
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
        node.agent, node.agent_heard = channel, time.monotonic()
        channel.send({"welcome": self.job.config.to_json()})
        try:
            while (message := await channel.receive()) is not None:
                node.agent_heard = time.monotonic()
                if message["do"] == "heartbeat":
                    channel.send({"ack": message["number"]})
                elif message["do"] == "exit":
                    self._worker_exited(node, int(message["local_rank"]), str(message["status"]))
                elif message["do"] == "drain":
                    self.job.drain(node.name, float(message["grace_s"]))
                else:
                    raise ProtocolError(f"unknown request {message['do']!r}")
        finally:
            node.agent = None
            self.job.fail_node(node, "died", "its agent closed its connection")

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
            elif message["do"] == "drain":
                channel.send({"error": self.job.drain(str(message["node"]))})
            else:
                raise ProtocolError(f"unknown request {message['do']!r}")


def main(argv: list[str] | None = None) -> int:
    """Serve a job with the token in LAZARUS_TOKEN; exits 0 if it completed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--listen", required=True, metavar="HOST:PORT", help="address of the interface to serve on")
    parser.add_argument("--log-dir", type=Path, help="folder of the events file and the completion marker")
    parser.add_argument("--settings", default="{}", help='the "lazarus.elastic" section, as JSON')
    arguments = parser.parse_args(argv)
    for name, value in RESOLVER_OPTIONS.items():
        os.environ.setdefault(name, value)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s coordinator: %(message)s")
    host, port = split_address(arguments.listen)
    settings: dict[str, Any] = json.loads(arguments.settings)
    coordinator = Coordinator(ElasticConfig(**settings), host, port, os.environ["LAZARUS_TOKEN"], arguments.log_dir)
    with contextlib.suppress(KeyboardInterrupt):
        return asyncio.run(coordinator.serve())
    return 1


if __name__ == "__main__":
    sys.exit(main())
