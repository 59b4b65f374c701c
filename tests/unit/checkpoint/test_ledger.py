"""The lost-token ledger against one that remembers every single token."""

from __future__ import annotations

import random

import numpy as np
import pytest

from megatron_lazarus.checkpoint.ledger import Ledger, choose_k
from megatron_lazarus.checkpoint.selection import Rotation

STEPS = 600

Token = tuple[int, int]
"""(step, number)"""


class TokenByToken:
    """A run in which each expert's state is the set of tokens that shaped it; losing state is losing set members."""

    def __init__(self, layers: int, experts: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.layers, self.experts = layers, experts
        self.step = 0
        self.state: list[list[set[Token]]] = [[set() for _ in range(experts)] for _ in range(layers)]
        self.seen: list[set[Token]] = [set() for _ in range(layers)]
        self.parts = [[frozenset[Token]() for _ in range(experts)] for _ in range(layers)]

    def train(self, tokens: int) -> list[np.ndarray]:
        loads = [np.zeros(self.experts) for _ in range(self.layers)]
        # A step that is done again is the same step: the same tokens go the same way.
        source = random.Random(self.step)
        for layer in range(self.layers):
            for number in range(tokens):
                expert = min(int(source.expovariate(0.6)), self.experts - 1)
                self.state[layer][expert].add((self.step, number))
                self.seen[layer].add((self.step, number))
                loads[layer][expert] += 1
        self.step += 1
        return loads

    def save(self, selection: list[list[int]]) -> None:
        for layer, experts in enumerate(selection):
            for expert in experts:
                self.parts[layer][expert] = frozenset(self.state[layer][expert])

    def lose(self, lost: list[tuple[int, int]]) -> None:
        for layer, expert in lost:
            self.state[layer][expert] = set(self.parts[layer][expert])

    def copy(self) -> TokenByToken:
        other = TokenByToken(self.layers, self.experts, 0)
        other.step = self.step
        other.state = [[set(state) for state in row] for row in self.state]
        other.seen = [set(seen) for seen in self.seen]
        other.parts = [list(row) for row in self.parts]
        return other

    def plt(self, planned_steps: int, tokens: int) -> float:
        missing = [
            len(self.seen[layer] - set().union(*self.state[layer])) / (planned_steps * tokens)
            for layer in range(self.layers)
        ]
        return sum(missing) / self.layers


class Both:
    """The same run in the product's words."""

    def __init__(self, layers: int, experts: int, seed: int, planned: int, tokens: int) -> None:
        self.truth = TokenByToken(layers, experts, seed)
        self.ledger, self.rotation = Ledger([experts] * layers), Rotation([experts] * layers)
        self.planned, self.tokens, self.number = planned, tokens, 0
        self.ledger.planned_steps = planned
        self.at_save = self.ledger.assigned.copy()
        self.published: tuple[dict, Rotation, TokenByToken] | None = None

    def train(self) -> None:
        self.ledger.add(self.truth.train(self.tokens))

    def select(self, k: int) -> list[list[int]]:
        return self.rotation.select("sequential", k, [row.tolist() for row in self.ledger.unsaved()])

    def save(self, k: int) -> None:
        selection = self.select(k)
        self.number += 1
        self.rotation.advance(selection, self.number)
        self.truth.save(selection)
        self.ledger.save({(at, e): self.ledger.held[at][e] for at, row in enumerate(selection) for e in row})
        self.at_save = self.ledger.assigned.copy()
        self.published = self.ledger.to_json(), self.rotation.copy(), self.truth.copy()

    def partial_loss(self, lost: list[tuple[int, int]]) -> None:
        self.ledger.lose({(at, e): float(len(self.truth.parts[at][e])) for at, e in lost})
        self.truth.lose(lost)

    def reload(self) -> None:
        """Everything from the last checkpoint: time goes back to it, and each expert to its own last save."""
        assert self.published is not None
        data, rotation, truth = self.published
        self.truth, self.rotation = truth.copy(), rotation.copy()
        every = [(at, e) for at in range(self.truth.layers) for e in range(self.truth.experts)]
        self.ledger.restore(data)
        self.partial_loss(every)

    def check(self) -> None:
        assert self.ledger.plt() == pytest.approx(self.truth.plt(self.planned, self.tokens), abs=1e-12)
        assert self.ledger.plt(so_far=True) == pytest.approx(self.truth.plt(self.truth.step, self.tokens), abs=1e-12)
        for layer in range(self.truth.layers):
            for expert in range(self.truth.experts):
                state, part = self.truth.state[layer][expert], self.truth.parts[layer][expert]
                assert self.ledger.held[layer][expert] == len(state)
                assert self.ledger.unsaved()[layer][expert] == len(state - part)


@pytest.mark.parametrize("seed", range(25))
def test_equals_a_ledger_of_single_tokens(seed: int) -> None:
    source = random.Random(seed)
    layers, experts = source.randint(1, 3), source.randint(1, 6)
    run = Both(layers, experts, seed, planned=80, tokens=10)
    run.train()
    run.save(experts)
    for _ in range(60):
        what = source.random()
        if what < 0.6:
            run.train()
        elif what < 0.8:
            run.save(source.randint(1, experts))
        elif what < 0.95:
            every = [(layer, expert) for layer in range(layers) for expert in range(experts)]
            run.partial_loss(source.sample(every, source.randint(1, len(every))))
        else:
            run.reload()
        run.check()


def _twenty_faults(limit: float, dynamic: bool, seed: int, reload: bool) -> tuple[float, list[int]]:
    """Train, save every 3 steps, fail 20 times; (PLT by single tokens, K of every save)."""
    source = random.Random(seed)
    run = Both(2, 8, seed, planned=STEPS, tokens=4)
    run.train()
    run.save(8)
    faults = sorted(source.sample(range(30, STEPS - 30), 20))
    ks = []
    for step in range(1, STEPS):
        run.train()
        if step % 3 == 0:
            k = 1
            if dynamic:
                k = choose_k(1, 8, limit, lambda k, run=run: _if_lost(run, k))
            ks.append(k)
            run.save(k)
        if faults and step >= faults[0]:
            faults.pop(0)
            if reload:
                run.reload()
            else:
                run.partial_loss([(layer, source.randrange(8)) for layer in range(2)])
    run.check()
    return run.truth.plt(STEPS, 4), ks


def _if_lost(run: Both, k: int) -> float:
    chosen = run.select(k)
    unsaved = run.ledger.unsaved()
    left = np.array([row.sum() - row[e].sum() for row, e in zip(unsaved, chosen, strict=True)])
    return run.ledger.fraction((run.ledger.lost() + left + run.ledger.assigned - run.at_save).tolist())


@pytest.mark.parametrize("reload", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_dynamic_k_stays_within_the_limit(seed: int, reload: bool) -> None:
    limit = 0.04 if reload else 0.01
    fixed, _ = _twenty_faults(limit, False, seed, reload)
    dynamic, ks = _twenty_faults(limit, True, seed, reload)
    assert fixed > limit, "the faults must matter"
    assert dynamic <= limit
    assert min(ks) == 1
    assert max(ks) > 1


def test_k_doubles_and_falls_again() -> None:
    room = {1: 0.5, 2: 0.3, 4: 0.1, 8: 0.0}
    assert choose_k(1, 6, 0.2, lambda k: room[k]) == 4
    assert choose_k(1, 6, 0.05, lambda k: room[k]) == 6
    assert choose_k(1, 6, 0.6, lambda k: room[k]) == 1
    assert choose_k(2, 6, 0.6, lambda k: room[k]) == 2
