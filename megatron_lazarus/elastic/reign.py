"""Whether a coordinator still rules. Rules only: no sockets and no clock.

Agents may elect another coordinator when they have not heard of theirs for longer than ``election_timeout_s``. So it
rules as long as, in every electorate, at most half of the agents can have lost it: those that have confirmed within
the (shorter) heartbeat limit what it has sent them cannot, nor can those that have died within it. What it does on the
strength of a new charter must wait until so many agents have accepted that charter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from megatron_lazarus.elastic.election import Charter, Voters
from megatron_lazarus.elastic.settings import ElasticConfig


def election_timeout_s(config: ElasticConfig) -> float:
    """Silence after which an agent votes: half as long again as a coordinator may rule on a confirmation."""
    return 1.5 * config.heartbeat_timeout_s


class Reign:
    """One coordinator's. ``seed`` is the charter by which it was elected; the first coordinator has none.

    Agents are named by incarnation. Times are those of one clock, in seconds.
    """

    def __init__(self, term: int, limit_s: float, seed: Charter | None = None) -> None:
        self.term, self._limit_s = term, limit_s
        self._electorates = [] if seed is None else seed.electorates
        self._voters: tuple[Voters, ...] = ()
        if seed is not None:
            self._voters = (seed.voters,) if seed.established else (*seed.previous, seed.voters)
        self._confirmed: dict[str, float] = {}
        self._dead: set[str] = set()
        self._proposed: Charter | None = None
        self._accepted: set[str] = set()

    def holds(self, now: float) -> bool:
        """Whether nobody else can have been elected by now."""
        sure = {one for one, time in self._confirmed.items() if now - time <= self._limit_s}
        return self._suffices(sure)

    def _suffices(self, sure: Iterable[str]) -> bool:
        certain = self._dead.union(sure)
        return all(2 * len(electorate - certain) <= len(electorate) for electorate in self._electorates)

    def confirm(self, agent: str, sent: float) -> None:
        """The agent has received what was sent to it at that time, and had given its vote to nobody else."""
        self._confirmed[agent] = max(sent, self._confirmed.get(agent, -math.inf))

    def died(self, agent: str, now: float) -> None:
        """The agent's process has ended. Only if it was sure to be with us until now, it has never voted otherwise."""
        if now - self._confirmed.get(agent, -math.inf) <= self._limit_s:
            self._dead.add(agent)

    def propose(self, generation: int, voters: Voters, check: dict[str, object] | None) -> Charter:
        """The charter of the next generation, to be sent to all agents."""
        self._proposed = Charter(self.term, generation, voters, self._voters, check=check)
        self._accepted = set()
        return self._proposed

    def accepted(self, agent: str, generation: int) -> None:
        """The agent has accepted that generation's charter."""
        if self._proposed is not None and generation == self._proposed.generation:
            self._accepted.add(agent)

    def establish(self, *, by_lease: bool = False) -> bool:
        """Whether the proposed charter counts from now on: nobody can be elected by an older one any more.

        ``by_lease``: nobody is elected, anyway.
        """
        if self._proposed is None or not (by_lease or self._suffices(self._accepted)):
            return False
        self._voters = (self._proposed.voters,)
        self._electorates = [frozenset(voter.incarnation for voter in self._proposed.voters)]
        self._proposed = None
        return True
