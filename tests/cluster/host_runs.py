"""The stock ``deepspeed`` command over pdsh and ssh, and with ``--no_ssh``, on hosts with addresses of their own.

Every host is a network namespace with an sshd. Links are cut for a moment and for long, and a host loses its power.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tests.cluster.network import Network, NetworkError, network
from tests.cluster.runs import REPOSITORY, RunFolder, settings

PROGRAMS = {"ip": "iproute2", "pdsh": "pdsh", "ssh": "openssh-client", "/usr/sbin/sshd": "openssh-server"}
HEARTBEAT_TIMEOUT_S, LEASE_S = 10.0, 20.0
BLIP_S, CUT_S = 6.0, 60.0
PORT = 29500


class Hosts:
    """Use with ``hosts``."""

    def __init__(self, folder: Path, net: Network) -> None:
        self.folder, self.net = folder, net
        self._daemons: list[subprocess.Popen[bytes]] = []

    @property
    def addresses(self) -> list[str]:
        return [self.net.address(host) for host in range(self.net.hosts)]

    def open(self) -> None:
        """An sshd on every host, and an ``ssh`` that needs nothing of the user's own."""
        for name in ("host_key", "key"):
            make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name)]
            subprocess.run(make, check=True, timeout=60)
        server = {
            "HostKey": self.folder / "host_key",
            "AuthorizedKeysFile": self.folder / "key.pub",
            "PidFile": "none",
            "StrictModes": "no",
            "UsePAM": "no",
            "PermitRootLogin": "prohibit-password",
            "PrintMotd": "no",
        }
        (self.folder / "sshd_config").write_text("".join(f"{key} {value}\n" for key, value in server.items()))
        client = {
            "IdentityFile": self.folder / "key",
            "IdentitiesOnly": "yes",
            "StrictHostKeyChecking": "no",
            "UserKnownHostsFile": "/dev/null",
            "LogLevel": "ERROR",
            "ServerAliveInterval": "5",
            "ServerAliveCountMax": "3",
        }
        (self.folder / "ssh_config").write_text("".join(f"{key} {value}\n" for key, value in client.items()))
        tools = self.folder / "bin"
        tools.mkdir()
        (tools / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {self.folder}/ssh_config "$@"\n')
        (tools / "ssh").chmod(0o755)
        Path("/run/sshd").mkdir(exist_ok=True)
        for host, address in enumerate(self.addresses):
            command = ["/usr/sbin/sshd", "-D", "-f", f"{self.folder}/sshd_config", "-o", f"ListenAddress={address}"]
            self._daemons.append(self.start(host, command, self.folder / f"sshd-{host}.log", {}))

    def start(self, host: int, command: list[str], log: Path, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start a command on a host."""
        environment = {**os.environ, **variables, "PATH": f"{self.folder}/bin:{os.environ['PATH']}"}
        with log.open("ab") as output:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.net.name(host), *command],
                cwd=REPOSITORY,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def processes(self, host: int) -> list[int]:
        listed = subprocess.run(
            ["ip", "netns", "pids", self.net.name(host)], capture_output=True, text=True, timeout=20, check=True
        )
        return [int(pid) for pid in listed.stdout.split()]

    def workers(self, host: int) -> list[int]:
        """Training processes there."""
        return [pid for pid in self.processes(host) if "paced_pretrain.py" in _words(pid) and _is_worker(pid)]

    def kill_all(self, host: int) -> None:
        while pids := self.processes(host):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    def close(self) -> None:
        for host in range(self.net.hosts):
            with contextlib.suppress(subprocess.CalledProcessError):
                self.kill_all(host)
        for daemon in self._daemons:
            daemon.wait(20)


def require_programs() -> None:
    """Raises NetworkError if something is not installed."""
    missing = [
        f"{program} (package {package})" for program, package in PROGRAMS.items() if shutil.which(program) is None
    ]
    if missing:
        raise NetworkError(f"not found: {', '.join(missing)}")


@contextlib.contextmanager
def hosts(folder: Path, count: int) -> Iterator[Hosts]:
    """So many hosts with ssh; nothing of them is left. Raises NetworkError."""
    with network(count) as net:
        made = Hosts(folder, net)
        try:
            made.open()
            yield made
        finally:
            made.close()


def _words(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().replace("\0", " ")
    return ""


def _is_worker(pid: int) -> bool:
    """Not a launcher, whose arguments name the script, too."""
    with contextlib.suppress(OSError):
        return b"\0LAZARUS_INCARNATION=" in Path(f"/proc/{pid}/environ").read_bytes()
    return False


# -- the runs ---------------------------------------------------------------------------------------------------


def variables(run: RunFolder, addresses: list[str]) -> dict[str, str]:
    """Of the training script; what the workers need comes to them through a .deepspeed_env."""
    elastic = {"heartbeat_timeout_s": HEARTBEAT_TIMEOUT_S, "lease_s": LEASE_S}
    config = json.loads((REPOSITORY / "configs" / "ds_config_gpt_tiny.json").read_text())
    config["lazarus"]["elastic"] = elastic
    (run.folder / "ds.json").write_text(json.dumps(config))
    (run.folder / "hostfile").write_text("".join(f"{address} slots=1\n" for address in addresses))
    workers = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PACE_S": "0.6", "HURRY": str(run.folder / "hurry")}
    (run.folder / "deepspeed_env").write_text("".join(f"{name}={value}\n" for name, value in workers.items()))
    return {
        **settings(),
        "DATA_PATH": str(run.data),
        "OUTPUT": str(run.folder),
        "DS_CONFIG": str(run.folder / "ds.json"),
        "DS_ENV_FILE": str(run.folder / "deepspeed_env"),
        "TRAIN_SCRIPT": "tests/cluster/paced_pretrain.py",
        "LAUNCHER": "deepspeed-elastic",
        "HOSTFILE": str(run.folder / "hostfile"),
        "MASTER_PORT": str(PORT),
    }


def pdsh(run: RunFolder, reference: Mapping[int, float]) -> None:
    """A link is cut for 6 s, one for 60 s, and a host loses its power."""
    with hosts(run.folder, 4) as farm:
        command = ["bash", "scripts/pretrain_gpt_tiny.sh"]
        job = farm.start(0, command, run.folder / "deepspeed.log", variables(run, farm.addresses))
        nodes = [f"node{host}" for host in range(4)]
        run.wait_for_nodes(*nodes)
        run.note(f"deepspeed over pdsh trains on {', '.join(farm.addresses)}")
        chosen = run.log_lines("GLOO_SOCKET_IFNAME=eth0, address ")
        assert all(any(address in line for line in chosen) for address in farm.addresses), chosen

        generation, step = run.generation()[0], run.iteration()
        farm.net.cut([2])
        time.sleep(BLIP_S)
        farm.net.heal()
        run.wait_until(lambda: run.iteration() > step + 10 or None, "training after the blip")
        assert run.generation()[0] == generation, "a reaction to a cut shorter than the heartbeat limit"
        run.note(f"link of node2 cut for {BLIP_S:g} s (limit {HEARTBEAT_TIMEOUT_S:g} s): same generation")

        cut = time.time()
        farm.net.cut([3])
        run.wait_for_nodes("node0", "node1", "node2", limit_s=CUT_S)
        run.note(f"link of node3 cut: training on three nodes after {run.worked_at() - cut:.1f} s")
        run.wait_until(lambda: None if farm.workers(3) else True, "the end of the cut node's worker", CUT_S)
        fenced = time.time() - cut
        assert fenced < LEASE_S + 5.0, f"the cut node fenced itself after {fenced:.1f} s, lease {LEASE_S:g} s"
        run.note(f"the cut node has fenced itself {fenced:.1f} s after the cut (lease_s {LEASE_S:g})")
        time.sleep(max(0.0, cut + CUT_S - time.time()))
        farm.net.heal()
        add = [
            sys.executable,
            "-m",
            "megatron_lazarus.cli",
            "add-node",
            "--node",
            "node3",
            "--log-dir",
            str(run.log_dir),
        ]
        workers = dict(line.split("=", 1) for line in (run.folder / "deepspeed_env").read_text().splitlines())
        farm.start(3, add, run.folder / "returned.log", workers)
        run.wait_for_nodes(*nodes)
        run.note(f"after {CUT_S:g} s the link is back: node3 joins by lazarus add-node")

        off = time.time()
        farm.net.cut([1])
        farm.kill_all(1)
        run.wait_for_nodes("node0", "node2", "node3", limit_s=60)
        run.note(f"power-off of node1: training on three nodes after {run.worked_at() - off:.1f} s")
        run.hurry()
        code = job.wait(300)
        run.note(f"the script ends with {code}")
        assert code == 0, (run.folder / "deepspeed.log").read_text()[-2000:]
        run.compare(reference)


def no_ssh(run: RunFolder, reference: Mapping[int, float]) -> None:
    """The same command on every host, without ssh."""
    with hosts(run.folder, 2) as farm:
        given = variables(run, farm.addresses)
        workers = dict(line.split("=", 1) for line in (run.folder / "deepspeed_env").read_text().splitlines())
        run.hurry()
        jobs = []
        for host in range(2):
            place = ["--no_ssh", "--node_rank", str(host), "--master_addr", farm.addresses[0]]
            jobs.append(
                farm.start(
                    host,
                    ["bash", "scripts/pretrain_gpt_tiny.sh"],
                    run.folder / f"deepspeed-{host}.log",
                    {**given, **workers, "DEEPSPEED_ARGS": " ".join(place)},
                )
            )
        codes = [job.wait(600) for job in jobs]
        run.note(f"deepspeed --no_ssh on two hosts: exit statuses {codes}")
        assert codes == [0, 0], [(run.folder / f"deepspeed-{host}.log").read_text()[-2000:] for host in range(2)]
        run.compare(reference)


RUNS: Mapping[str, Callable[[RunFolder, Mapping[int, float]], None]] = {"pdsh": pdsh, "no-ssh": no_ssh}


def run_on_hosts(name: str, folder: Path, data: Path, reference: Mapping[int, float]) -> None:
    """One of them. Raises AssertionError or NetworkError."""
    RUNS[name](RunFolder(name, folder, data), reference)
