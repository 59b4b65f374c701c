"""What the coordinator knows of nodes and workers."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_lazarus.elastic.election import Voter
from megatron_lazarus.elastic.messages import Channel, Message
from megatron_lazarus.elastic.settings import ENDING_GRACE_S, QUARANTINE_FAILURES, QUARANTINE_WINDOW_S

TIMEOUTS = ("silent", "stuck", "build")
"""Failures after which a worker may still be alive, somewhere."""

NodeState = Literal["starting", "waiting", "member", "dead", "left"]
"""A node starts; waits when all its workers ask to join; is a member; and is dead (failed) or left (drained)."""


@dataclass
class Worker:
    """One worker process. ``request`` is the message it waits to have answered with a generation, or its finish."""

    node: Node
    local_rank: int
    channel: Channel
    heard: float
    request: Message | None = None
    step: int = -1
    phase: str = "start"
    collective: int = 0
    since: float = 0.0
    built: int = 0
    left: bool = False

    @property
    def place(self) -> tuple[int, int]:
        """How far it has come; whoever waits for a generation, or for the end, is ahead of all others."""
        return (self.step, self.collective) if self.request is None else (1 << 62, 0)

    @property
    def asks_generation(self) -> bool:
        return self.request is not None and self.request["do"] in ("join", "next")

    @property
    def finished(self) -> bool:
        return self.request is not None and self.request["do"] == "finish"

    def answer(self, **reply: Any) -> None:
        assert self.request is not None
        self.channel.send({"re": self.request["id"], **reply})
        self.request = None

    def __str__(self) -> str:
        return f"worker {self.local_rank} of node {self.node.name}"


@dataclass
class Node:
    """One incarnation of a node: a name may come back with another one.

    ``awaited_since``: a member that has yet to come to this coordinator from the one before. ``agent_port``: where its
    agent answers other agents.
    """

    name: str
    incarnation: str
    local_size: int
    agent: Channel | None = None
    agent_heard: float = 0.0
    agent_port: int = 0
    awaited_since: float | None = None
    state: NodeState = "starting"
    joined: int = 0
    drain_deadline: float | None = None
    abandon_at: float | None = None
    workers: dict[int, Worker] = field(default_factory=dict)

    @property
    def alive(self) -> bool:
        return self.state not in ("dead", "left")

    @property
    def present(self) -> list[Worker]:
        """Workers that have not left."""
        return [worker for worker in self.workers.values() if not worker.left]

    @property
    def address(self) -> str:
        return next((worker.channel.address for worker in self.workers.values()), "")

    @property
    def voter(self) -> Voter:
        address = self.agent.address if self.agent is not None else self.address
        return Voter(self.name, self.incarnation, address, self.agent_port, self.local_size, self.joined)

    def describe(self) -> Message:
        draining = self.drain_deadline is not None and self.alive
        return {
            "state": "draining" if draining else self.state,
            "address": self.address,
            "since_generation": self.joined,
            "workers": {str(w.local_rank): f"step {w.step}, {w.phase}" for w in self.workers.values()},
        }


@dataclass(frozen=True)
class Failure:
    """Why a generation broke. ``kind``: died, silent, raised, stuck, build or collective."""

    kind: str
    node: str
    detail: str

    @property
    def signature(self) -> str:
        """Equal for failures with the same cause, whoever meets it: numbers differ between ranks, ports and times."""
        detail = re.sub(r"\d+", "#", self.detail.splitlines()[0] if self.detail else "")
        return f"{self.kind}: {detail}" if self.kind in ("raised", "collective") else self.kind

    def __str__(self) -> str:
        return f"node {self.node} {self.kind}: {self.detail}"


class Repeats:
    """Counts equal failures without a committed step between them. ``step``: the newest committed one."""

    def __init__(self) -> None:
        self.step = -1
        self._counts: Counter[str] = Counter()

    def add(self, failures: Sequence[Failure], step: int) -> tuple[str, int]:
        """What has happened most often since ``step``, and how often."""
        if step > self.step:
            self._counts.clear()
            self.step = step
        self._counts.update({failure.signature for failure in failures})
        return max(self._counts.items(), key=lambda item: item[1], default=("", 0))


class Quarantine:
    """Nodes that fail again and again are kept out for a while."""

    def __init__(self) -> None:
        self._failures: dict[str, deque[float]] = {}

    def failed(self, name: str, now: float) -> None:
        self._failures.setdefault(name, deque(maxlen=QUARANTINE_FAILURES)).append(now)

    def left_s(self, name: str, now: float) -> float:
        """Seconds until the node may come back; 0: now."""
        times = self._failures.get(name, deque())
        if len(times) < QUARANTINE_FAILURES:
            return 0.0
        return max(0.0, times[0] + QUARANTINE_WINDOW_S - now)


def natural(name: str) -> list[tuple[int, str]]:
    """Sort key that puts node2 before node10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name) if part]


def workers_of(nodes: Iterable[Node]) -> Iterator[Worker]:
    for node in nodes:
        yield from (node.workers[key] for key in sorted(node.workers))


def dismiss(node: Node, why: str, kind: str, ending: Worker | None = None) -> None:
    """Tell a node's workers, but the one that is ``ending`` by itself, and its agent that the node is out."""
    for worker in node.present:
        if worker is not ending:
            worker.channel.send({"push": "evicted", "why": why})
    if node.agent is not None:
        grace_s = ENDING_GRACE_S if kind in ("raised", "check") else 0.0
        node.agent.send({"do": "kill", "why": why, "stacks": kind in TIMEOUTS, "grace_s": grace_s})


def tell_end(nodes: Iterable[Node], result: Message) -> None:
    """Tell workers and agents that the job has its result."""
    for node in nodes:
        for worker in node.present:
            worker.channel.send({"push": "ended", "result": result})
        if node.agent is not None:
            node.agent.send({"do": "shutdown", "result": result})


def begin_same_step(workers: Iterable[Worker]) -> bool:
    """Whether all of them, who ask for a generation, do the same step next; those without state (-1) do any."""
    steps = {(worker.request or {}).get("begins") for worker in workers}
    return None not in steps and len(steps - {-1}) <= 1


def furthest_behind(workers: Iterable[Worker]) -> list[Worker]:
    """Those whom the others wait for; nobody where all wait in the same place."""
    listed = list(workers)
    least = min(worker.place for worker in listed)
    behind = [worker for worker in listed if worker.place == least]
    if len(behind) < len(listed):
        return behind
    behind = [worker for worker in listed if worker.phase != "collective"]
    return behind if len(behind) < len(listed) else []
