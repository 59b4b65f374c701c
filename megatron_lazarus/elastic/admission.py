"""What comes after a generation that all its members have left: the next one, and with whom; waiting; or the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from megatron_lazarus.elastic.roster import Node, Worker, begin_same_step, natural

if TYPE_CHECKING:
    from megatron_lazarus.elastic.job import Job


class Admission:
    """Decides for one job; ``decide`` is to be called whenever something has changed, and as time passes."""

    def __init__(self, job: Job, clock: Callable[[], float]) -> None:
        self._job, self._config, self._clock = job, job.config, clock
        self._short_since: float | None = None

    def waiting(self) -> list[Node]:
        """Nodes in the lobby, all of whose workers ask to join, as many as the job has room for."""
        lobby = [node for node in self._job.nodes.values() if node.state == "waiting"]
        ready = sorted(lobby, key=lambda node: natural(node.name))
        if self._config.max_nodes is None:
            return ready
        staying = [node for node in self._job.living() if node.drain_deadline is None]
        return ready[: max(0, self._config.max_nodes - len(staying))]

    def decide(self, workers: list[Worker]) -> None:
        """``workers``: all living ones of the current generation, which have asked for the next."""
        job, config, survivors = self._job, self._config, self._job.living()
        waiting = self.waiting()
        coming = [node for node in job.nodes.values() if node.state in ("starting", "waiting")]
        short, least = len(survivors) < config.min_nodes, config.min_nodes if job.generation else config.wanted_nodes
        unbroken = job.phase in ("building", "live")
        if unbroken and survivors and not short:
            # Members agree on whom they admit; one that was called back from its finish admits nobody.
            wanted = set.intersection(*(set((worker.request or {}).get("admit", ())) for worker in workers))
            admitted, reason = [node for node in waiting if node.name in wanted], "change"
        elif not short:
            admitted, reason = [], "failure"
        elif survivors and not begin_same_step(workers):
            # A newcomer begins with a step: what else is in progress is completed first, by however few.
            admitted, reason, least = [], "failure", 1
        else:
            admitted, reason = waiting, "start" if not job.generation else "change" if unbroken else "failure"
        if len(survivors) + len(admitted) >= least:
            self._form(survivors, admitted, reason)
        elif job.generation and not survivors and not coming:
            drained = all(node.state == "left" for node in job.members)
            job.end("drained" if drained else "failed", "all nodes have left" if drained else "no node is left")
        elif job.generation:
            self._wait(survivors, admitted, reason)
        elif job.nodes:
            self._wait_for_the_start(admitted, bool(coming))

    def _form(self, survivors: list[Node], admitted: list[Node], reason: str) -> None:
        if self._job.form(survivors, admitted, reason):
            self._short_since = None

    def _wait(self, survivors: list[Node], admitted: list[Node], reason: str) -> None:
        total, least = len(survivors) + len(admitted), self._config.min_nodes
        if not self._window_is_over(total):
            return
        if total >= least:
            self._form(survivors, admitted, reason)
        else:
            self._job.end("failed", f"{total} nodes are left, min_nodes is {least}")

    def _wait_for_the_start(self, ready: list[Node], coming: bool) -> None:
        """Nothing is lost by waiting for nodes that are still in a queue, unless all that have come have failed."""
        if len(ready) >= self._config.min_nodes:
            if self._window_is_over(len(ready)):
                self._form([], ready, "start")
        elif coming:
            self._short_since = None
        elif len(self._job.nodes) >= self._config.wanted_nodes or self._window_is_over(0):
            self._job.end("failed", "every node failed before the start")

    def _window_is_over(self, nodes: int) -> bool:
        """Whether the job has been short of nodes for ``join_window_s``."""
        if self._short_since is None:
            self._short_since = self._clock()
            self._job.event("short of nodes", nodes=nodes, min_nodes=self._config.min_nodes)
        return self._clock() - self._short_since > self._config.join_window_s
