"""``lazarus join``: one node of a job whose nodes meet through a shared folder; for batch systems.

Every node runs the same command, in any order, at any time, as often as it likes. The first one founds the job and
serves its coordinator; when that host dies, the others elect another.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from megatron_lazarus.elastic import spot
from megatron_lazarus.elastic.agent import Agent
from megatron_lazarus.elastic.interfaces import own_address
from megatron_lazarus.elastic.journal import RESULT_FILE, read_json, write_json
from megatron_lazarus.elastic.messages import split_address
from megatron_lazarus.elastic.rendezvous import Meeting, Rendezvous
from megatron_lazarus.elastic.run_command import (
    RUN_FILE,
    add_log_dir,
    describe_result,
    elastic_config,
    reporting,
    worker_command,
)
from megatron_lazarus.elastic.settings import EXIT_LEFT, ElasticConfig

logger = logging.getLogger(__name__)

_NODE_COUNTS = {
    "min": "nodes that must survive",
    "start": "nodes that training starts with, if they come within the join window",
    "max": "nodes that train, others wait as spares",
}


def add_parser(subparsers: Any) -> None:
    """Add the command to those of ``lazarus``."""
    join = subparsers.add_parser(
        "join",
        help="run this host's node of a job whose nodes meet through the log folder",
        description=f"Exit status: 0: the run is complete; {EXIT_LEFT}: this node has left it, asked to by a signal or "
        "a notice, and it is not complete; 1: the run has failed, or this node has, too often.",
    )
    for name, meaning in _NODE_COUNTS.items():
        join.add_argument(f"--{name}-nodes", type=int, metavar="N", help=f"{meaning}; default: the config's")
    join.add_argument("--nproc-per-node", type=int, default=1, metavar="K", help="worker processes of the node")
    join.add_argument("--node", metavar="NAME", help="default: SLURMD_NODENAME, or the host's name")
    join.add_argument("--address", metavar="IP", help="where others reach this host; default: as elastic.interface")
    join.add_argument("--port", type=int, default=0, help="of the coordinator, if this node founds the job")
    join.add_argument("--config", type=Path, help='DeepSpeed JSON whose "lazarus.elastic" section holds for the job')
    join.add_argument(
        "--max-rejoins", type=int, default=3, metavar="N", help="after failures of this node (%(default)s)"
    )
    join.add_argument("--module", action="store_true", help="the script is a module's name")
    spot.add_arguments(join)
    add_log_dir(join)
    join.add_argument("script")
    join.add_argument("arguments", nargs=argparse.REMAINDER)
    join.set_defaults(run=reporting(join_job))


class _Member(Agent):
    """An agent that serves the job's first coordinator itself if its node has founded the job."""

    def __init__(self, node: str, meeting: Meeting, arguments: argparse.Namespace, config: ElasticConfig) -> None:
        command = worker_command(arguments)
        coordinators = [split_address(meeting.address)]
        super().__init__(node, coordinators, meeting.token, arguments.nproc_per_node, command, arguments.log_dir)
        self._meeting, self._settings = meeting, config

    # The node joins again, which it could not while it serves the coordinator.
    stays = False

    async def run(self) -> int:
        try:
            return await super().run()
        finally:
            coordinator = self.succession.coordinator
            if coordinator is not None and coordinator.returncode is None:
                coordinator.kill()
                await coordinator.wait()

    @property
    def has_drained(self) -> bool:
        return self._drain_until is not None

    async def _connect(self) -> None:
        if self._meeting.listener is not None:
            await self.succession.found(self._settings, self._meeting.listener)
        await super()._connect()


def join_job(arguments: argparse.Namespace) -> int:
    """Take part until the run is complete or has failed, or this node has to leave."""
    _leave_on_signals()
    arguments.log_dir = log_dir = arguments.log_dir.resolve()
    log_dir.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s agent: %(message)s")
    counts = {f"{name}_nodes": getattr(arguments, f"{name}_nodes") for name in _NODE_COUNTS}
    config = elastic_config(arguments.config, **{name: count for name, count in counts.items() if count is not None})
    node = arguments.node or os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    address = arguments.address or own_address(config.interface)
    logger.info("node %s, address %s, log folder %s", node, address, log_dir)
    run = {"command": worker_command(arguments), "nproc_per_node": arguments.nproc_per_node}
    write_json(log_dir / RUN_FILE, run)
    spot.watch(arguments)
    for attempt in range(1 + arguments.max_rejoins):
        if attempt:
            logger.warning("node %s: joins again, %d of %d times", node, attempt, arguments.max_rejoins)
            # By then the job knows that this node had been lost before.
            time.sleep(config.heartbeat_timeout_s)
        result = read_json(log_dir / RESULT_FILE)
        if result is not None and result["status"] == "completed":
            return _told(result)
        meeting = Rendezvous(log_dir, address, config.lease_s, arguments.port).meet(2 * config.lease_s + 60.0)
        member = _Member(node, meeting, arguments, config)
        try:
            asyncio.run(member.run())
        except ConnectionError as error:
            logger.error("%s", error)
        _leave_on_signals()
        result = read_json(log_dir / RESULT_FILE)
        if result is not None and result["status"] != "drained":
            return _told(result)
        if member.has_drained:
            print(f"lazarus join: node {node} has left", flush=True)
            return EXIT_LEFT
    print(f"lazarus join: node {node} has failed {1 + arguments.max_rejoins} times", file=sys.stderr)
    return 1


def _leave_on_signals() -> None:
    """As long as there is no agent, which takes them over."""

    def leave(*_: object) -> None:
        raise SystemExit(EXIT_LEFT)

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, leave)


def _told(result: dict[str, Any]) -> int:
    code = int(result["status"] != "completed")
    print(f"lazarus join: {describe_result(result)}", file=sys.stderr if code else sys.stdout, flush=True)
    return code
