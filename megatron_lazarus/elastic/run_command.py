"""``lazarus run``, ``status``, ``drain`` and ``add-node``: start a job's processes here, and talk to a job."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megatron_lazarus.elastic import agent, spot
from megatron_lazarus.elastic.journal import ENDED_WELL, JOB_FILE, RESULT_FILE, read_json, write_json
from megatron_lazarus.elastic.messages import BlockingChannel, Message, split_address
from megatron_lazarus.elastic.place import divided_devices
from megatron_lazarus.elastic.processes import die_with
from megatron_lazarus.elastic.settings import HANDSHAKE_TIMEOUT_S, SHUTDOWN_LIMIT_S, ElasticConfig
from megatron_lazarus.script_command import config_of, python_command

RUN_FILE = "run.json"
"""What ``lazarus add-node`` needs to know of a job: {"command": […], "nproc_per_node": K}."""

_AGENT = "megatron_lazarus.elastic.agent"
COORDINATOR = "megatron_lazarus.elastic.coordinator"


class CommandError(Exception):
    """What the user has asked for cannot be done; the message says why."""


def add_parser(subparsers: Any) -> None:
    """Add the four commands to those of ``lazarus``."""
    run = subparsers.add_parser("run", help="run a script on nodes that may come and go")
    run.add_argument("--nnodes", required=True, metavar="MIN[:MAX]", help="fewest and most nodes")
    run.add_argument("--nproc-per-node", type=int, default=1, metavar="K", help="worker processes of a node")
    run.add_argument("--coordinator", metavar="HOST:PORT", help="who can bind it first serves the job; default: local")
    run.add_argument("--local-nodes", type=int, default=1, metavar="N", help="nodes to start on this machine")
    run.add_argument("--node", metavar="NAME", help="this node's name, or the first part of several nodes' names")
    run.add_argument("--config", type=Path, help='DeepSpeed JSON whose "lazarus.elastic" section holds for the job')
    run.add_argument("--module", action="store_true", help="the script is a module's name")
    spot.add_arguments(run)
    add_log_dir(run)
    run.add_argument("script")
    run.add_argument("arguments", nargs=argparse.REMAINDER)
    run.set_defaults(run=reporting(run_job))
    status = subparsers.add_parser("status", help="show a job's nodes")
    add_log_dir(status)
    status.set_defaults(run=reporting(show_status))
    drain = subparsers.add_parser("drain", help="have a node hand over what only it holds, and leave")
    drain.add_argument("node")
    add_log_dir(drain)
    drain.set_defaults(run=reporting(drain_node))
    add = subparsers.add_parser("add-node", help="join a running job with one more node on this machine")
    add.add_argument("--node", metavar="NAME", help="name of the node; default: the first free nodeN")
    add_log_dir(add)
    add.set_defaults(run=reporting(add_node))


def add_log_dir(parser: argparse.ArgumentParser) -> None:
    """Every command finds the job by its folder."""
    parser.add_argument("--log-dir", type=Path, default=Path("lazarus-logs"), help="the job's folder (%(default)s)")


def reporting(command: Any) -> Any:
    """The command, with what the user can do something about told in a line."""

    def run(arguments: argparse.Namespace) -> int:
        try:
            return int(command(arguments))
        except (CommandError, OSError, ValueError) as error:
            print(f"lazarus {arguments.command}: {error}", file=sys.stderr)
            return 1

    return run


# -- lazarus run ------------------------------------------------------------------------------------------------


def run_job(arguments: argparse.Namespace) -> int:
    """Run a job's processes of this machine until they end; 0 only if the job completed, or all nodes have left it."""
    log_dir = arguments.log_dir.resolve()
    least, _, most = arguments.nnodes.partition(":")
    if not least.isdigit() or (most and not most.isdigit()):
        raise CommandError(f"--nnodes is {arguments.nnodes!r}; it must be MIN or MIN:MAX")
    config = elastic_config(arguments.config, min_nodes=int(least), max_nodes=int(most or least))
    if arguments.nproc_per_node < 1 or arguments.local_nodes < 1:
        raise CommandError("--nproc-per-node and --local-nodes must be at least 1")
    host, port = split_address(arguments.coordinator) if arguments.coordinator else ("127.0.0.1", _free_port())
    devices = divided_devices(os.environ, arguments.local_nodes, arguments.nproc_per_node)
    log_dir.mkdir(parents=True, exist_ok=True)
    hosting = not arguments.coordinator or _can_bind(host, port)
    environment = {**os.environ, "LAZARUS_TOKEN": _token(log_dir, hosting)}
    command = worker_command(arguments)
    write_json(log_dir / RUN_FILE, {"command": command, "nproc_per_node": arguments.nproc_per_node})
    start = partial(start_service, log_dir=log_dir)
    coordinator = None
    if hosting:
        settings = json.dumps(config.to_json())
        options = ["--listen", f"{host}:{port}", "--log-dir", str(log_dir), "--settings", settings]
        coordinator = start("coordinator", [COORDINATOR, *options], environment=environment)
    agents = []
    for name, own in zip(_node_names(arguments.node, arguments.local_nodes), devices, strict=True):
        options = ["--node", name, "--coordinator", f"{host}:{port}", "--log-dir", str(log_dir)]
        options += ["--nproc-per-node", str(arguments.nproc_per_node), *spot.options(arguments)]
        agents.append(start(f"agent-{name}", [_AGENT, *options, "--", *command], environment={**environment, **own}))
    print(f"lazarus run: {len(agents)} nodes here, coordinator at {host}:{port}, logs in {log_dir}", flush=True)
    return _wait(coordinator, agents, log_dir)


def _wait(coordinator: subprocess.Popen[bytes] | None, agents: list[subprocess.Popen[bytes]], log_dir: Path) -> int:
    """Pass signals on, and wait: SIGTERM and SIGUSR1 drain this machine's nodes, SIGINT ends the job."""

    def drain(*_: object) -> None:
        for process in agents:
            process.send_signal(signal.SIGTERM)

    def stop(*_: object) -> None:
        if coordinator is not None and coordinator.poll() is None:
            coordinator.terminate()
        elif coordinator is None or not _end(log_dir):
            drain()

    for number, handler in ((signal.SIGTERM, drain), (signal.SIGUSR1, drain), (signal.SIGINT, stop)):
        signal.signal(number, handler)
    try:
        if coordinator is None:
            return max(_bounded_code(process.wait()) for process in agents)
        code = _bounded_code(coordinator.wait())
        # Without a result the job goes on under another coordinator, for as long as there are agents.
        limit_s = None if read_json(log_dir / RESULT_FILE) is None else SHUTDOWN_LIMIT_S
        deadline = time.monotonic() + (limit_s or 0.0)
        for process in agents:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(None if limit_s is None else max(0.1, deadline - time.monotonic()))
    finally:
        for process in [*agents, *([coordinator] if coordinator else [])]:
            process.kill()
            process.wait()
    result = conclude(log_dir, code)
    code = int(result["status"] not in ENDED_WELL)
    print(f"lazarus run: {describe_result(result)}", file=sys.stderr if code else sys.stdout)
    return code


def conclude(log_dir: Path, coordinator_code: int) -> dict[str, Any]:
    """The result of a job that has ended; one that has lost all its coordinators gets its result here."""
    result = read_json(log_dir / RESULT_FILE)
    if result is None:
        reason = (
            f"its coordinator ended with status {coordinator_code} and without a result, and no other finished the "
            f"job; see coordinator.log and the agents' logs in {log_dir}"
        )
        result = {"status": "failed", "reason": reason, "generation": 0, "step": -1, "failures": [], "value": None}
        write_json(log_dir / RESULT_FILE, result)
    return result


def _end(log_dir: Path) -> bool:
    """Ask the coordinator that has taken over to end the job; False if there is none."""
    try:
        return not _ask(log_dir, {"do": "end", "why": "stopped by SIGINT"})["error"]
    except (CommandError, OSError) as error:
        print(f"lazarus run: {error}", file=sys.stderr)
        return False


def start_service(name: str, arguments: Sequence[str], *, environment: dict[str, str], log_dir: Path) -> Any:
    """Start a module that logs to ``<name>.log`` and dies with this process."""
    parent = os.getpid()
    with (log_dir / f"{name}.log").open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # Ctrl-C reaches only us, who know what is to be done.
            start_new_session=True,
            preexec_fn=lambda: die_with(parent),
        )


def elastic_config(path: Path | None, **given: Any) -> ElasticConfig:
    """The job's section of a DeepSpeed JSON, with some other values. Raises CommandError, ValueError or OSError."""
    section: dict[str, Any] = {}
    if path is not None:
        section = json.loads(path.read_text(encoding="utf-8")).get("lazarus", {}).get("elastic", {})
    section.update(given)
    try:
        return ElasticConfig(**section)
    except TypeError as error:
        raise CommandError(f'"lazarus.elastic" in {path}: {error}') from None


def worker_command(arguments: argparse.Namespace) -> list[str]:
    """What every worker runs."""
    config = config_of(arguments.config, arguments.arguments)
    return python_command(arguments.script, arguments.module, arguments.arguments, config)


def _node_names(name: str | None, count: int) -> list[str]:
    if count == 1:
        return [name or socket.gethostname()]
    return [f"{name or 'node'}{index}" for index in range(count)]


def _token(log_dir: Path, hosting: bool) -> str:
    if token := os.environ.get("LAZARUS_TOKEN"):
        return token
    if hosting:
        return secrets.token_hex(32)
    if job := read_json(log_dir / JOB_FILE):
        return str(job["token"])
    raise CommandError("set LAZARUS_TOKEN to the job's token (its coordinator is on another machine)")


def _can_bind(host: str, port: int) -> bool:
    try:
        with socket.create_server((host, port)):
            return True
    except OSError:
        return False


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _bounded_code(code: int) -> int:
    return code if code >= 0 else 128 - code


# -- talking to a job -------------------------------------------------------------------------------------------


def show_status(arguments: argparse.Namespace) -> int:
    """Print the job's nodes; 1 if the job has failed."""
    if result := read_json(arguments.log_dir / RESULT_FILE):
        print(describe_result(result))
        return int(result["status"] not in ENDED_WELL)
    status = _ask(arguments.log_dir, {"do": "status"})
    print(f"generation {status['generation']}, {status['phase']}, step {status['step']}")
    for name, node in status["nodes"].items():
        workers = "; ".join(f"{rank}: {text}" for rank, text in node["workers"].items())
        print(f"  {name:16} {node['state']:9} since generation {node['since_generation']}  {workers}")
    return 0


def drain_node(arguments: argparse.Namespace) -> int:
    """Ask for a node's departure; it happens at the next step boundary."""
    if error := _ask(arguments.log_dir, {"do": "drain", "node": arguments.node})["error"]:
        raise CommandError(error)
    return 0


def add_node(arguments: argparse.Namespace) -> int:
    """Run one more node until it ends."""
    job, run = read_json(arguments.log_dir / JOB_FILE), read_json(arguments.log_dir / RUN_FILE)
    if job is None or run is None:
        raise CommandError(f"no job runs in {arguments.log_dir}")
    name = arguments.node
    if name is None:
        known = _ask(arguments.log_dir, {"do": "status"})["nodes"]
        taken = {node for node, entry in known.items() if entry["state"] not in ("dead", "left")}
        name = next(f"node{index}" for index in range(len(taken) + 1) if f"node{index}" not in taken)
    os.environ["LAZARUS_TOKEN"] = job["token"]
    options = ["--node", name, "--coordinator", job["coordinator"], "--log-dir", str(arguments.log_dir.resolve())]
    return agent.main([*options, "--nproc-per-node", str(run["nproc_per_node"]), "--", *run["command"]])


def _ask(log_dir: Path, request: Message) -> Message:
    job = read_json(log_dir / JOB_FILE)
    if job is None:
        raise CommandError(f"no job runs in {log_dir}")
    channel = BlockingChannel.connect(*split_address(job["coordinator"]), job["token"], HANDSHAKE_TIMEOUT_S)
    try:
        channel.send({"role": "client"})
        channel.receive(HANDSHAKE_TIMEOUT_S)
        channel.send(request)
        answer = channel.receive(HANDSHAKE_TIMEOUT_S)
    finally:
        channel.close()
    if answer is None:
        raise CommandError(f"the coordinator at {job['coordinator']} does not answer")
    return answer


def describe_result(result: dict[str, Any]) -> str:
    """A completion marker in words."""
    reason = f": {result['reason']}" if result["reason"] else ""
    verb = "been drained" if result["status"] == "drained" else result["status"]
    text = f"the job has {verb} in generation {result['generation']} at step {result['step']}{reason}"
    return "\n  ".join([text, *result["failures"]])
