"""A coordinator's right to rule, kept up over its connections: by its agents' confirmations or by the shared lease."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_lazarus.elastic.election import Charter, Voters
from megatron_lazarus.elastic.messages import Message
from megatron_lazarus.elastic.reign import Reign
from megatron_lazarus.elastic.roster import Node, dismiss
from megatron_lazarus.elastic.settings import ElasticConfig
from megatron_lazarus.elastic.shared_lease import SharedLease

if TYPE_CHECKING:
    from megatron_lazarus.elastic.job import Job

logger = logging.getLogger(__name__)

POLL_S = 0.02


class Ruling:
    """The right of one coordinator.

    ``seed``: the charter of its predecessor; ``dead``: agents (by incarnation) whose end was seen in its election;
    ``lease_until``: see ``SharedLease``.
    """

    job: Job

    def __init__(
        self,
        config: ElasticConfig,
        token: str,
        term: int,
        seed: Charter | None,
        dead: Iterable[str],
        lease_until: float | None,
    ) -> None:
        self._config = config
        self.reign = Reign(term, config.heartbeat_timeout_s, seed)
        self.dead = frozenset(dead)
        self.charter = seed
        self._is_first = seed is None
        self._lease: SharedLease | None = None
        if config.lease_path is not None:
            self._lease = SharedLease(Path(config.lease_path), token, config.heartbeat_timeout_s)
            if lease_until is not None:
                self._lease.valid_until = lease_until
        self.stopped = ""

    @property
    def holds(self) -> bool:
        """Whether nobody else can rule now."""
        now = time.monotonic()
        return not self.stopped and (self.reign.holds(now) if self._lease is None else self._lease.holds(now))

    async def wait(self) -> None:
        """Return while it holds: what is done next must not wait for anything. Never returns once it is lost for good.

        Until then nothing that members say is heard. If that lasts as long as their lease, they are sent away.
        """
        since = time.monotonic()
        limit_s = self._config.lease_s - self._config.heartbeat_timeout_s
        while not self.holds:
            if not self.stopped and time.monotonic() - since > limit_s:
                await self._abdicate()
            await asyncio.sleep(POLL_S)

    async def _abdicate(self) -> None:
        for node in self.job.nodes.values():
            dismiss(node, "its coordinator is out of contact with most nodes", "silent")
        await asyncio.sleep(self._config.heartbeat_interval_s)
        what = "most agents" if self._lease is None else "the storage of its lease"
        self.stopped = f"out of contact with {what}: others may have elected another coordinator"

    # -- agents -------------------------------------------------------------------------------------------------

    def heard(self, node: Node, term: int, sent: float) -> None:
        """An agent says which term it is in, and what it has last received from us."""
        if term > self.reign.term:
            self.stopped = f"node {node.name} follows the coordinator of term {term}; this one is of {self.reign.term}"
        self.reign.confirm(node.incarnation, sent)

    def propose(self, generation: int, voters: Voters) -> None:
        """Have agents accept the charter of a generation; the job is told when enough have."""
        self.charter = self.reign.propose(generation, voters, self.job.check)
        self.tell_agents(self.message())
        self.establish()

    def establish(self) -> None:
        """Look whether the charter proposed last counts by now."""
        if self.charter is None or self.charter.established or not self.holds:
            return
        if self.reign.establish(by_lease=self._lease is not None):
            self.charter = dataclasses.replace(self.charter, established=True)
            self.tell_agents(self.message())
            self.job.established()

    def message(self) -> Message:
        return {"do": "charter", "charter": None if self.charter is None else self.charter.to_json()}

    def tell_agents(self, message: Message) -> None:
        for node in self.job.nodes.values():
            if node.agent is not None:
                node.agent.send(message)

    # -- the shared lease ---------------------------------------------------------------------------------------

    async def keep_lease(self) -> None:
        """Hold the lease, if the job has one; the first coordinator takes it."""
        while self._lease is not None and not self.stopped:
            try:
                if self._lease.holds(time.monotonic()):
                    await asyncio.to_thread(self._lease.renew, self.reign.term)
                elif self._is_first and await asyncio.to_thread(self._lease.is_vacant):
                    self.reign.term = self._lease.newest() + 1
                    self._is_first = not await asyncio.to_thread(self._lease.take, self.reign.term)
            except OSError as error:
                logger.error("the lease in %s: %s", self._config.lease_path, error)
            await asyncio.sleep(self._config.heartbeat_timeout_s / 10)

    def release(self) -> None:
        """The job has ended."""
        if self._lease is not None:
            with contextlib.suppress(OSError):
                self._lease.release()
