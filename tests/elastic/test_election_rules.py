"""Never two rulers: the rules of election under every order of messages, losses, deaths and pauses that chance finds.

The model has no sockets and no clock: it delivers, drops and delays what the rules say in any order. That it would find
a violation is shown by breaking the rules one by one.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from megatron_lazarus.elastic.election import Ballot, Charter, Voter
from megatron_lazarus.elastic.reign import Reign, election_timeout_s
from megatron_lazarus.elastic.settings import ElasticConfig

LIMIT, TIMEOUT = 4.0, 6.0
Key = str | int
"""An agent's name, or the number of a coordinator."""


def voters(*names: str) -> tuple[Voter, ...]:
    return tuple(Voter(name, name, "host", 1, 1, 1) for name in names)


@dataclass
class Agent:
    ballot: Ballot
    alive: bool = True
    follows: int = 0
    contact: float = 0.0
    heard: float = 0.0
    knows_dead: bool = False
    asking: dict[str, Any] | None = None
    votes: set[str] = field(default_factory=set)


@dataclass
class Ruler:
    reign: Reign
    generation: int
    alive: bool = True
    stopped: bool = False

    def rules(self, now: float) -> bool:
        return self.alive and not self.stopped and self.reign.holds(now)


class Model:
    """One job; ``step`` does something at random. Coordinators are numbered, agents named."""

    ballot: type[Ballot] = Ballot
    reign: type[Reign] = Reign
    timeout = TIMEOUT

    def __init__(self, seed: int) -> None:
        self.random, self.now = random.Random(seed), 0.0
        names = "abcde"[: self.random.randint(2, 5)]
        first = Charter(1, 1, voters(*names), established=True)
        self.agents = {name: Agent(self.ballot(name)) for name in names}
        self.rulers = [Ruler(self.reign(1, LIMIT, first), 1)]
        self.elections = 0
        self.messages: list[tuple[Key, Key, Callable[..., None], tuple[Any, ...]]] = []
        self.away: set[Key] = set()
        for name, agent in self.agents.items():
            agent.ballot.follow(1)
            agent.ballot.hold(first)
            self.rulers[0].reign.confirm(name, 0.0)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
            ruling = [number for number, ruler in enumerate(self.rulers) if ruler.rules(self.now)]
            assert len(ruling) <= 1, f"{ruling} rule at {self.now}"

    def step(self) -> None:
        chance = self.random.random()
        if chance < 0.20:
            self.now += 0.5
        elif chance < 0.21:
            # The network is cut anew, or heals.
            everybody: list[Key] = [*self.agents, *range(len(self.rulers))]
            self.away = set(self.random.sample(everybody, self.random.randrange(len(everybody))))
        elif chance < 0.70 and self.messages:
            sender, receiver, deliver, arguments = self.messages.pop(self.random.randrange(len(self.messages)))
            if (sender in self.away) == (receiver in self.away):
                deliver(*arguments)
        else:
            self._act(*self.random.choice(list(self.agents.items())))

    def send(self, sender: Key, receiver: Key, deliver: Callable[..., None], *arguments: Any) -> None:
        self.messages.append((sender, receiver, deliver, arguments))

    def _act(self, name: str, agent: Agent) -> None:
        if not agent.alive:
            return
        ruler, chance = self.rulers[agent.follows], self.random.random()
        if chance < 0.45:
            self.send(name, agent.follows, self.heartbeat, name, agent.follows, agent.heard, agent.ballot.term)
        elif chance < 0.60:
            agent.knows_dead |= not ruler.alive
            if self.orphaned(agent):
                self.stand(name, agent)
        elif chance < 0.75:
            self.look_around(name, agent)
        elif chance < 0.86:
            self.form(agent.follows)
        elif chance < 0.875:
            ruler.alive = False
        elif chance < 0.89:
            # The end of a process is told to everybody it was connected to, at any time.
            agent.alive = False
            for number in range(len(self.rulers)):
                self.send(name, number, self.hear_of_death, name, number)

    def orphaned(self, agent: Agent) -> bool:
        return agent.knows_dead or self.now - agent.contact > self.timeout

    # -- what the programs do -----------------------------------------------------------------------------------

    def heartbeat(self, name: str, number: int, heard: float, term: int) -> None:
        ruler = self.rulers[number]
        if not ruler.alive:
            return
        ruler.stopped |= term > ruler.reign.term
        ruler.reign.confirm(name, heard)
        self.send(number, name, self.acknowledge, name, number, self.now)

    def acknowledge(self, name: str, number: int, sent: float) -> None:
        agent = self.agents[name]
        if agent.alive and agent.follows == number:
            agent.contact, agent.heard = self.now, max(agent.heard, sent)

    def hear_of_death(self, name: str, number: int) -> None:
        self.rulers[number].reign.died(name, self.now)

    def form(self, number: int) -> None:
        """The coordinator goes on to a generation of some of the agents that are left."""
        ruler = self.rulers[number]
        left = [name for name, agent in self.agents.items() if agent.alive]
        # Mostly it lets the one before be established first.
        hasty = ruler.reign._proposed is not None and self.random.random() < 0.9
        if not ruler.rules(self.now) or not left or hasty:
            return
        chosen = self.random.sample(left, self.random.randint(1, len(left)))
        ruler.generation += 1
        charter = ruler.reign.propose(ruler.generation, voters(*sorted(chosen)), None)
        for name in self.agents:
            self.send(number, name, self.accept, name, number, charter)

    def accept(self, name: str, number: int, charter: Charter) -> None:
        agent = self.agents[name]
        if agent.alive and agent.follows == number and agent.ballot.accept(charter):
            self.send(name, number, self.accepted, name, number, charter)

    def accepted(self, name: str, number: int, charter: Charter) -> None:
        ruler = self.rulers[number]
        ruler.reign.accepted(name, charter.generation)
        if ruler.rules(self.now) and ruler.reign.establish():
            told = Charter(charter.term, charter.generation, charter.voters, established=True)
            for other in self.agents:
                self.send(number, other, self.accept, other, number, told)

    def stand(self, name: str, agent: Agent) -> None:
        charter = agent.ballot.charter
        assert charter is not None
        if not charter.lists(name):
            return
        agent.asking, agent.votes = agent.ballot.request(trial=False), {name}
        for other in self.agents:
            if other != name:
                self.send(name, other, self.consider, name, other, agent.asking)
        self.count(name)

    def consider(self, candidate: str, name: str, request: dict[str, Any]) -> None:
        agent = self.agents[name]
        if agent.alive:
            granted = agent.ballot.grant(request, self.orphaned(agent))
            self.send(name, candidate, self.answer, candidate, name, request, granted, agent.ballot.charter)

    def answer(self, candidate: str, name: str, request: dict[str, Any], granted: bool, charter: Charter) -> None:
        agent = self.agents[candidate]
        if agent.alive and agent.asking is request:
            agent.ballot.hold(charter)
            if granted:
                agent.votes.add(name)
            self.count(candidate)

    def count(self, name: str) -> None:
        agent = self.agents[name]
        charter, asking = agent.ballot.charter, agent.asking
        assert charter is not None
        assert asking is not None
        same = charter.age == Charter.from_json(asking["charter"]).age and agent.ballot.term == asking["term"]
        if same and charter.elects(agent.votes):
            agent.asking = None
            self.elections += 1
            self.rulers.append(Ruler(self.reign(asking["term"], LIMIT, charter), charter.generation))
            self.follow(name, agent, len(self.rulers) - 1)

    def look_around(self, name: str, agent: Agent) -> None:
        """Hear of another coordinator."""
        number = self.random.randrange(len(self.rulers))
        reached = (name in self.away) == (number in self.away)
        if reached and self.rulers[number].alive and number != agent.follows:
            self.follow(name, agent, number)

    def follow(self, name: str, agent: Agent, number: int) -> None:
        before = agent.follows
        if agent.ballot.follow(self.rulers[number].reign.term):
            agent.follows, agent.contact, agent.heard, agent.knows_dead = number, self.now, self.now, False
            self.send(name, before, self.heartbeat, name, before, -TIMEOUT, agent.ballot.term)
            self.send(name, number, self.heartbeat, name, number, self.now, agent.ballot.term)


def test_there_are_never_two_rulers() -> None:
    elections = 0
    for seed in range(600):
        model = Model(seed)
        model.run(400)
        elections += model.elections
    print(f"{elections} elections")
    assert elections > 300


class GrantsInContact(Ballot):
    def grant(self, request: dict[str, Any], orphaned: bool) -> bool:
        return super().grant(request, True)


class VotesTwice(Ballot):
    def grant(self, request: dict[str, Any], orphaned: bool) -> bool:
        self.voted_for = None
        return super().grant(request, orphaned)


class ForgetsTerms(Ballot):
    def follow(self, term: int) -> bool:
        self.term = term
        return True


class CountsEveryDeath(Reign):
    def died(self, agent: str, now: float) -> None:
        self._dead.add(agent)


class TrustsTooLong(Reign):
    def __init__(self, term: int, limit_s: float, seed: Charter | None = None) -> None:
        super().__init__(term, 3 * limit_s, seed)


class EstablishesAtOnce(Reign):
    def establish(self, *, by_lease: bool = False) -> bool:
        return super().establish(by_lease=True)


class Ungrounded(Reign):
    def confirm(self, agent: str, sent: float) -> None:
        super().confirm(agent, sent + LIMIT)


@pytest.mark.parametrize(
    "broken",
    [
        GrantsInContact,
        VotesTwice,
        ForgetsTerms,
        CountsEveryDeath,
        TrustsTooLong,
        EstablishesAtOnce,
        Ungrounded,
    ],
)
def test_each_rule_is_needed(broken: type[Ballot] | type[Reign]) -> None:
    name = "ballot" if issubclass(broken, Ballot) else "reign"
    model = type("Broken", (Model,), {name: broken})
    with pytest.raises(AssertionError, match="rule at"):  # noqa: PT012
        for seed in range(4000):
            model(seed).run(400)


def test_votes_and_rule_exclude_each_other() -> None:
    """By brute force: whoever has voted for another is not sure to be with the old one any more."""
    names = "abcde"
    for count in range(1, 6):
        for split in range(1 << count):
            before, after = names[:count], [name for bit, name in enumerate(names[:count]) if split >> bit & 1]
            charters = [Charter(1, 1, voters(*before), established=True)]
            if after:
                charters.append(Charter(1, 2, voters(*after), (voters(*before),)))
            for charter, size in itertools.product(charters, range(count + 1)):
                for votes in itertools.combinations(before, size):
                    reign = Reign(1, LIMIT, charter)
                    for name in set(before) - set(votes):
                        reign.confirm(name, 0.0)
                    assert not (charter.elects(set(votes)) and reign.holds(0.0))


def test_exactly_half_may_be_silent_but_elects_nobody() -> None:
    charter = Charter(1, 1, voters(*"abcd"), established=True)
    reign = Reign(1, LIMIT, charter)
    for name in "ab":
        reign.confirm(name, 10.0)
    assert reign.holds(10 + LIMIT)
    assert not reign.holds(10.1 + LIMIT)
    assert not charter.elects({"c", "d"})
    assert charter.elects({"b", "c", "d"})
    assert charter.is_hopeless({"a", "b"})
    assert not charter.is_hopeless({"a"})


def test_agents_wait_longer_than_a_coordinator_rules() -> None:
    for timeout in (0.5, 5.0, 60.0):
        config = ElasticConfig(heartbeat_interval_s=timeout / 4, heartbeat_timeout_s=timeout, lease_s=3 * timeout)
        assert timeout < election_timeout_s(config) < config.lease_s


def test_who_has_accepted_a_charter_elects_by_no_older_one() -> None:
    """Else those that a charter has dropped could elect with the help of those that have accepted it."""
    old, new = (Charter(1, 1, voters(*"abc"), established=True), Charter(1, 2, voters("a"), (voters(*"abc"),)))
    ballots = {name: Ballot(name) for name in "abc"}
    for ballot in ballots.values():
        ballot.follow(1)
        assert ballot.accept(old)
    assert ballots["b"].accept(new)
    assert not ballots["b"].grant(ballots["c"].request(trial=False), orphaned=True)
    # The other way round the newer one is learned; until it is established, both electorates count.
    candidate = _with(new, "a")
    assert not ballots["c"].grant(candidate.request(trial=False), orphaned=True), "it has stood itself in that term"
    assert ballots["c"].grant(candidate.request(trial=False), orphaned=True)
    assert ballots["c"].charter == new
    assert not new.elects({"a"})
    assert new.elects({"a", "c"})
    # The coordinator whose charter it was has been voted out meanwhile.
    assert not ballots["c"].accept(Charter(1, 3, voters(*"abc")))


def _with(charter: Charter, name: str) -> Ballot:
    ballot = Ballot(name)
    ballot.follow(charter.term)
    ballot.hold(charter)
    return ballot


def test_charters_survive_the_network() -> None:
    charter = Charter(3, 7, voters("a", "b"), (voters("a"), voters("c")), check={"code": "x"})
    assert Charter.from_json(charter.to_json()) == charter
    assert charter.electorates == [frozenset("a"), frozenset("c"), frozenset("ab")]
