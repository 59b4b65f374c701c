"""The worker's side of membership: which generation it belongs to, and how it gets into the next one."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_lazarus.elastic.messages import BlockingChannel, Message, ProtocolError, split_address
from megatron_lazarus.elastic.settings import HANDSHAKE_TIMEOUT_S, ElasticConfig
from megatron_lazarus.elastic.watchdog import Watchdog

WILDCARDS = ("0.0.0.0", "::")


@dataclass(frozen=True)
class Member:
    """A node of a generation: its global ranks ``first_rank .. first_rank + ranks - 1``, in order of local rank.

    ``joined`` is the generation it came in with: the current one for a newcomer, which has no state yet.
    """

    node: str
    address: str
    first_rank: int
    ranks: int
    joined: int


@dataclass(frozen=True)
class Generation:
    """One membership. ``store`` is the (host, port) of its TCPStore; ``reason``: start, failure or change."""

    number: int
    rank: int
    world_size: int
    members: tuple[Member, ...]
    store: tuple[str, int]
    reason: str

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes' names, in order."""
        return tuple(member.node for member in self.members)

    @property
    def rank_nodes(self) -> tuple[int, ...]:
        """Node number of each rank."""
        return tuple(index for index, member in enumerate(self.members) for _ in range(member.ranks))

    @property
    def newcomers(self) -> tuple[int, ...]:
        """Ranks that came in with this generation."""
        return tuple(
            rank
            for member in self.members
            if member.joined == self.number
            for rank in range(member.first_rank, member.first_rank + member.ranks)
        )


@dataclass(frozen=True)
class Pending:
    """Changes to make at a step boundary: nodes that wait to be admitted; nodes that leave, with their seconds left.

    ``short``: there are fewer members than ``min_nodes``, so that others must come.
    """

    join: tuple[str, ...]
    drain: Mapping[str, float]
    short: bool = False

    def __bool__(self) -> bool:
        return bool(self.join or self.drain or self.short)


class GenerationBroken(RuntimeError):
    """Another member has failed, or has not finished: go on with ``next_generation``."""


class NodeDrained(SystemExit):
    """This node has handed over what only it held and has left the job; the script ends with status 0."""

    def __init__(self) -> None:
        super().__init__(0)


class JobEnded(RuntimeError):
    """The coordinator has ended the job; ``result`` is its completion marker."""

    def __init__(self, message: str, result: dict[str, Any]) -> None:
        super().__init__(message)
        self.result = result


class Membership:
    """Contact with the coordinator. Make one per worker, before anything that can block for long.

    ``check``: what must be equal on all workers (versions, hashes of code and configuration), values as JSON has them.
    ``coordinators``: addresses, tried in turn; or the node's ``agent`` says which coordinator it follows. Raises
    ProtocolError if refused, OSError if none is there within ``start_limit_s`` seconds.
    """

    def __init__(
        self,
        coordinators: Sequence[tuple[str, int]],
        token: str,
        *,
        node: str,
        incarnation: str,
        local_rank: int,
        local_size: int,
        check: Mapping[str, Any] | None = None,
        agent: tuple[str, int] | None = None,
        start_limit_s: float = 120.0,
    ) -> None:
        self._coordinators, self._token, self._turn = list(coordinators), token, 0
        self._agent, self._term = agent, 0
        self._own_socket = 0
        self.node, self.local_rank, self.local_size = node, local_rank, local_size
        place = {"node": node, "incarnation": incarnation, "local_rank": local_rank, "local_size": local_size}
        self._hello: Message = {"role": "worker", **place, "check": dict(check or {}), "pid": os.getpid()}
        self.generation: Generation | None = None
        name = f"local rank {local_rank} of node {node}"
        self._watchdog = Watchdog(name, self._connect, start_limit_s, self._is_replaced)
        self._watchdog.start()

    @classmethod
    def from_environment(cls, check: Mapping[str, Any] | None = None) -> Membership:
        """With what the agent has put into the environment; raises KeyError where a name is missing."""
        env = os.environ
        return cls(
            [split_address(address) for address in env["LAZARUS_COORDINATOR"].split(",")],
            env["LAZARUS_TOKEN"],
            node=env["LAZARUS_NODE"],
            incarnation=env["LAZARUS_INCARNATION"],
            local_rank=int(env["LOCAL_RANK"]),
            local_size=int(env["LAZARUS_LOCAL_SIZE"]),
            check=check,
            agent=split_address(env["LAZARUS_AGENT"]) if "LAZARUS_AGENT" in env else None,
        )

    def _coordinator(self) -> tuple[int, str, int]:
        """Term (0: unknown), host and port of the coordinator to turn to. Raises OSError."""
        if self._agent is not None:
            try:
                return self._followed_by_agent(*self._agent)
            except ConnectionRefusedError:
                # It has died, and this process, which should have died with it, is told by the coordinator.
                self._agent = None
        # Another one may have taken over by the time this is tried again.
        self._turn += 1
        return 0, *self._coordinators[self._turn % len(self._coordinators)]

    def _followed_by_agent(self, host: str, port: int) -> tuple[int, str, int]:
        channel = BlockingChannel.connect(host, port, self._token, HANDSHAKE_TIMEOUT_S)
        try:
            channel.send({"do": "who"})
            answer = channel.receive(HANDSHAKE_TIMEOUT_S)
        finally:
            channel.close()
        if answer is None or answer["followed"] is None:
            raise TimeoutError(f"the agent at {host}:{port} knows no coordinator")
        term, address = answer["followed"]
        return int(term), *split_address(address)

    def _is_replaced(self) -> bool:
        try:
            return self._coordinator()[0] > self._term
        except OSError:
            return False

    def _connect(self, limit_s: float, standing: Message) -> tuple[BlockingChannel, Message]:
        _, host, port = self._coordinator()
        channel = BlockingChannel.connect(host, port, self._token, min(limit_s, HANDSHAKE_TIMEOUT_S))
        self._own_socket = channel.inode
        try:
            channel.send({**self._hello, **standing})
            answer = channel.receive(HANDSHAKE_TIMEOUT_S)
            if answer is None:
                raise TimeoutError(f"the coordinator at {host}:{port} does not answer")
            if "refused" in answer:
                raise ProtocolError(f"the coordinator at {host}:{port} refuses: {answer['refused']}")
        except BaseException:
            channel.close()
            raise
        self._host, self._term = host, int(answer["term"])
        return channel, answer

    @property
    def config(self) -> ElasticConfig:
        """The job's settings, as the coordinator has them."""
        return self._watchdog.config

    @property
    def local_address(self) -> str:
        """The address of the interface that reaches the coordinator."""
        return self._watchdog.local_address

    @property
    def place(self) -> str:
        """Node, local rank, generation, step and phase, for messages."""
        return self._watchdog.place

    def own_sockets(self) -> set[int]:
        """Inodes of the connections that outlive generations."""
        return {self._own_socket}

    def on_broken(self, unblock: Callable[[int], None]) -> None:
        """``unblock(generation)`` is called in the watchdog's thread, repeatedly, while that generation is broken."""
        self._watchdog.unblock = unblock

    def note(self, step: int, phase: str, collective: int) -> None:
        """What this worker is doing: last committed step; "collective" while it waits in the so many-th; else any."""
        self._watchdog.note(step, phase, collective)

    @property
    def pending(self) -> Pending:
        """As this worker has heard; ranks must agree on it (in the step's vote) before they act on it."""
        heard = self._watchdog.pending
        return Pending(tuple(heard["join"]), dict(heard["drain"]), bool(heard.get("short")))

    def drain_on_signals(self) -> None:
        """From now on SIGTERM and SIGUSR1 mean that this node shall leave; to be called in the main thread."""

        def handle(*_: object) -> None:
            # Only a note: the interrupted code may hold the lock of the connection.
            self._watchdog.drain_asked = True

        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, handle)

    # -- changes of the world -----------------------------------------------------------------------------------

    def join(self, timeout_s: float) -> Generation:
        """Wait in the lobby until admitted. Raises TimeoutError or JobEnded."""
        return self._enter({"do": "join"}, timeout_s)

    def next_generation(self, timeout_s: float, admit: Sequence[str] = (), begins: int | None = None) -> Generation:
        """Wait for the generation after this one; the caller has broken its groups.

        Between two steps all members call it with the nodes they have agreed to ``admit``; after a failure nobody is
        admitted, unless too few are left and all say that they do the same step next, with the number ``begins``: it
        is what a newcomer does first. Raises TimeoutError or JobEnded.
        """
        self.note(self._watchdog.step, "regroup", 0)
        return self._enter(
            {"do": "next", "step": self._watchdog.step, "admit": list(admit), "begins": begins}, timeout_s
        )

    def _enter(self, request: Message, timeout_s: float) -> Generation:
        reply = self._watchdog.ask(request, timeout_s)
        self._raise_if_ended(reply)
        members: list[Member] = []
        first = 0
        for entry in reply["members"]:
            members.append(Member(entry["node"], entry["address"], first, entry["ranks"], entry["joined"]))
            first += entry["ranks"]
        served_on = self._watchdog.coordinator_host
        host = self._host if served_on in WILDCARDS else served_on
        self.generation = Generation(
            reply["generation"],
            reply["rank"],
            reply["world_size"],
            tuple(members),
            (host, reply["store_port"]),
            reply["reason"],
        )
        return self.generation

    def built(self) -> None:
        """Tell that this generation's process group works."""
        self._watchdog.tell({"do": "built", "generation": self._number})

    def report_failure(self, error: BaseException | str, *, own: bool = False) -> None:
        """Tell of an exception. ``own``: it is this worker's, whose node then leaves the job; else a collective's."""
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        report = {"generation": self._number, "step": self._watchdog.step, "error": text[:2000], "own": own}
        self._watchdog.tell({"do": "failed", **report})

    def leave(self) -> None:
        """Leave the job for good: this node is drained."""
        self._watchdog.release()
        self._watchdog.tell({"do": "leave"})
        self._watchdog.stop()

    def finish(self, timeout_s: float, value: Any = None) -> dict[str, Any]:
        """Wait until all members have finished, and return the job's result; ``value`` (JSON) becomes part of it.

        Raises GenerationBroken if another member fails, or is not done, before that; TimeoutError; JobEnded.
        """
        request = {"do": "finish", "generation": self._number, "step": self._watchdog.step, "value": value}
        reply = self._watchdog.ask(request, timeout_s)
        if "broken" in reply:
            raise GenerationBroken(f"{self.place}: not all members have finished")
        result = self._watchdog.result
        if result is None or result["status"] != "completed":
            self._raise_if_ended(reply)
        self._watchdog.stop()
        assert result is not None
        return result

    def _raise_if_ended(self, reply: Message) -> None:
        if "ended" in reply:
            result = dict(reply["ended"])
            self._watchdog.release()
            raise JobEnded(f"{self.place}: the job has {result['status']}: {result['reason']}", result)

    # -- anytime ------------------------------------------------------------------------------------------------

    def may_publish(self, generation: int, timeout_s: float) -> bool:
        """Whether a checkpoint of that generation may become the newest one. Raises TimeoutError."""
        reply = self._watchdog.ask({"do": "may_publish", "generation": generation}, timeout_s)
        return bool(reply.get("allowed", False))

    def event(self, kind: str, **fields: Any) -> None:
        """Add a line to the job's events file."""
        self._watchdog.tell({"do": "event", "kind": kind, "fields": fields})

    @property
    def broken_why(self) -> str | None:
        """Why the current generation is broken; None while it is not."""
        return self._watchdog.broken_why if self._watchdog.is_broken else None

    @property
    def _number(self) -> int:
        return 0 if self.generation is None else self.generation.number
