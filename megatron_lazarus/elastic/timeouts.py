"""What the coordinator concludes from time alone: who is silent, who is stuck, whose time to leave is over."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from megatron_lazarus.elastic.roster import Failure, Node, Worker, furthest_behind, workers_of
from megatron_lazarus.elastic.settings import BUILD_TIMEOUT_S

if TYPE_CHECKING:
    from megatron_lazarus.elastic.job import Job


class Timeouts:
    """Watches one job; ``look`` is to be called several times per heartbeat."""

    def __init__(self, job: Job, clock: Callable[[], float]) -> None:
        self._job, self._config, self._clock = job, job.config, clock

    def look(self) -> None:
        now = self._clock()
        for node in [node for node in self._job.nodes.values() if node.alive]:
            self._find_silent(node, now)
            if node.alive:
                self._mind_grace(node, now)
        elapsed = now - self._job.phase_since
        workers = [worker for worker in workers_of(self._job.living()) if not worker.left]
        if self._job.phase == "building" and elapsed > 2 * BUILD_TIMEOUT_S:
            self._evict([worker for worker in workers if worker.built != self._job.generation], "build", elapsed)
        elif self._job.phase == "broken" and elapsed > self._config.collective_timeout_s + BUILD_TIMEOUT_S:
            self._evict([worker for worker in workers if worker.request is None], "stuck", elapsed)
        elif self._job.phase == "live":
            self._find_stuck(workers, now)

    def _find_silent(self, node: Node, now: float) -> None:
        limit_s = self._config.heartbeat_timeout_s
        if node.agent is not None and len(node.workers) == node.local_size:
            node.awaited_since = None
        if node.awaited_since is not None and now - node.awaited_since > limit_s:
            why = "has not come to the coordinator that took over"
            self._job.fail_node(node, "silent", why, now - node.awaited_since)
            return
        for worker in node.present:
            silent = now - worker.heard
            # Nobody waits yet for one that still loads libraries, which may keep its other threads from running.
            if silent > (limit_s if node.state == "member" else self._config.lease_s):
                self._job.dump_stacks()
                self._job.fail_node(node, "silent", f"local rank {worker.local_rank} is silent", silent)
                return
        if node.agent is not None and now - node.agent_heard > limit_s:
            self._job.fail_node(node, "silent", "its agent is silent", now - node.agent_heard)

    def _mind_grace(self, node: Node, now: float) -> None:
        if node.drain_deadline is not None and now > node.drain_deadline:
            self._job.fail_node(node, "stuck", "still there at the end of its drain grace")
        elif node.abandon_at is not None and now > node.abandon_at and self._job.phase == "live":
            node.abandon_at = None
            self._job.break_generation(f"node {node.name} must leave before the step in progress ends")

    def _find_stuck(self, workers: list[Worker], now: float) -> None:
        # Those that left the group already wait for the slowest in their request, not in a collective.
        blocked = [worker for worker in workers if worker.phase == "collective" or worker.request is not None]
        longest = max((now - worker.since for worker in blocked), default=0.0)
        if longest <= self._config.collective_timeout_s or all(worker.request is not None for worker in workers):
            return
        if behind := furthest_behind(workers):
            self._evict(behind, "stuck", longest)
        else:
            self._job.dump_stacks()
            failure = Failure("collective", "-", f"all members wait in step {self._job.step}")
            self._job.break_generation(f"all members wait in the same collective for {longest:.1f} s", failure)

    def _evict(self, workers: list[Worker], kind: str, waited_s: float) -> None:
        if not workers:
            return
        self._job.dump_stacks()
        for worker in workers:
            place = f"step {worker.step}, {worker.phase}, collective {worker.collective}"
            self._job.fail_node(worker.node, kind, f"local rank {worker.local_rank} stands at {place}", waited_s)
