"""The coordinator's rules: who is a member, when a generation ends and when the next one starts.

No sockets and no clock of its own, so that every rule can be tested without processes. A generation is *building*
until all its members have their process group, then *live*; a failure makes it *broken*. It is followed by the next
one when every living worker of it has asked for that: no member is then left in the old one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Literal

from megatron_lazarus.elastic.admission import Admission
from megatron_lazarus.elastic.election import Charter, Voters
from megatron_lazarus.elastic.journal import Journal
from megatron_lazarus.elastic.messages import Message
from megatron_lazarus.elastic.roster import (
    Failure,
    Node,
    Quarantine,
    Repeats,
    Worker,
    dismiss,
    natural,
    tell_end,
    workers_of,
)
from megatron_lazarus.elastic.settings import ElasticConfig
from megatron_lazarus.elastic.timeouts import Timeouts

logger = logging.getLogger(__name__)

Phase = Literal["gathering", "building", "live", "broken", "ended"]


class Job:
    """Membership of one job.

    ``open_store`` hosts a fresh store and returns (port, what keeps it alive), or None while it cannot yet.
    ``propose(generation, voters)`` has agents accept who elects after that generation, which begins only when
    ``established`` is called; without it at once.
    """

    def __init__(
        self,
        config: ElasticConfig,
        journal: Journal,
        open_store: Callable[[], tuple[int, object] | None],
        clock: Callable[[], float],
        propose: Callable[[int, Voters], None] | None = None,
    ) -> None:
        self.config, self.journal, self._open_store, self._clock = config, journal, open_store, clock
        self.phase: Phase = "gathering"
        self.generation = 0
        self.nodes: dict[str, Node] = {}
        self.past: set[str] = set()
        self.members: list[Node] = []
        self.published = 0
        self.result: dict[str, Any] | None = None
        self.quarantine = Quarantine()
        self.phase_since = clock()
        self.check: Message | None = None
        self._propose = propose or (lambda generation, voters: self.established())
        self._timeouts, self._admission = Timeouts(self, clock), Admission(self, clock)
        self._store: tuple[int, object] | None = None
        self._failures: list[Failure] = []
        self._repeats = Repeats()
        self._seconds: dict[str, float] = {}
        self._formed: str | None = None

    def resume(self, charter: Charter) -> None:
        """Take over where the coordinator that gave this charter was lost; its members come by and by."""
        self.generation = self.published = charter.generation
        self.check = charter.check
        for voter in charter.voters:
            node = self.add_node(voter.node, voter.incarnation, voter.local_size)
            node.state, node.joined, node.awaited_since = "member", voter.joined, self._clock()
            self.members.append(node)
        self._enter("building")

    # -- who is there -------------------------------------------------------------------------------------------

    def living(self) -> list[Node]:
        """Members of the current generation that have neither failed nor left."""
        return [node for node in self.members if node.state == "member"]

    def forgive(self, late_s: float) -> None:
        """Nobody could be heard for so long."""
        for node in self.nodes.values():
            node.agent_heard += late_s
            if node.awaited_since is not None:
                node.awaited_since += late_s
            for worker in node.workers.values():
                worker.heard += late_s

    def _all_there(self) -> bool:
        """Whether every member's workers have come; only where another coordinator was before can some be missing."""
        return all(len(node.workers) == node.local_size for node in self.living())

    def add_node(self, name: str, incarnation: str, local_size: int) -> Node:
        """A newcomer; it takes the place of an earlier incarnation that is dead or has left."""
        if name in self.nodes:
            self.past.add(self.nodes[name].incarnation)
        self.nodes[name] = Node(name, incarnation, local_size)
        return self.nodes[name]

    def status(self) -> Message:
        """What ``lazarus status`` shows."""
        listed = {name: self.nodes[name].describe() for name in sorted(self.nodes, key=natural)}
        return {"generation": self.generation, "phase": self.phase, "step": self.step, "nodes": listed}

    @property
    def step(self) -> int:
        """The newest committed step that any worker has told of."""
        return max((worker.step for worker in workers_of(self.members)), default=self._repeats.step)

    def event(self, kind: str, **fields: Any) -> None:
        self.journal.event(self.generation, kind, step=self.step, **fields)

    # -- what workers ask ---------------------------------------------------------------------------------------

    def ask_join(self, worker: Worker, message: Message) -> None:
        worker.request = message
        node = worker.node
        if node.state == "starting" and sum(one.asks_generation for one in node.present) == node.local_size:
            node.state = "waiting"
            self.event("waiting", node=node.name)
            self.announce()
        self.advance()

    def came_back(self, worker: Worker, generation: int, built: int) -> None:
        """A member's worker that another coordinator has had before says where it stands."""
        if built != self.generation:
            # Its store has died with the coordinator that hosted it.
            self.break_generation(f"{worker} has not built generation {self.generation}; it is in {generation}")
        if self.phase == "broken":
            worker.channel.send({"push": "broken", "generation": self.generation, "why": "it was before"})
        self.built(worker, built)
        self.announce()
        self.advance()

    def ask_next(self, worker: Worker, message: Message) -> None:
        worker.step = max(worker.step, int(message["step"]))
        worker.request = message
        for other in workers_of(self.living()):
            if other.finished:
                # It has done all its steps, but another one has not: it must help to finish them.
                other.answer(broken=self.generation)
        self.advance()

    def ask_finish(self, worker: Worker, message: Message) -> None:
        if self.phase not in ("building", "live") or message["generation"] != self.generation:
            worker.request = message
            worker.answer(broken=self.generation)
            return
        worker.step = max(worker.step, int(message["step"]))
        worker.request = message
        self.advance()

    def leave(self, worker: Worker) -> None:
        worker.left = True
        node = worker.node
        if node.alive and len(node.workers) == node.local_size and not node.present:
            node.state = "left"
            self.event("left", node=node.name)
            self.announce()
        self.advance()

    def built(self, worker: Worker, generation: int) -> None:
        worker.built = generation
        built = all(one.built == self.generation for one in workers_of(self.living()))
        if self.phase == "building" and built and self._all_there():
            self._seconds["build"] = round(self._enter("live"), 4)
            self.event("live", nodes=[node.name for node in self.members], seconds=self._seconds)
            self.announce()

    def may_publish(self, worker: Worker, generation: int) -> bool:
        """Whether a checkpoint of that generation may become the newest: no later generation has published one."""
        if worker.node.state != "member" or not self.published <= generation <= self.generation:
            self.event("publication refused", node=worker.node.name, of=generation, published=self.published)
            return False
        self.published = generation
        return True

    def worker_failed(self, worker: Worker, message: Message) -> None:
        """A worker reports an exception: of its own (its node goes), or in a collective (somebody else has failed)."""
        worker.step = max(worker.step, int(message["step"]))
        if message["generation"] != self.generation and worker.node.state == "member":
            return
        if message["own"]:
            detail = f"{message['error']} (local rank {worker.local_rank})"
            self.fail_node(worker.node, "raised", detail, ending=worker)
        elif self.phase in ("building", "live"):
            failure = Failure("collective", worker.node.name, str(message["error"]))
            self.break_generation(f"{worker} reports: {message['error']}", failure)

    # -- failures -----------------------------------------------------------------------------------------------

    def fail_node(
        self, node: Node, kind: str, detail: str, silent_s: float = 0.0, ending: Worker | None = None
    ) -> None:
        """Declare a node dead: its workers are told to die, and the generation it is a member of breaks.

        ``ending`` is a worker that is about to end by itself, with its traceback.
        """
        if not node.alive or self.phase == "ended":
            return
        was_member = node.state == "member"
        node.state = "dead"
        failure = Failure(kind, node.name, detail)
        self.event("failure", node=node.name, cause=kind, detail=detail, was_member=was_member, silent_s=silent_s)
        self.quarantine.failed(node.name, self._clock())
        dismiss(node, str(failure), kind, ending)
        if was_member or not self.generation:
            self._failures.append(failure)
        if was_member:
            self._seconds["silent"] = round(silent_s, 4)
            self.break_generation(str(failure))
        self.announce()
        self.advance()

    def break_generation(self, why: str, failure: Failure | None = None) -> None:
        """Have all members leave the current generation for the next one."""
        if self.phase not in ("building", "live"):
            return
        if failure is not None:
            self._failures.append(failure)
        living = list(workers_of(self.living()))
        if living and all(worker.finished for worker in living):
            return
        self._enter("broken")
        self._formed = None
        self.event("broken", why=why)
        for worker in living:
            worker.channel.send({"push": "broken", "generation": self.generation, "why": why})
            if worker.finished:
                worker.answer(broken=self.generation)

    def tick(self) -> None:
        """Look at the clock; to be called several times per heartbeat."""
        if self.phase != "ended":
            self._timeouts.look()
            self.advance()

    def dump_stacks(self) -> None:
        """Have every member write its stacks to its log."""
        for worker in workers_of(self.living()):
            worker.channel.send({"push": "dump"})

    # -- changes that nobody dies of ----------------------------------------------------------------------------

    def drain(self, name: str, grace_s: float | None = None) -> str | None:
        """Ask a node to hand over and leave; returns why that cannot be, or None."""
        node = self.nodes.get(name)
        if node is None or not node.alive:
            return f"node {name!r} is not in the job; it has {', '.join(n for n in sorted(self.nodes)) or 'none'}"
        if node.state != "member":
            node.state = "left"
            dismiss(node, "drained before it was a member", "drained")
        elif node.drain_deadline is None:
            left_s = min(grace_s or self.config.drain_grace_s, self.config.drain_grace_s)
            # Half of it is enough for a step, or the step is abandoned and the other half is for handing over.
            node.abandon_at, node.drain_deadline = self._clock() + left_s / 2, self._clock() + left_s
            self.event("drain", node=name)
            if node.agent is not None:
                # Should this coordinator be lost, the agent tells the next one.
                node.agent.send({"do": "draining", "grace_s": left_s})
            self.announce()
        return None

    def pending(self) -> Message:
        """The changes members should make at a step boundary."""
        now = self._clock()
        draining = {n.name: round(n.drain_deadline - now, 3) for n in self.living() if n.drain_deadline is not None}
        short = len(self.living()) < self.config.min_nodes
        return {"join": [node.name for node in self._admission.waiting()], "drain": draining, "short": short}

    def announce(self) -> None:
        if self.phase in ("building", "live"):
            for worker in workers_of(self.living()):
                worker.channel.send({"push": "pending", **self.pending()})

    # -- the next generation ------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Do what is due: form the next generation, wait for more nodes, or end the job."""
        if self.phase == "ended":
            return
        if self._formed is not None or not self._all_there():
            return
        workers = [worker for worker in workers_of(self.living()) if not worker.left]
        if workers and all(worker.finished for worker in workers):
            self.end("completed", "", workers[0].request)
        elif all(worker.asks_generation for worker in workers):
            self._admission.decide(workers)

    def form(self, survivors: list[Node], admitted: list[Node], reason: str) -> bool:
        """Form the next generation; False if that is not possible yet, or no more."""
        store = self._open_store()
        if store is None or (reason == "failure" and not self._count_failures()):
            return False
        gathered = self._enter("building")
        self._seconds = {**self._seconds, "gather": round(gathered, 4)} if reason == "failure" else {}
        self.generation += 1
        self._formed, self._store = reason, store
        self.members = survivors + admitted
        for node in admitted:
            node.state, node.joined = "member", self.generation
        ranks = sum(len(node.present) for node in self.members)
        self.event("generation", reason=reason, nodes=[node.name for node in self.members], ranks=ranks)
        self._propose(self.generation, tuple(node.voter for node in self.members))
        return True

    def established(self) -> None:
        """The generation that was formed begins: members learn their place in it."""
        if self._formed is None or self._store is None:
            return
        members = [worker for worker in workers_of(self.members) if not worker.left]
        order = [
            {"node": node.name, "address": node.address, "ranks": len(node.present), "joined": node.joined}
            for node in self.members
        ]
        now = self._clock()
        for rank, worker in enumerate(members):
            worker.phase, worker.since = "building", now
            worker.answer(
                generation=self.generation,
                rank=rank,
                world_size=len(members),
                members=order,
                store_port=self._store[0],
                reason=self._formed,
            )
        self._formed = None
        self.announce()

    def _count_failures(self) -> bool:
        """False if the job has ended because the same failure keeps it from getting anywhere."""
        failures, self._failures = self._failures, []
        deaths = [failure for failure in failures if failure.kind != "collective"]
        signature, count = self._repeats.add(deaths or failures, self.step)
        if count < self.config.max_recoveries_without_progress:
            return True
        listed = "; ".join(map(str, deaths or failures))
        self.end(
            "failed", f"{count} recoveries after step {self._repeats.step} without progress ({signature}): {listed}"
        )
        return False

    def _enter(self, phase: Phase) -> float:
        """Change the phase; returns the seconds the one before has lasted."""
        now = self._clock()
        lasted, self.phase, self.phase_since = now - self.phase_since, phase, now
        return lasted

    def end(self, status: str, reason: str, last: Message | None = None) -> None:
        """Publish the job's result; workers and agents are told."""
        if self.phase == "ended":
            return
        failures = [str(failure) for failure in self._failures]
        self.result = {
            "status": status,
            "reason": reason or None,
            "generation": self.generation,
            "step": self.step,
            "failures": failures,
            "value": (last or {}).get("value"),
        }
        self.event(status, reason=reason, failures=failures)
        self.journal.result(self.result)
        self._enter("ended")
        self._store = None
        tell_end(self.nodes.values(), self.result)
