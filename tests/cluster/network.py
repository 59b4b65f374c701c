"""Hosts with addresses of their own on this machine: network namespaces around a switch that can be cut in two.

Needs root. Everything is in namespaces of its own, the switch too: the machine's own network is not touched.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

NETNS = Path("/run/netns")
SIDES = ("one", "other")


class NetworkError(RuntimeError):
    """A namespace could not be made or changed; the message is that of ``ip``."""


class Network:
    """Use with ``network``. Hosts are numbered from 0."""

    def __init__(self, hosts: int) -> None:
        self.hosts, self._prefix = hosts, f"lzc{os.getpid()}-"
        self._switch = f"{self._prefix}switch"

    def name(self, host: int) -> str:
        return f"{self._prefix}{host}"

    def path(self, host: int) -> str:
        return str(NETNS / self.name(host))

    def address(self, host: int) -> str:
        return f"10.77.0.{10 + host}"

    def open(self) -> None:
        _ip("netns", "add", self._switch)
        for side in SIDES:
            _ip("-n", self._switch, "link", "add", side, "type", "bridge")
            _ip("-n", self._switch, "link", "set", side, "up")
        for host in range(self.hosts):
            name, port = self.name(host), f"port{host}"
            _ip("netns", "add", name)
            _ip("-n", self._switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("-n", self._switch, "link", "set", port, "master", SIDES[0], "up")
            _ip("-n", name, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", "eth0", "up")

    def cut(self, hosts: Iterable[int]) -> None:
        """From now on these hosts reach each other only, and nobody is told: what is sent across is lost."""
        for host in hosts:
            _ip("-n", self._switch, "link", "set", f"port{host}", "master", SIDES[1])

    def heal(self) -> None:
        for host in range(self.hosts):
            _ip("-n", self._switch, "link", "set", f"port{host}", "master", SIDES[0])

    def close(self) -> None:
        for name in [self._switch, *map(self.name, range(self.hosts))]:
            if (NETNS / name).exists():
                _ip("netns", "delete", name)


@contextlib.contextmanager
def network(hosts: int) -> Iterator[Network]:
    """A switch with so many hosts; all of it is gone afterwards. Raises NetworkError."""
    made = Network(hosts)
    try:
        made.open()
        yield made
    finally:
        made.close()


def _ip(*arguments: str) -> None:
    ended = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=20, check=False)
    if ended.returncode:
        raise NetworkError(f"ip {' '.join(arguments)}: {ended.stderr.strip()}")
