"""Runs a script on nodes that may die, under the stock ``deepspeed`` command.

``deepspeed [its flags] --module megatron_lazarus.launch [options] train.py arguments`` starts this once per rank. The
first rank's process of every node is the node's agent and starts the node's workers, that of rank 0 also starts the
coordinator; the others only wait. DeepSpeed's launcher kills all ranks of a host when one ends with an error, so
while the job lives these processes end with status 0 whatever became of their workers. The job's result is in
``<log dir>/result.json``; ``lazarus status`` shows it. The deepspeed command's own status is not to be relied on: it
is 0, too, when its launcher is killed. Nothing here outlives DeepSpeed's launcher.

The coordinator listens at MASTER_ADDR:MASTER_PORT. Several hosts need either a log folder that they share, through
which they get the job's token, or a line ``LAZARUS_TOKEN=…`` in ``.deepspeed_env``, the same for all.

With an enabled ``"lazarus"`` section the script runs through ``megatron_lazarus.script``, which puts lazarus in place
of ``deepspeed.moe.layer.MoE`` and ``deepspeed.initialize``; without one it runs as if this module were not there. Where
the section's ``elastic`` part is disabled there are no agents: DeepSpeed's launcher has started the script's ranks.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_lazarus.config import ConfigError, LazarusConfig
from megatron_lazarus.elastic.agent import START_LIMIT_S, Agent
from megatron_lazarus.elastic.follower import Follower
from megatron_lazarus.elastic.journal import ENDED_WELL, JOB_FILE, RESULT_FILE, read_json, write_json
from megatron_lazarus.elastic.messages import BlockingChannel
from megatron_lazarus.elastic.place import (
    Place,
    PlaceError,
    bound_cores,
    parent_of,
    runner,
    sibling,
    wait_for_sibling,
)
from megatron_lazarus.elastic.processes import die_with
from megatron_lazarus.elastic.run_command import (
    COORDINATOR,
    RUN_FILE,
    conclude,
    describe_result,
    start_service,
)
from megatron_lazarus.elastic.settings import HANDSHAKE_TIMEOUT_S, SHUTDOWN_LIMIT_S, ElasticConfig
from megatron_lazarus.script_command import config_of, enabled_section, python_command

logger = logging.getLogger(__name__)

_LAUNCHER_ONLY = ("RANK", "WORLD_SIZE", "CROSS_RANK", "CROSS_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What holds for the start alone: workers learn rank and world from the coordinator, generation by generation."""

_POLL_S = 0.2


def main(argv: Sequence[str] | None = None) -> int:
    """Take the place of one rank's process."""
    arguments = _parser().parse_args(argv)
    try:
        config = _elastic_section(arguments)
        if config is None:
            command = _command(arguments, arguments.local_rank)
            os.execv(command[0], command)
        place = Place.from_environment(os.environ, arguments.ranks_per_node)
        settings = _settings(config.elastic, place.nodes, arguments.min_nodes)
    except (ConfigError, PlaceError) as error:
        # Every rank meets the same error; one tells of it, before the launcher kills the others.
        if os.environ.get("RANK", "0") != "0":
            return 0
        print(f"megatron_lazarus.launch: {error}", file=sys.stderr)
        return 2
    die_with(os.getppid())
    if place.local_rank != place.first:
        return _wait_for(place.first)
    return _Launch(arguments, place, settings).run()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="deepspeed … --module megatron_lazarus.launch",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    # DeepSpeed's launcher adds it, unless --no_local_rank.
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--ranks-per-node", type=int, metavar="K", help="split hosts into nodes of K ranks each")
    parser.add_argument("--min-nodes", type=int, metavar="N", help="nodes that must survive; default: the config's")
    parser.add_argument("--log-dir", type=Path, default=Path("lazarus-logs"), help="the job's folder (%(default)s)")
    parser.add_argument(
        "--lazarus-config", type=Path, metavar="JSON", help="DeepSpeed config; default: the script's --deepspeed_config"
    )
    parser.add_argument("--module", action="store_true", help="the script is a module's name")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser


def _elastic_section(arguments: argparse.Namespace) -> LazarusConfig | None:
    config = enabled_section(config_of(arguments.lazarus_config, arguments.arguments))
    return config if config is not None and config.elastic.enabled else None


def _settings(elastic: ElasticConfig, nodes: int, min_nodes: int | None) -> ElasticConfig:
    """The section for a job of so many nodes, with which training starts unless it says otherwise."""
    least = elastic.min_nodes if min_nodes is None else min_nodes
    start = elastic.start_nodes or min(nodes, elastic.max_nodes or nodes)
    try:
        return dataclasses.replace(elastic, min_nodes=least, start_nodes=start)
    except ValueError as error:
        raise ConfigError(f"{error} (the job has {nodes} nodes)") from None


def _command(arguments: argparse.Namespace, local_rank: int | None) -> list[str]:
    """The script's, as DeepSpeed's launcher would have it."""
    rank = [] if local_rank is None else [f"--local_rank={local_rank}"]
    config = config_of(arguments.lazarus_config, arguments.arguments)
    return python_command(arguments.script, arguments.module, [*rank, *arguments.arguments], config, unbuffered=True)


def _wait_for(leader: int) -> int:
    """Stay as long as the process that acts for our node, so that the launcher counts us as running."""
    pid = wait_for_sibling(leader)
    while pid is not None and sibling(leader) == pid:
        time.sleep(1.0)
    return 0


class _Node(Agent):
    """Its workers get what DeepSpeed's launcher would have given them."""

    def __init__(self, arguments: argparse.Namespace, place: Place, token: str) -> None:
        coordinator = (place.address, place.port)
        super().__init__(place.node, [coordinator], token, place.node_size, [], arguments.log_dir)
        self._arguments = arguments
        self._cores = bound_cores(place)

    def command(self, local_rank: int) -> Sequence[str]:
        return _command(self._arguments, None if self._arguments.local_rank is None else local_rank)

    def prepare(self, local_rank: int) -> None:
        if self._cores:
            os.sched_setaffinity(0, self._cores[local_rank])


class _Launch:
    """The process that acts for its node and, at rank 0, for the job."""

    def __init__(self, arguments: argparse.Namespace, place: Place, settings: ElasticConfig) -> None:
        arguments.log_dir = arguments.log_dir.resolve()
        self._arguments, self._place, self._settings = arguments, place, settings
        self._log_dir: Path = arguments.log_dir
        self._coordinator: subprocess.Popen[bytes] | None = None
        self._stopped = False

    def run(self) -> int:
        """Run the node, at rank 0 until the job has ended; its failure is told only then, when it harms nobody."""
        place = self._place
        self._log_dir.mkdir(parents=True, exist_ok=True)
        # Not to stderr: a terminal that takes no output must not make this node look dead.
        log = self._log_dir / f"agent-{place.node}.log"
        logging.basicConfig(level=logging.INFO, filename=log, format="%(asctime)s agent: %(message)s")
        try:
            if place.rank != 0:
                asyncio.run(self._run(_Node(self._arguments, place, self._shared_token()), None))
                return 0
            return self._run_job()
        except Exception as error:
            logger.exception("node %s", place.node)
            print(f"megatron_lazarus.launch: node {place.node}: {error}", file=sys.stderr)
            return 1 if place.rank == 0 else 0

    def _run_job(self) -> int:
        for stale in (RESULT_FILE, JOB_FILE):
            (self._log_dir / stale).unlink(missing_ok=True)
        place = self._place
        token = os.environ.get("LAZARUS_TOKEN") or secrets.token_hex(32)
        run = {"command": _command(self._arguments, None), "nproc_per_node": place.node_size}
        write_json(self._log_dir / RUN_FILE, run)
        options = ["--listen", f"{place.address}:{place.port}", "--log-dir", str(self._log_dir)]
        options += ["--settings", json.dumps(self._settings.to_json())]
        follower = Follower(self._log_dir, place.node)
        coordinator = start_service(
            "coordinator",
            [COORDINATOR, *options],
            environment={**os.environ, "LAZARUS_TOKEN": token},
            log_dir=self._log_dir,
        )
        try:
            follower.start()
            asyncio.run(self._run(_Node(self._arguments, place, token), coordinator))
        finally:
            coordinator.kill()
            code = coordinator.wait()
            follower.stop()
        result = conclude(self._log_dir, code)
        well = result["status"] in ENDED_WELL
        print(f"lazarus: {describe_result(result)}", file=sys.stdout if well else sys.stderr)
        return int(not well)

    def _shared_token(self) -> str:
        """The job's, from the environment or from the file that the coordinator writes. Raises TimeoutError."""
        if token := os.environ.get("LAZARUS_TOKEN"):
            return token
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline:
            job = read_json(self._log_dir / JOB_FILE)
            # A job that was killed leaves its file, with a token that opens nothing.
            if job is not None and self._is_accepted(str(job["token"])):
                return str(job["token"])
            time.sleep(_POLL_S)
        raise TimeoutError(
            f"no token for the coordinator at {self._place.address}:{self._place.port} in {self._log_dir / JOB_FILE} "
            f"within {START_LIMIT_S:g} s; put --log-dir on storage that all hosts share, or give all hosts the same "
            "LAZARUS_TOKEN (a line in .deepspeed_env)"
        )

    def _is_accepted(self, token: str) -> bool:
        try:
            address = (self._place.address, self._place.port)
            with contextlib.closing(BlockingChannel.connect(*address, token, HANDSHAKE_TIMEOUT_S)) as channel:
                channel.send({"role": "client"})
                return channel.receive(HANDSHAKE_TIMEOUT_S) is not None
        except OSError as error:
            logger.info("the coordinator does not accept the token in %s: %s", JOB_FILE, error)
            return False

    # -- while it runs ------------------------------------------------------------------------------------------

    async def _run(self, agent: _Node, coordinator: subprocess.Popen[bytes] | None) -> None:
        """Until the node has ended and, where the coordinator is ours, the job."""
        os.environ.update(self._place.device_lists(os.environ))
        for name in _LAUNCHER_ONLY:
            os.environ.pop(name, None)
        loop = asyncio.get_running_loop()

        def stop() -> None:
            if coordinator is None:
                signal.raise_signal(signal.SIGTERM)
            elif coordinator.poll() is None:
                logger.warning("asked to stop; the job ends")
                coordinator.terminate()

        loop.add_signal_handler(signal.SIGINT, stop)
        node = asyncio.ensure_future(agent.run())
        watch = asyncio.ensure_future(_when_runner_is_gone(stop))
        try:
            if coordinator is None:
                await node
                return
            while coordinator.poll() is None:
                if node.done():
                    # The agent's own handler of it would ask for the departure of a node that is gone.
                    loop.add_signal_handler(signal.SIGTERM, stop)
                await asyncio.sleep(_POLL_S)
            # Without a result the job goes on under another coordinator.
            ended = read_json(self._log_dir / RESULT_FILE) is not None
            await asyncio.wait([node], timeout=SHUTDOWN_LIMIT_S if ended else None)
        finally:
            node.cancel()
            watch.cancel()
            for outcome in await asyncio.gather(node, watch, return_exceptions=True):
                if isinstance(outcome, Exception):
                    logger.error("node %s: %s", self._place.node, outcome)


async def _when_runner_is_gone(stop: Callable[[], Any]) -> None:
    """DeepSpeed's launcher outlives a deepspeed command that is terminated; we do not."""
    pid = runner()
    if pid is None:
        return
    while parent_of(os.getppid()) == pid:
        await asyncio.sleep(_POLL_S)
    logger.warning("the deepspeed command is gone")
    stop()


if __name__ == "__main__":
    sys.exit(main())
