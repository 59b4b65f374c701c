"""A real Slurm cluster of virtual nodes on this machine: one controller, a slurmd for every node.

Needs root, and the packages slurm-wlm and munge. Ports, authentication and state are its own, all below one folder:
another Slurm or munge of this machine is not touched.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import psutil

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "sinfo", "scancel")
START_LIMIT_S = 60.0
SLURMD_TIMEOUT_S = 10
"""After which Slurm itself begins to suspect a node: a real cluster has 300."""

Found = TypeVar("Found")

CONFIGURATION = """\
ClusterName=lazarus{mark}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/controller
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
DebugFlags=NO_CONF_HASH
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SlurmdTimeout={timeout}
InactiveLimit=0
KillWait=10
WaitTime=0
BatchStartTimeout=10
MessageTimeout=10
TCPTimeout=2
UnkillableStepTimeout=60
ReturnToService=2
JobRequeue=1
SchedulerParameters=batch_sched_delay=1,sched_interval=5,bf_interval=5
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=DEFAULT CPUs=4 Boards=1 SocketsPerBoard=1 CoresPerSocket=4 ThreadsPerCore=1 RealMemory=1000 State=UNKNOWN
{nodes}
PartitionName=train Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO PriorityTier=1 GraceTime=20
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP OverSubscribe=NO PriorityTier=10
"""


class SlurmError(RuntimeError):
    """Slurm is missing or does not do what it should; the message has its own words."""


class Slurm:
    """Use with ``slurm``. Nodes are ``node0``, ``node1``, …"""

    def __init__(self, folder: Path, nodes: int) -> None:
        self.folder, self.nodes = folder, [f"node{index}" for index in range(nodes)]
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._munged: subprocess.Popen[bytes] | None = None

    def open(self) -> None:
        (self.folder / "controller").mkdir()
        self._start_munge()
        ports = _free_ports(1 + len(self.nodes))
        host = socket.gethostname().partition(".")[0]
        lines = [
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port}"
            for node, port in zip(self.nodes, ports[1:], strict=True)
        ]
        text = CONFIGURATION.format(
            mark=os.getpid(),
            host=host,
            port=ports[0],
            folder=self.folder,
            timeout=SLURMD_TIMEOUT_S,
            nodes="\n".join(lines),
        )
        (self.folder / "slurm.conf").write_text(text)
        self.command("slurmctld", "-c")
        self.wait_until(lambda: "UP" in self.ask("scontrol", "ping") or None, "the controller does not answer")
        for node in self.nodes:
            self.power_on(node)
        idle = ("sinfo", "--noheader", "--Node", "--states=idle", "--partition=train", "--format=%N")
        self.wait_until(lambda: len(self.ask(*idle).split()) == len(self.nodes) or None, "the nodes do not become idle")

    def _start_munge(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        names = {"socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={self.folder}/munge.{suffix}" for option, suffix in names.items()]
        self._munged = subprocess.Popen(
            ["munged", "--foreground", "--force", f"--key-file={key}", *options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.wait_until(lambda: (self.folder / "munge.socket").exists() or None, "munged does not start")

    def command(self, *words: str, environment: Mapping[str, str] | None = None) -> str:
        """What a command prints. Raises SlurmError."""
        known = {**self.environment, **(environment or {})}
        ended = subprocess.run(words, env=known, capture_output=True, text=True, timeout=60, check=False)
        if ended.returncode:
            raise SlurmError(f"{' '.join(words)}: {ended.stdout}{ended.stderr}")
        return ended.stdout

    def ask(self, *words: str) -> str:
        """What a command prints, "" if it fails."""
        try:
            return self.command(*words)
        except SlurmError:
            return ""

    def wait_until(self, condition: Callable[[], Found | None], what: str, limit_s: float = START_LIMIT_S) -> Found:
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if (found := condition()) is not None:
                return found
            time.sleep(0.2)
        raise SlurmError(f"{what} within {limit_s:g} s")

    # -- nodes --------------------------------------------------------------------------------------------------

    def power_on(self, node: str) -> None:
        spool = self.folder / f"spool.{node}"
        shutil.rmtree(spool, ignore_errors=True)
        spool.mkdir()
        self.command("slurmd", "-N", node)

    def power_off(self, node: str) -> None:
        """SIGKILL its slurmd, its slurmstepds and all that they have started."""
        # A host's processes end at one instant. So none of them may see others end: neither an srun, nor the second
        # process that every srun has to kill its step when it dies.
        suspended: set[psutil.Process] = set()
        while new := set(self.processes(node)) - suspended:
            for process in sorted(new, key=lambda process: _name(process).startswith("slurm")):
                with contextlib.suppress(psutil.Error):
                    process.suspend()
            suspended |= new
        while victims := self.processes(node):
            for process in sorted(victims, key=lambda process: process.pid, reverse=True):
                with contextlib.suppress(psutil.Error):
                    process.kill()
            time.sleep(0.05)

    def processes(self, node: str) -> list[psutil.Process]:
        found = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                environment = process.environ()
                if process.status() == psutil.STATUS_ZOMBIE or environment.get("SLURM_CONF") != self.configuration:
                    continue
                if environment.get("SLURMD_NODENAME") == node:
                    found[process.pid] = process
                    parent = process.parent()
                    if parent is not None and _name(parent).startswith("slurmstepd"):
                        found[parent.pid] = parent
                elif process.cmdline()[:1] == ["slurmd"] and process.cmdline()[-1] == node:
                    found[process.pid] = process
        return list(found.values())

    @property
    def configuration(self) -> str:
        return self.environment["SLURM_CONF"]

    def state(self, node: str) -> str:
        """Of a node: idle, allocated, down, … with marks such as * for one that does not answer."""
        return self.command("sinfo", "--noheader", f"--nodes={node}", "--partition=train", "--format=%T").strip()

    # -- jobs ---------------------------------------------------------------------------------------------------

    def job(self, job: str) -> dict[str, str]:
        """What ``scontrol show job`` tells of a job, or of one element of an array."""
        shown = self.command("scontrol", "--oneliner", "show", "job", job)
        return dict(re.findall(r"(\S+?)=(\S*)", shown))

    def jobs(self) -> list[dict[str, str]]:
        shown = self.command("scontrol", "--oneliner", "show", "job")
        return [dict(re.findall(r"(\S+?)=(\S*)", line)) for line in shown.splitlines() if "JobId=" in line]

    def wait_for_end(self, limit_s: float) -> list[dict[str, str]]:
        """All jobs, once none of them is pending, running or about to end."""

        def ended() -> list[dict[str, str]] | None:
            jobs = self.jobs()
            alive = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED")
            return None if any(job["JobState"] in alive for job in jobs) else jobs

        return self.wait_until(ended, "the jobs do not end", limit_s)

    def close(self) -> None:
        self.ask("scancel", "--signal=KILL", "--full", "--me")
        self.ask("scancel", "--me")
        for node in self.nodes:
            self.power_off(node)
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if (
                    process.name() in ("slurmctld", "slurmstepd")
                    and process.environ().get("SLURM_CONF") == self.configuration
                ):
                    process.kill()
                    process.wait(20)
        if self._munged is not None:
            self._munged.send_signal(signal.SIGTERM)
            self._munged.wait(20)


def require_programs() -> None:
    """Raises SlurmError if Slurm is not installed."""
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        raise SlurmError(f"{', '.join(missing)} not found: install the packages slurm-wlm and munge")


@contextlib.contextmanager
def slurm(folder: Path, nodes: int) -> Iterator[Slurm]:
    """A cluster with so many idle nodes; nothing of it runs afterwards. Raises SlurmError."""
    cluster = Slurm(folder, nodes)
    try:
        cluster.open()
        yield cluster
    finally:
        cluster.close()


def _name(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [int(listener.getsockname()[1]) for listener in listeners]
