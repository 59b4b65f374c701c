"""The ``"lazarus.elastic"`` section, and the constants that no user has a reason to change."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

BUILD_TIMEOUT_S = 15.0
"""How long building a generation's process group may take before those who failed are left out."""

HANDSHAKE_TIMEOUT_S = 5.0
"""How long a new connection may take to prove that it knows the job token."""

ENDING_GRACE_S = 5.0
"""How long a worker that has reported its own exception may take to end, before it is killed."""

SHUTDOWN_LIMIT_S = 30.0
"""How long workers may take to exit once the job has its result."""

BEAT_S = 2.0
"""How often a coordinator shows in the job's folder that it is there."""

QUARANTINE_FAILURES = 3
QUARANTINE_WINDOW_S = 1800.0
"""A node that fails this often within the window is not admitted again before the window has passed."""

RESOLVER_OPTIONS = {"RES_OPTIONS": "timeout:1 attempts:1"}
"""For the environment of processes that use TCPStore: it looks up the name of every peer, numeric addresses included.

With a name server that does not answer, each connection takes 5-15 s by default.
"""

EXIT_EVICTED = 75
EXIT_LEASE = 76
EXIT_STUCK = 77
EXIT_MEANINGS = {
    EXIT_EVICTED: "the coordinator declared it dead",
    EXIT_LEASE: "it lost contact with the coordinator",
    EXIT_STUCK: "nothing freed it from a broken process group",
}
"""Why a worker ends itself."""

EXIT_LEFT = 79
"""Of ``lazarus join`` when its node was drained: the run is not complete, but this node's part in it has ended well."""

EXIT_DEPOSED = 78
"""Of a coordinator that must not rule any more; the job may go on under another one."""


@dataclass(frozen=True)
class ElasticConfig:
    """Survival of lost nodes, joins and departures. Times are in seconds.

    ``enabled``: false makes the loss of any rank end the job.
    ``min_nodes``: with fewer the job waits ``join_window_s`` for others, then ends.
    ``start_nodes``: training starts when so many are ready; null: ``max_nodes``, or ``min_nodes`` without one.
    ``max_nodes``: more are kept waiting as spares; null: no limit.
    ``join_window_s``: how long the start waits for ``start_nodes`` once ``min_nodes`` are ready.
    ``heartbeat_interval_s``, ``heartbeat_timeout_s``: a worker silent for the latter is declared dead.
    ``lease_s``: a worker out of contact with every coordinator for so long stops itself.
    ``lease_path``: folder on shared storage where coordinators hold their lease; null: none.
    ``collective_timeout_s``: when a member waits longer than this in a collective, those furthest behind are evicted.
    ``drain_grace_s``: time a node that leaves has to hand over what only it holds.
    ``interface``: network interface of process groups; null: the one that reaches the coordinator.
    ``audit_interval``: steps between comparisons of state across ranks.
    ``max_recoveries_without_progress``: so many equal failures without a committed step between them end the job.
    """

    enabled: bool = True
    min_nodes: int = 1
    start_nodes: int | None = None
    max_nodes: int | None = None
    join_window_s: float = 30
    heartbeat_interval_s: float = 0.5
    heartbeat_timeout_s: float = 5
    lease_s: float = 15
    lease_path: str | None = None
    collective_timeout_s: float = 60
    drain_grace_s: float = 30
    interface: str | None = None
    audit_interval: int = 100
    max_recoveries_without_progress: int = 3

    def __post_init__(self) -> None:
        for name in ("min_nodes", "start_nodes", "max_nodes", "audit_interval", "max_recoveries_without_progress"):
            self._require(name, getattr(self, name) is None or getattr(self, name) >= 1, "at least 1")
        for name in ("heartbeat_interval_s", "collective_timeout_s", "drain_grace_s"):
            self._require(name, getattr(self, name) > 0, "above 0")
        self._require("join_window_s", self.join_window_s >= 0, "at least 0")
        if self.max_nodes is not None:
            self._require("max_nodes", self.max_nodes >= self.min_nodes, f"at least min_nodes = {self.min_nodes}")
        if self.start_nodes is not None:
            self._require("start_nodes", self.start_nodes >= self.min_nodes, f"at least min_nodes = {self.min_nodes}")
            most = self.max_nodes or self.start_nodes
            self._require("start_nodes", self.start_nodes <= most, f"at most max_nodes = {most}")
        least = 2 * self.heartbeat_interval_s
        self._require("heartbeat_timeout_s", self.heartbeat_timeout_s >= least, f"at least two intervals = {least:g}")
        beyond = self.heartbeat_timeout_s
        self._require("lease_s", self.lease_s > beyond, f"above heartbeat_timeout_s = {beyond:g}")

    def _require(self, name: str, legal: bool, what: str) -> None:
        if not legal:
            raise ValueError(f'"lazarus.elastic.{name}" is {getattr(self, name)!r}; it must be {what}')

    @property
    def wanted_nodes(self) -> int:
        """Nodes that training starts with at once."""
        return self.start_nodes or self.max_nodes or self.min_nodes

    def to_json(self) -> dict[str, object]:
        return dataclasses.asdict(self)
