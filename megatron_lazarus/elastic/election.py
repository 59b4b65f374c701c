"""How agents choose the next coordinator. Rules only: no sockets and no clock.

With every generation its coordinator hands out a *charter*: whose agents elect, should it be lost. A candidate needs
a strict majority of the last charter's agents. While nobody knows whether a charter has replaced the one before it, a
majority of both is needed: either may be the one by which others vote. A vote is given once per *term*; terms number
coordinators, as generations number worlds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_lazarus.elastic.messages import Message


@dataclass(frozen=True)
class Voter:
    """A node's agent: ``address:port`` is where it answers other agents. ``joined``: as of ``Node``."""

    node: str
    incarnation: str
    address: str
    port: int
    local_size: int
    joined: int

    def to_json(self) -> list[Any]:
        return [self.node, self.incarnation, self.address, self.port, self.local_size, self.joined]


Voters = tuple[Voter, ...]


@dataclass(frozen=True)
class Charter:
    """Who elects after this generation of this term.

    ``voters`` are its members' agents, in order of candidacy; ``previous`` the electorates that count as well until
    the charter is ``established``. ``check``: what the job's workers agree on (``Membership``).
    """

    term: int
    generation: int
    voters: Voters
    previous: tuple[Voters, ...] = ()
    established: bool = False
    check: Message | None = None

    @property
    def age(self) -> tuple[int, int]:
        """Orders charters; of two, the greater is the newer."""
        return self.term, self.generation

    @property
    def electorates(self) -> list[frozenset[str]]:
        """Incarnations of the agents, a majority of each of which is needed."""
        listed = [self.voters] if self.established else [*self.previous, self.voters]
        return [frozenset(voter.incarnation for voter in voters) for voters in listed]

    @property
    def everybody(self) -> dict[str, Voter]:
        """All who may have a vote, by incarnation: candidates first."""
        return {voter.incarnation: voter for voters in (self.voters, *self.previous) for voter in voters}

    def lists(self, incarnation: str) -> bool:
        return any(voter.incarnation == incarnation for voter in self.voters)

    def elects(self, votes: set[str]) -> bool:
        """Whether these votes make a coordinator."""
        return all(2 * len(votes & electorate) > len(electorate) for electorate in self.electorates)

    def is_hopeless(self, dead: set[str]) -> bool:
        """Whether nobody can be elected any more."""
        return not self.elects(set(self.everybody) - dead)

    def to_json(self) -> Message:
        return {
            "term": self.term,
            "generation": self.generation,
            "voters": [voter.to_json() for voter in self.voters],
            "previous": [[voter.to_json() for voter in voters] for voters in self.previous],
            "established": self.established,
            "check": self.check,
        }

    @classmethod
    def from_json(cls, data: Message) -> Charter:
        """Raises KeyError, TypeError or ValueError."""
        return cls(
            int(data["term"]),
            int(data["generation"]),
            tuple(Voter(*entry) for entry in data["voters"]),
            tuple(tuple(Voter(*entry) for entry in voters) for voters in data["previous"]),
            bool(data["established"]),
            data["check"],
        )


class Ballot:
    """What one agent has promised. ``term``: the highest it has voted in, or of a coordinator it follows."""

    def __init__(self, incarnation: str) -> None:
        self.incarnation = incarnation
        self.term = 0
        self.voted_for: str | None = None
        self.charter: Charter | None = None

    def follow(self, term: int) -> bool:
        """Whether a coordinator of that term may be followed; not so if a later one may have been elected."""
        if term < self.term:
            return False
        if term > self.term:
            self.term, self.voted_for = term, None
        return True

    def accept(self, charter: Charter) -> bool:
        """Take a charter from the coordinator; False if its term is over. What is accepted may count on this agent."""
        if charter.term < self.term:
            return False
        self.hold(charter)
        return True

    def hold(self, charter: Charter) -> None:
        mine = self.charter
        if (
            mine is None
            or charter.age > mine.age
            or (charter.age == mine.age and charter.established and not mine.established)
        ):
            self.charter = charter

    def request(self, *, trial: bool) -> Message:
        """Ask for votes in the next term, or (``trial``) whether they would be given: that binds nobody.

        Without the trial, an agent that alone has lost the coordinator would depose it for all others.
        """
        assert self.charter is not None
        if not trial:
            self.term, self.voted_for = self.term + 1, self.incarnation
        term = self.term + trial
        request = {"do": "vote", "trial": trial, "term": term, "candidate": self.incarnation}
        return {**request, "charter": self.charter.to_json()}

    def grant(self, request: Message, orphaned: bool) -> bool:
        """Answer such a request. ``orphaned``: this agent, too, has lost the coordinator."""
        if not orphaned:
            return False
        theirs, term, candidate = Charter.from_json(request["charter"]), int(request["term"]), str(request["candidate"])
        self.hold(theirs)
        assert self.charter is not None
        if theirs.age < self.charter.age or not self.charter.lists(candidate):
            return False
        if term < self.term or (term == self.term and self.voted_for not in (None, candidate)):
            return False
        if not request["trial"]:
            self.term, self.voted_for = term, candidate
        return True
